"""The recipes as modules, as a user's shell runs them."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def load(name: str) -> ModuleType:
    """Returns a recipe by the name of its file, without the ending."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their annotations up in the module's place.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
