"""Whoever beside a run keeps its checkpoints: it receives each, and removes the older ones."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from kmodels.checkpoint.run_state import RunState


class Keeper(Protocol):
    """Keeps the checkpoints of some directories, as a cluster does for the runs that it started."""

    def keeps(self, directory: Path) -> bool:
        """Returns whether the checkpoints of a directory are its own to remove."""
        ...

    def tell(self, path: Path, run: RunState, written: "Future[Any]") -> None:
        """Receives a checkpoint; all processes call it, between the same steps.

        Args:
            path: path of the checkpoint, local where it is published at an address.
            run: its state.
            written: done once it is on the disk and published.
        """
        ...

    def resume(self, paths: Sequence[Path], run: RunState) -> None:
        """Receives those that are there where a run continues; all processes call it.

        Args:
            paths: paths of the checkpoints, the newest last, which the run was restored from.
            run: state of that one.
        """
        ...


# Who keeps checkpoints in this process; None where each run keeps its own.
current: Keeper | None = None


def set_keeper(keeper: Keeper | None) -> None:
    """Says who keeps checkpoints in this process; None takes it back."""
    global current
    current = keeper
