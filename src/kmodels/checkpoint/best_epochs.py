"""Whether an epoch was better than all whose checkpoints are still there."""

from collections.abc import Mapping
from pathlib import Path

from kmodels.checkpoint import manager
from kmodels.core.errors import InputError
from kmodels.distribution import processes


def is_best(directory: Path, name: str, mode: str, logs: Mapping[str, float]) -> bool:
    """Compares an epoch with those before it; all processes call it, and the first one decides.

    Args:
        directory: of the checkpoints; nothing is being written to it.
        name: of the log to compare.
        mode: whether the best is the "min" or the "max".
        logs: of the epoch.

    Raises:
        InputError: where no epoch logs such a number.
    """
    if name not in logs:
        if name.startswith("val_") and not any(n.startswith("val_") for n in logs):
            return False  # Not every epoch need be validated.
        raise InputError(f"best is {name!r}, which no epoch logs; choose one of {', '.join(logs)}")

    def compare() -> bool:
        held = manager.list_checkpoints(directory)
        former = manager.find_best(held, name, mode)
        if former is None:
            return True
        return logs[name] < former[0] if mode == "min" else logs[name] > former[0]

    return processes.broadcast("best", compare)
