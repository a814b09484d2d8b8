"""JAX's part of `kmodels.core.precision`."""

import os

import jax

from kmodels.core.framework_internals import internals_jax


def set_matmul_precision(precision: str) -> None:
    """Sets `jax_default_matmul_precision`; `None` is what JAX starts with."""
    jax.config.update("jax_default_matmul_precision", None if precision == "default" else precision)


def matmul_precision() -> str:
    """Returns the setting as JAX names it."""
    return getattr(jax.config, "jax_default_matmul_precision") or "default"  # noqa: B009


def lacks_float64() -> str | None:
    """Returns why arrays of float64 become float32 (a clause that says what to do), or None."""
    if getattr(jax.config, "jax_enable_x64"):  # noqa: B009
        return None
    return "JAX has float32 alone until jax.config.update('jax_enable_x64', True) is called"


def memory_fraction(fraction: float) -> bool:
    """Sets the variable that XLA's client reads when it starts; returns whether it still can."""
    if internals_jax.backends_are_initialized():
        return False
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(fraction)
    return True
