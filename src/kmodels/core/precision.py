"""Dtypes that a backend holds, how exactly float32 products are computed, and GPU memory."""

from typing import Literal, Protocol, get_args

import keras

from kmodels.core.dispatch import backend, backend_module
from kmodels.core.errors import InputError
from kmodels.core.types import DTypeLike

MatmulPrecision = Literal["highest", "high", "default"]


class PrecisionBackend(Protocol):
    """The switches of one backend."""

    def set_matmul_precision(self, precision: str) -> None:
        """Sets how float32 products and convolutions are computed: one of `MatmulPrecision`."""
        ...

    def matmul_precision(self) -> str:
        """Returns the setting in the backend's own words."""
        ...

    def lacks_float64(self) -> str | None:
        """Returns why float64 becomes float32 (a clause that says what to do), or None."""
        ...

    def memory_fraction(self, fraction: float) -> bool:
        """Limits the share of each GPU's memory; returns whether that is still possible."""
        ...


_native = backend_module("kmodels.core.precision", PrecisionBackend)


def set_matmul_precision(precision: MatmulPrecision) -> None:
    """Chooses how float32 matrix products and convolutions are computed, on every backend alike.

    Call it before a model is built: a step that is compiled already keeps its precision. Products
    on a CPU are exact whatever is chosen here.

    Args:
        precision: `"highest"` for float32 throughout, `"high"` to allow TF32 (10 bits of mantissa,
            several times faster on NVIDIA GPUs since Ampere), `"default"` for what the framework
            starts with.

    Raises:
        InputError: for any other value.
    """
    if precision not in get_args(MatmulPrecision):
        allowed = ", ".join(map(repr, get_args(MatmulPrecision)))
        raise InputError(f"set_matmul_precision got {precision!r}; allowed: {allowed}.")
    _native.set_matmul_precision(precision)


def matmul_precision() -> str:
    """Returns what the framework says its float32 matrix products are computed with."""
    return _native.matmul_precision()


def memory_fraction(fraction: float) -> None:
    """Limits the share of each GPU's memory that this process takes; without a GPU it does nothing.

    Call it before anything runs on a device.

    Args:
        fraction: share of the memory, in (0, 1].

    Raises:
        InputError: if the fraction is out of range, or if the framework has its devices already.
    """
    if not 0.0 < fraction <= 1.0:
        raise InputError(f"memory_fraction got {fraction}; it must be in (0, 1].")
    if not _native.memory_fraction(fraction):
        raise InputError(
            f"memory_fraction({fraction}) comes too late: {backend()} has started its devices; "
            "call it before making a tensor or a model."
        )


def check_policy(policy: DTypeLike) -> None:
    """Stops before a model is made in a dtype that there is not.

    Args:
        policy: as Keras takes it; None is the global one.

    Raises:
        InputError: for what is no dtype policy of Keras, or for float64, in the policy or as Keras'
            `floatx`, where the backend would make float32 of it.
    """
    try:
        found = keras.dtype_policies.get(policy)
    except (TypeError, ValueError):
        raise InputError(
            f"the dtype is {policy!r}; give float32, bfloat16, mixed_bfloat16 or another policy of "
            "Keras"
        ) from None
    wanted = {"dtype": found.compute_dtype, "floatx": keras.config.floatx()}
    for name, dtype in wanted.items():
        if dtype == "float64" and (reason := _native.lacks_float64()):
            raise InputError(f"{name} is float64, and {reason}; or choose {name} float32")
