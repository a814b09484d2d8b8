"""The families, by the name of their folder. One line makes a new one known."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kmodels.core.errors import InputError
from kmodels.memory.sizes import Sizes
from kmodels.models.common.keras_hub_mapping import KerasHubMapping
from kmodels.weights import SourceCheckpoint

FAMILIES = {
    "gemma": "kmodels.models.gemma.family",
    # Behind it: whoever names no class takes a directory with a vision tower for a text model.
    "gemma_vision": "kmodels.models.gemma_vision.gemma3",
    "gemma4_vision": "kmodels.models.gemma_vision.gemma4",
    "qwen3": "kmodels.models.qwen3",
    "vit": "kmodels.models.vit.family",
    # Behind it: whoever names no family takes a directory with both towers for the images'.
    "clip": "kmodels.models.clip",
    "siglip": "kmodels.models.siglip",
    # Last: only its own classes take such a directory for what it is.
    "two_towers": "kmodels.models.two_towers",
}


class Format(Protocol):
    """A module that understands the files of another package."""

    def matches(self, path: Path, description: dict[str, Any]) -> bool:
        """Returns whether a path is of the format, by `description`, the config.json or {}."""
        ...

    def open_checkpoint(
        self, path: Path, description: dict[str, Any], given: dict[str, Any], weights: bool
    ) -> SourceCheckpoint:
        """Understands a file without reading the values."""
        ...


@dataclass(frozen=True)
class Family:
    """The description of a family for `from_preset` and its siblings.

    Args:
        name: name of the folder.
        backbone: the class of the model without a head.
        tasks: the classes of models with one.
        presets: name to fields of the config; keys that start with "task_" are the task's.
        formats: modules for the files of other packages.
        sizes: config to what decides the memory of a step.
        transformers_form: model to config.json, preprocessor_config.json, table and extra tensors.
        keras_hub: the pairs with keras-hub's classes; the first that a model belongs to is its own.
        parts: setting of the task to prefixes of the variables that it decides.
        new_where_absent: settings whose part gets new weights from a file that does not have it.
        defaults: (config, given settings of the task) to all settings; these alone by default.
        fit_preprocessor: (arguments of the preprocessor, config) to arguments that suit the config;
            like all that follow, no change by default.
        fit: (tensors by variable path, their config, wanted config) to tensors for that config.
        fit_rules: (rules of a file, its config, wanted config) to rules for that config.
    """

    name: str
    backbone: type
    tasks: tuple[type, ...]
    presets: Mapping[str, Mapping[str, Any]]
    formats: tuple[Format, ...]
    sizes: Callable[[Any], Sizes]
    transformers_form: Callable[[Any], tuple[dict, dict, list, dict]]
    keras_hub: tuple[KerasHubMapping, ...] = ()
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    new_where_absent: frozenset[str] = frozenset()
    defaults: Callable[[Any, dict[str, Any]], dict[str, Any]] = lambda config, task: task
    fit_preprocessor: Callable[[dict[str, Any], Any], dict[str, Any]] = lambda given, config: given
    fit: Callable[[Any, Any, Any], Any] = lambda tensors, held, wanted: tensors
    fit_rules: Callable[[Any, Any, Any], Any] = lambda rules, held, wanted: rules


def family(name: str) -> Family:
    """Returns the family of a folder, imported when it is asked for.

    Raises:
        InputError: for an unknown name.
    """
    if name not in FAMILIES:
        raise InputError(f"there is no family {name!r}; choose one of {', '.join(FAMILIES)}")
    return importlib.import_module(FAMILIES[name]).FAMILY


def families() -> list[Family]:
    """Returns all families."""
    return [family(name) for name in FAMILIES]
