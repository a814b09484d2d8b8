"""The table of families: name to the module with its `FAMILY`. A new family is one line."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kmodels.core.errors import InputError
from kmodels.weights.rules import SourceCheckpoint

if TYPE_CHECKING:
    from kmodels.models.blocks.keras_hub_mapping import KerasHubMapping
    from kmodels.models.blocks.sizes import Sizes


FAMILIES = {
    "gemma": "gemma",
    # After gemma: without a class, a directory with a vision encoder is read as a text model.
    "gemma_vision": "gemma_vision.gemma3",
    "gemma4_vision": "gemma_vision.gemma4",
    "llama3": "llama3",
    "qwen3": "qwen3",
    "vit": "vit.family",
    # After vit: without a family, a directory with both towers is read as the vision tower.
    "clip": "clip",
    "siglip": "siglip",
    # Last: only its own classes read a directory as both towers.
    "two_towers": "two_towers.weights",
}


class Format(Protocol):
    """Files of another package: an object or a module."""

    def matches(self, path: Path, description: dict[str, Any]) -> bool:
        """Returns True for a path of this format; `description` is its config.json or {}."""
        ...

    def open_checkpoint(
        self, path: Path, description: dict[str, Any], overrides: dict[str, Any], weights: bool
    ) -> SourceCheckpoint:
        """Reads a file's settings and opens its tensors, without reading their values."""
        ...


@dataclass(frozen=True)
class Family:
    """The description of a family for loading, saving and exporting.

    Args:
        name: name of the family, stored in files.
        backbone: class of the backbone.
        tasks: classes of the tasks.
        presets: name to fields of the config; keys that start with "task_" are the task's.
        formats: formats of other packages.
        sizes: config to the sizes that determine the memory of a step.
        transformers_form: model to config.json, preprocessor_config.json, rules and extra tensors.
        keras_hub: mappings to keras-hub's classes; the first one that a model belongs to counts.
        parts: setting of the task to prefixes of the variables that it determines.
        new_where_absent: settings whose variables get random weights if a file lacks them.
        defaults: (config, given settings of the task) to all settings; by default those given.
        fit_preprocessor: (arguments of the preprocessor, config) to arguments that suit the config;
            no change by default, as for the next two.
        fit: (tensors by variable path, their config, wanted config) to tensors for that config.
        fit_rules: (rules of a file, its config, wanted config) to rules for that config.
    """

    name: str
    backbone: type
    tasks: tuple[type, ...]
    presets: Mapping[str, Mapping[str, Any]]
    formats: tuple[Format, ...]
    sizes: Callable[[Any], "Sizes"]
    transformers_form: Callable[[Any], tuple[dict, dict, list, dict]]
    keras_hub: tuple["KerasHubMapping", ...] = ()
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    new_where_absent: frozenset[str] = frozenset()
    defaults: Callable[[Any, dict[str, Any]], dict[str, Any]] = lambda config, task: task
    fit_preprocessor: Callable[[dict[str, Any], Any], dict[str, Any]] = lambda arguments, config: (
        arguments
    )
    fit: Callable[[Any, Any, Any], Any] = lambda tensors, config, wanted: tensors
    fit_rules: Callable[[Any, Any, Any], Any] = lambda rules, config, wanted: rules

    def classes(self) -> list[Any]:
        """Returns the classes that `from_preset` makes: tasks, backbone, and preprocessors."""
        models = [*self.tasks, self.backbone]
        found = [getattr(cls, "preprocessor_class", None) for cls in models]
        return [*models, *filter(None, dict.fromkeys(found))]


def family(name: str) -> Family:
    """Returns a family by its name, and imports it on the first call.

    Raises:
        InputError: for an unknown name.
    """
    if name not in FAMILIES:
        raise InputError(f"there is no family {name!r}; choose one of {', '.join(FAMILIES)}")
    return importlib.import_module(f"kmodels.models.{FAMILIES[name]}").FAMILY


def families() -> list[Family]:
    """Returns all families."""
    return [family(name) for name in FAMILIES]


def class_named(name: str) -> Any:
    """Returns the public class of models or preprocessors of a name in a file, or None."""
    models = importlib.import_module(".models", __package__)
    known = name in models.__all__ and not name.endswith("Config")
    return getattr(models, name) if known else None


class Named:
    """The registered names of a class, read on the class itself: `ViTBackbone.presets`.

    A class of no family, such as `CausalLM`, has those of all classes below it.
    """

    def __get__(self, instance: object, owner: type) -> dict[str, dict[str, Any]]:
        """Returns the fields of the architecture by name."""
        base, owner = owner, getattr(owner, "backbone_class", owner)
        if not getattr(owner, "family", ""):
            below = [cls for one in families() for cls in one.classes() if issubclass(cls, base)]
            return {name: fields for cls in below for name, fields in cls.presets.items()}
        own = family(owner.family)
        fits = getattr(owner, "fits_preset", own.backbone.fits_preset)
        return {name: dict(fields) for name, fields in own.presets.items() if fits(name, fields)}
