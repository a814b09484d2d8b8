"""Check whether a file says how many classes a segmenter has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError


def check_head(
    cls: Any, preset: str | Path, overrides: Mapping[str, Any], setting: str, what: str
) -> None:
    """Raises `InputError` where neither a file nor the user says how many classes there are.

    Args:
        cls: a task.
        preset: as in `Task.from_preset`.
        overrides: see there.
        setting: a setting that files of this task alone have.
        what: what they have, for the message.
    """
    if "num_classes" in overrides:
        return
    from kmodels.models import registry
    from kmodels.presets.find import open_checkpoint

    family = registry.family(cls.backbone_class.family)
    task = open_checkpoint(preset, family, {}, False).task
    if setting not in task or task.get("num_classes") is None:
        raise InputError(f"{preset} has no {what}; give num_classes")
