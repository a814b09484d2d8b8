"""Tell what a source holds beside the model that is converted, so that nothing is lost unsaid."""

from pathlib import Path

from kmodels import presets
from kmodels.core.schema import read_json
from kmodels.models import registry
from kmodels.tools.convert.formats import takes_images
from kmodels.weights import native


def whole_of(source: str | Path, cls: type) -> str:
    """Returns the class that has all that a source holds, where another reads only a part of it.

    Args:
        source: what `from_preset` reads.
        cls: the class that reads it here.

    Returns:
        Its name, such as "ViTMAEForPreTraining" for an encoder beside its decoder; else "".
    """
    path = presets.locate(source)
    if not (path / "config.json").is_file():
        return ""
    description = read_json(path / "config.json")
    if native.is_ours(path, description):
        held, task = description.get("class", ""), description.get("task") or {}
        # A classifier without classes is no more than its backbone.
        return held if held != cls.__name__ and task and "num_classes" not in task else ""
    held = next(iter(description.get("architectures") or ()), "")
    known = {task.__name__ for family in registry.families() for task in family.tasks}
    towers = {"text_config", "vision_config"} <= set(description)
    part = towers and not takes_images(getattr(cls, "backbone_class", cls))
    return held if part or (held in known and held != cls.__name__) else ""
