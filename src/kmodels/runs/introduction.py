"""Says first, and keeps in run.json, what a run trains on what, where and by which call."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kmodels.core.units import pluralize
from kmodels.runs import console

if TYPE_CHECKING:
    import keras

    from kmodels.runs.run_folder import Folder


def introduce(
    folder: "Folder",
    model: "keras.Model",
    data: Mapping[str, Any],
    *,
    steps: int = 0,
    steps_per_epoch: int = 0,
    best: str | None = None,
) -> None:
    """Says what a run trains, on what, on which device and where it writes; keeps it in run.json.

    Args:
        folder: of the run.
        model: as it will be trained.
        data: `source`, `unit` ("images"), how many there are for `train`, `validation` and
            `test`, and where they apply `classes` (their names) and `details` (a sentence).
        steps: of the whole run; 0 where nothing is trained.
        steps_per_epoch: of which an epoch has so many.
        best: metric by which the best epoch is chosen.
    """
    import keras

    from kmodels.core.hardware import device_name

    settings = folder.settings
    weights = getattr(settings, "weights", None)
    name = settings.preset if weights is None else console.short(weights)
    facts = {
        "model": name,
        "parameters": model.count_params(),
        "trainable_parameters": sum(math.prod(x.shape) for x in model.trainable_weights),
        "data": dict(data),
        "backend": keras.backend.backend(),
        "device": device_name(),
        "precision": getattr(model, "backbone", model).dtype_policy.name,
        "steps": steps,
        "best": best,
    }
    folder.note(**facts)
    console.working(None)
    console.say_facts(
        f"{folder.recipe}: {name}, {_parameters(facts)}",
        {
            "data": _data(data),
            "training": _training(steps, steps_per_epoch, settings, data["unit"]),
            "device": f"{facts['backend']} on {facts['device']}, {facts['precision']}",
            "results": console.short(folder.path),
        },
    )


def _parameters(facts: Mapping[str, Any]) -> str:
    whole, trained = facts["parameters"], facts["trainable_parameters"]
    share = "" if trained == whole else f", {trained:,} trained ({trained / whole:.1%})"
    return f"{whole:,} parameters{share}"


def _data(data: Mapping[str, Any]) -> str:
    classes = f", {len(data['classes'])} classes" if data.get("classes") else ""
    held_out = [f", {part} {data[part]:,}" for part in ("validation", "test") if data.get(part)]
    text = f"{data['source']}{classes}: {data['train']:,} {data['unit']}{''.join(held_out)}"
    return text + (f"; {data['details']}" if data.get("details") else "")


def _training(steps: int, steps_per_epoch: int, settings: Any, unit: str) -> str:
    if not steps:
        return ""
    epochs = math.ceil(steps / steps_per_epoch)
    whole = f"{pluralize(epochs, 'epoch')} of {pluralize(steps_per_epoch, 'step')}"
    if steps % steps_per_epoch:
        whole = f"{pluralize(steps, 'step')}, an epoch has {steps_per_epoch:,}"
    return f"{whole}, {settings.batch_size} {unit} a step"
