"""Spares processes of tests what Keras imports for wrappers and figures alone.

Python imports a file of this name as it starts, where its folder is on PYTHONPATH: conftest.py puts
it there for the processes that tests start. Whoever else imports these packages has them.
"""

import sys
from importlib.machinery import ModuleSpec

SPARED = {"sklearn", "matplotlib", "matplotlib.pyplot"}
# Where Keras imports them, and does without them where they are not installed.
ASKING = ("keras.src.wrappers.", "keras.src.visualization.")


class Spared:
    """A finder that has no module for those who ask, and leaves all others to the next one."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Raises `ModuleNotFoundError` where Keras asks for what it can do without."""
        if name in SPARED:
            frame = sys._getframe(1)
            while frame is not None and frame.f_globals["__name__"].startswith("importlib."):
                frame = frame.f_back
            if frame is not None and frame.f_globals["__name__"].startswith(ASKING):
                raise ModuleNotFoundError(f"{name} is left out in tests", name=name)
        return None


sys.meta_path.insert(0, Spared())  # pyright: ignore[reportArgumentType]
