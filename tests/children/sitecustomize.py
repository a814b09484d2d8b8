"""Spares processes of tests what Keras imports for wrappers and figures, and garbage collections.

Python imports a file of this name as it starts, where its folder is on PYTHONPATH: conftest.py puts
it there for the processes that tests start. Whoever else imports these packages has them.
"""

import gc
import sys
from importlib.machinery import ModuleSpec

# What Keras imports if it is installed and can do without, and the modules that ask for it. Only
# Orbax' callback wants JAX on another backend, where a process takes a second to load it.
PLOTS = ("keras.src.wrappers.", "keras.src.visualization.")
SPARED = {
    **dict.fromkeys(("sklearn", "matplotlib", "matplotlib.pyplot"), PLOTS),
    "jax": ("keras.src.callbacks.orbax_checkpoint",),
}

# At Python's own threshold the garbage collector takes a tenth of a suite, and of an import.
gc.set_threshold(50_000, 20, 20)


class Spared:
    """A finder that has no module for those who ask, and leaves all others to the next one."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Raises `ModuleNotFoundError` where Keras asks for what it can do without."""
        if name in SPARED:
            frame = sys._getframe(1)
            while frame is not None and frame.f_globals["__name__"].startswith("importlib."):
                frame = frame.f_back
            if frame is not None and frame.f_globals["__name__"].startswith(SPARED[name]):
                raise ModuleNotFoundError(f"{name} is left out in tests", name=name)
        return None


sys.meta_path.insert(0, Spared())  # pyright: ignore[reportArgumentType]
