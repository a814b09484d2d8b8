"""The directory of a recipe's run."""

import dataclasses
import fcntl
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.core.files import atomic_write, local_path, no_link, remove_leftovers
from kmodels.core.remote import is_remote
from kmodels.core.schema import read_json
from kmodels.core.shown import shown
from kmodels.runs import report
from kmodels.runs.page.run import NOTED, NOTES

# Of what the run is and when it ran, beside its settings and its result.


def path_of(recipe: str, out: str | None) -> Path:
    """Returns the directory of a run, `out` or runs/<recipe>-<time>."""
    return local_path(out or f"runs/{recipe}-{time.strftime('%Y%m%d-%H%M%S')}")


def has_checkpoints(path: Path) -> bool:
    """Returns whether a run was saved in a directory."""
    return any((path / "checkpoints").glob("step_*"))


def check_new(path: Path, resume: bool) -> None:
    """Raises `InputError` where a directory holds a run that is not to be resumed."""
    if not resume and has_checkpoints(path):
        raise InputError(
            f"--out {path} holds checkpoints of a run; add --resume to continue it, or give "
            "another directory"
        )


class Folder:
    """The directory of a run, held against a second run by a lock that dies with the process.

    The first of several processes makes and holds it.

    Args:
        recipe: its name.
        out: the directory; runs/<recipe>-<time> by default.
        settings: of the run.
        resume: whether an earlier run may be in it.

    Raises:
        InputError: where it cannot be written, holds a run, or another process uses it.
    """

    def __init__(self, recipe: str, out: str | None, settings: Any, resume: bool = False):
        self.recipe, self.settings = recipe, settings
        self._lock: Any = None
        self._parts: list[dict[str, Any]] = []
        self._begun = 0.0
        processes = joined_processes()
        self.main = processes is None or processes.is_rank_zero()
        if processes is None:
            self._take(out, resume)
        else:
            path = processes.broadcast("the folder of the run", lambda: self._take(out, resume))
            self.path = Path(path)

    def _take(self, out: str | None, resume: bool) -> str:
        self.path = path_of(self.recipe, out)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Not truncated: it may be held by another run.
            self._lock = open(self.path / ".lock", "a", opener=no_link)  # noqa: SIM115
        except OSError as error:
            raise InputError(
                f"cannot write to --out {self.path}: {error.strerror}; give another directory"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise InputError(f"another run is using --out {self.path}; give another") from error
        try:
            check_new(self.path, resume)
            remove_leftovers(self.path)
        except InputError:
            self.close()
            raise
        return str(self.path)

    @property
    def has_checkpoints(self) -> bool:
        """True if a run was saved in it."""
        return has_checkpoints(self.path)

    def begin(self, command: str) -> None:
        """Notes in run.json that a part of the run begins.

        Args:
            command: the command line that started it.
        """
        if not self.main:
            return
        self._begun = time.monotonic()
        evaluates = getattr(self.settings, "evaluate", False)
        parts = (self._noted() or {}).get("parts") or []
        if evaluates and parts:
            return  # The run itself is what the file is about.
        began = datetime.now(UTC).astimezone().isoformat(timespec="seconds")
        self._parts = [*parts, {"command": command, "started": began, "seconds": None}]

    def note(self, **facts: Any) -> None:
        """Adds facts to run.json: what is trained on what, and when.

        Args:
            facts: plain values by name, in the place of older ones.
        """
        if self._parts:
            self._parts[-1]["seconds"] = round(time.monotonic() - self._begun, 1)
            content = {**(self._noted() or {}), **facts, "parts": self._parts}
            self.write_json(NOTES, {"recipe": self.recipe, **content})

    def _noted(self) -> dict[str, Any] | None:
        try:
            return read_json(self.path / NOTES, NOTED)
        except InputError:  # it is written again
            return None

    def write_config(self) -> Path:
        """Writes config.json, the settings in force."""
        content = {"recipe": self.recipe, **dataclasses.asdict(self.settings)}
        self.note(defaults=_defaults(self.settings))
        return self.write_json("config.json", content)

    def write_json(self, name: str, content: dict[str, Any]) -> Path:
        """Writes a file of the run, atomically, without the passwords of addresses.

        The first of several processes writes. Numbers that are not finite become null.
        """
        if not self.main:
            return self.path / name
        text = json.dumps(_plain(shown(content)), indent=1, allow_nan=False) + "\n"
        return atomic_write(self.path / name, lambda path: path.write_text(text))

    def write_report(self) -> Path:
        """Writes report.html, one page that shows the run, and returns its path."""
        if self.main:
            self.note()
            report.write(self.path)
        return self.path / report.NAME

    def check_exists(self) -> None:
        """Raises `InputError` if the directory was removed during the run."""
        if self._lock is not None and not (self.path / ".lock").is_file():
            raise InputError(
                f"--out {self.path} was removed during the run, so the run is lost; start it again"
            )

    def close(self) -> None:
        """Lets go of the directory; removes it where nothing was written."""
        if self._lock is None:
            return
        self._lock.close()
        if self.path.is_dir() and [path.name for path in self.path.iterdir()] == [".lock"]:
            (self.path / ".lock").unlink()
            self.path.rmdir()


def _defaults(settings: Any) -> dict[str, Any]:
    """Returns the settings of a run without flags."""
    fields = dataclasses.fields(settings)
    return {x.name: x.default for x in fields if x.default is not dataclasses.MISSING}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not (abs(value) < float("inf")):
        return None
    return value


def joined_processes() -> Any:
    """Returns `kmodels.distribution.processes` in a run of several of them, else None."""
    module = sys.modules.get("kmodels.distribution.processes")
    return module if module is not None and module.count() > 1 else None


def model_in(path: str) -> str:
    """Returns where the model of a run lies, or the path itself if it is not of a run.

    Raises:
        InputError: for a run that has no model yet.
    """
    folder = local_path(path) if not is_remote(path) else None
    if folder is None or not folder.is_dir():
        return path
    if (folder / "model" / "config.json").is_file():
        return str(folder / "model")
    if (folder / "adapter").is_dir() and (folder / "history.csv").is_file():
        raise InputError(
            f"{path} has an adapter and no merged model; give the base model with --adapter "
            f"{folder / 'adapter'}"
        )
    if (folder / "checkpoints").is_dir():
        raise InputError(f"{path} is a run that has not ended; continue it with --resume")
    return path
