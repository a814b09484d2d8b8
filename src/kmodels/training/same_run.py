"""What a checkpoint says of the run that it belongs to, and whether another run is the same."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from kmodels import compat
from kmodels.errors import InputError
from kmodels.training.device import versions


def describe(optimizer: Any, settings: Mapping[str, Any], epoch: int) -> dict[str, Any]:
    """Plain values that are the same in all parts of one run, and what else explains it.

    Args:
        optimizer: of the model.
        settings: that the user wants compared.
        epoch: that the order of the data goes by.
    """
    return {
        "optimizer": _name(optimizer),
        "order": {"seed": compat.random_seed(), "epoch": epoch},
        "schedule": _schedule(optimizer),
        "settings": dict(settings),
        "backend": keras.backend.backend(),
        "versions": versions(),
    }


def check_same(
    path: Path,
    described: Mapping[str, Any],
    optimizer: Any,
    settings: Mapping[str, Any],
    steps: int | None,
) -> None:
    """Compares a checkpoint with the run that is to go on from it.

    Args:
        path: of the checkpoint.
        described: its state.
        optimizer: of the model.
        settings: of this run.
        steps: batches of an epoch, where known.

    Raises:
        InputError: names all that differs.
    """
    kept = described["settings"]
    wrong = [name for name, value in settings.items() if kept.get(name) != value]
    said = [f"{name} was {kept.get(name)!r}" for name in wrong]
    # A checkpoint of before this was written down has no name.
    name, saved = _name(optimizer), described.get("optimizer")
    if None not in (name, saved) and name != saved:
        said.append(f"the optimizer was {saved}, not {name}")
    seed, former = compat.random_seed(), described["order"]["seed"]
    if None not in (seed, former) and seed != former:
        said.append(f"the random seed was {former}")
    count = described["steps_per_epoch"]
    if None not in (steps, count) and steps != count:
        said.append(f"an epoch had {count} batches, not {steps}")
    if said:
        raise InputError(
            f"{path} is of another run: {', '.join(said)}; give the same settings or another "
            "directory"
        )


def _name(optimizer: Any) -> str:
    """Class and name; Keras numbers the names that it gives by how many the process has made."""
    name = re.sub(r"_\d+$", "", optimizer.name)
    return f"{type(optimizer).__name__} {name!r}"


def _schedule(optimizer: Any) -> Any:
    try:
        rate = optimizer.get_config().get("learning_rate")
    except NotImplementedError:  # A user's own schedule need not have a config.
        return None
    return rate if isinstance(rate, dict) else None
