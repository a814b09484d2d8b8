"""The scope of transforms: generic ops if needed, and errors in one line."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from kmodels.core.dispatch import backend_module, generic_only
from kmodels.core.errors import InputError
from kmodels.transforms.engine import RECURSION, TransformsBackend

engine = backend_module("kmodels.transforms.engine", TransformsBackend)


@contextmanager
def tracing(name: str) -> Iterator[None]:
    """Surrounds the functions that a transform runs.

    Args:
        name: name of the transform, the prefix of errors.

    Raises:
        InputError: for functions that the backend cannot trace.
    """
    try:
        with generic_only() if name in engine.GENERIC else nullcontext():
            yield
    except InputError:
        raise
    except RecursionError:
        raise InputError(f"{name}: {RECURSION}") from None
    except Exception as error:
        reason = engine.explain(error)
        if reason is None:
            raise
        raise InputError(f"{name}: {reason}") from error
