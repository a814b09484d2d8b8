"""The directory of a run's checkpoints: one run has it, and all of its processes see it."""

import uuid
from pathlib import Path

from kmodels.checkpoint import manager
from kmodels.checkpoint.consensus import all_or_raise
from kmodels.core.errors import InputError
from kmodels.core.files import lock, remove_leftovers
from kmodels.core.remote import mirror
from kmodels.distribution import processes

# What the first process writes and the others look for, to see that they share the directory.
_TOKEN = ".shared"


def take(directory: Path, resume: bool) -> None:
    """Keeps other runs out of the directory until `files.unlock`; all processes call it.

    Args:
        directory: of the checkpoints; it is made where it is missing.
        resume: whether it may hold checkpoints.

    Raises:
        InputError: where another run uses it, a process does not see it, or it holds checkpoints
            that nobody is to go on with.
    """

    def lock_it() -> str:
        # Where this process held it, what is being written is its own.
        if lock(directory):
            remove_leftovers(directory, manager.PREFIX)
            mirror.pull(directory)
        if processes.count() > 1:
            token = uuid.uuid4().hex
            (directory / _TOKEN).write_text(token)
            return token
        return ""

    token = processes.broadcast("checkpoint directory", lock_it)
    if processes.count() > 1:
        all_or_raise("checkpoint directory is seen", lambda: _check_seen(directory, token))
        if processes.is_rank_zero():
            (directory / _TOKEN).unlink()
    all_or_raise("directory is new", lambda: _check_new(directory, resume))


def _check_seen(directory: Path, token: str) -> None:
    try:
        seen = (directory / _TOKEN).read_text()
    except OSError:
        seen = None
    if seen != token:
        raise InputError(
            f"process {processes.index()} does not see what the first one writes to "
            f"{directory}; give a directory on a disk that all processes share"
        )


def _check_new(directory: Path, resume: bool) -> None:
    if not resume and manager.list_checkpoints(directory):
        raise InputError(
            f"{directory} holds checkpoints of a run; go on with it by resume=True, or "
            "give another directory"
        )
