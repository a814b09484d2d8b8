"""Optional packages, imported when they are used."""

import importlib
from typing import Any

from kmodels.core.errors import InputError


def need(module: str, package: str, extra: str) -> Any:
    """Imports a module of an optional package.

    Raises:
        InputError: if it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == module:
            raise InputError(
                f"this needs {package}, which is not installed: pip install 'kmodels[{extra}]'"
            ) from None
        reason = " ".join(str(error).split())
        raise InputError(
            f"{package} cannot be imported here ({reason}): pip install {missing or package}"
        ) from None
