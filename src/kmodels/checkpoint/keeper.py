"""Whoever beside a run keeps its checkpoints: it receives each, and removes the older ones."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kmodels.checkpoint.run_state import RunState


class Best(NamedTuple):
    """The log by which epochs are compared, and whether the best is the "min" or the "max"."""

    name: str
    mode: str


class Keeper(Protocol):
    """Keeps the checkpoints of some directories, as a cluster does for the runs that it started."""

    def keeps(self, directory: Path) -> bool:
        """Returns whether the checkpoints of a directory are its own to remove."""
        ...

    def tell(self, path: Path, run: RunState, written: "Future[Any]", best: Best | None) -> None:
        """Receives a checkpoint; all processes call it, between the same steps.

        Args:
            path: path of the checkpoint, local where it is published at an address.
            run: its state.
            written: done once it is on the disk and published.
            best: by which its run compares epochs.
        """
        ...

    def resume(self, paths: Sequence[Path], run: RunState, best: Best | None) -> None:
        """Receives those that are there where a run continues; all processes call it.

        Args:
            paths: paths of the checkpoints, the newest last, which the run was restored from.
            run: state of that one.
            best: by which the run compares epochs.
        """
        ...


# Who keeps checkpoints in this process; None where each run keeps its own.
current: Keeper | None = None


def set_keeper(keeper: Keeper | None) -> None:
    """Says who keeps checkpoints in this process; None takes it back."""
    global current
    current = keeper
