"""Saves the processes of tests what Keras imports and does not need: half of their start.

Python imports a file of this name when it starts if its folder is on PYTHONPATH: conftest.py puts
it there for the processes that tests start. Scikit-learn and Matplotlib are missing for Keras
alone. `torch._dynamo`, of which Keras uses a decorator, is loaded when more of it is used: that
takes a fifth of the time of a small run on PyTorch.
"""

import functools
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

SPARED = {"sklearn", "matplotlib", "matplotlib.pyplot"}
# Where Keras imports them, and does without them where they are not installed.
ASKING = ("keras.src.wrappers.", "keras.src.visualization.")
POSTPONED = "torch._dynamo"


class Spared:
    """A finder for these modules, which leaves all others to the next one."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        """Raises `ModuleNotFoundError` if Keras asks for a package that it does not need."""
        if name in SPARED:
            frame = sys._getframe(1)
            while frame is not None and frame.f_globals["__name__"].startswith("importlib."):
                frame = frame.f_back
            if frame is not None and frame.f_globals["__name__"].startswith(ASKING):
                raise ModuleNotFoundError(f"{name} is left out in tests", name=name)
        if name == POSTPONED and (spec := PathFinder.find_spec(name, path)) is not None:
            spec.loader = Postponing(spec.loader)  # pyright: ignore[reportAttributeAccessIssue]
            return spec
        return None


class Postponing:
    """A loader that gives a module its decorators, and the rest when it is asked for."""

    def __init__(self, loader: Any):
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves the module to Python."""

    def exec_module(self, module: ModuleType) -> None:
        """Without `__path__`, each of its submodules asks for the rest first."""
        del module.__path__
        vars(module).update(disable=disable, assume_constant_result=assume_constant_result)
        module.__class__ = Postponed


class Postponed(ModuleType):
    """A module that is loaded when a name is looked up that it does not have."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)  # asked by those who look at all modules
        spec: Any = self.__spec__
        self.__class__ = ModuleType
        self.__path__ = spec.submodule_search_locations
        spec.loader.loader.exec_module(self)
        return getattr(self, name)


def disable() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns torch's decorator, which applies as soon as anything can be compiled."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            dynamo: Any = sys.modules[POSTPONED]
            if not isinstance(dynamo, Postponed):
                return dynamo.disable(function)(*arguments, **named)
            return function(*arguments, **named)

        return call

    return decorate


def assume_constant_result(function: Any) -> Any:
    """Does what torch's decorator of this name does."""
    function._dynamo_marked_constant = True
    return function


sys.meta_path.insert(0, Spared())  # pyright: ignore[reportArgumentType]
