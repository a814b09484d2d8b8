"""Directories of checkpoints: whole or absent, verified before use, the same on every backend.

A checkpoint is a directory `step_<n>`:

    model.safetensors      variables of the model by path, states of seeds included; only the
                           trainable ones if adapters are trained on a frozen base
    optimizer.safetensors  variables of the optimizer by weight and slot
    metrics.safetensors    running averages
    other.safetensors      arrays of callbacks, states of random generators, the learning rate
    state.json             epoch, batch, step, attributes of callbacks, versions, settings
    manifest.json          size and sha256 of each of the others

If several processes train together, each writes the parts that it holds to its own files
(`kmodels.checkpoint.format`), in one directory that all of them share. Rank zero writes the last
two files and renames the directory, once all others are done; nothing is a checkpoint before that.
On reading each process verifies a share of the files, and tells the others of damage.
"""

import json
import math
import re
import threading
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import keras

from kmodels.checkpoint import format, state
from kmodels.checkpoint.format import Arrays
from kmodels.checkpoint.state import STATE_SHAPE, CheckpointError, RunState
from kmodels.core import processes, remote
from kmodels.core.errors import InputError
from kmodels.core.files import (
    atomic_directory,
    atomic_write,
    lock,
    remove_directory,
    remove_leftovers,
    stamp,
    sync,
)
from kmodels.core.processes import all_or_raise
from kmodels.core.schema import check_shape

_NAME = re.compile(r"step_(\d+)$")
PREFIX = "step_"
FORMAT = 3
STATE, MANIFEST = "state.json", "manifest.json"
# Rank zero writes it and the others look for it, to check that all share the directory.
_TOKEN = ".shared"
T = TypeVar("T")


class Best(NamedTuple):
    """The log by which epochs are compared, and whether the best is the "min" or the "max"."""

    name: str
    mode: str


class Keeper(Protocol):
    """Keeps the checkpoints of some directories, as a cluster does for the runs that it started.

    It receives each checkpoint, and removes the older ones.
    """

    def keeps(self, directory: Path) -> bool:
        """Returns True if the checkpoints of a directory are its own to remove."""
        ...

    def tell(self, path: Path, run: RunState, written: "Future[Any]", best: Best | None) -> None:
        """Receives a checkpoint; all processes call it, between the same steps.

        Args:
            path: path of the checkpoint, a local one if it is published at an address.
            run: its state.
            written: done once the checkpoint is on the disk and published.
            best: how its run compares epochs.
        """
        ...

    def resume(self, paths: Sequence[Path], run: RunState, best: Best | None) -> None:
        """Receives the checkpoints that exist when a run continues; all processes call it.

        Args:
            paths: paths of the checkpoints; the run was restored from the last one, the newest.
            run: state of the last one.
            best: how the run compares epochs.
        """
        ...


_keeper: Keeper | None = None


def set_keeper(keeper: Keeper | None) -> None:
    """Sets who keeps checkpoints in this process; with None each run keeps its own."""
    global _keeper
    _keeper = keeper


def keeper_of(directory: Path) -> Keeper | None:
    """Returns who keeps the checkpoints of a directory, or None if the run itself does."""
    return _keeper if _keeper is not None and _keeper.keeps(directory) else None


class BackgroundWriter:
    """Runs jobs in a thread, one after another.

    The thread is no daemon: a process that ends waits for the job.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def submit(self, job: Callable[[], object]) -> "Future[object]":
        """Waits for the former job and raises its error, then begins this one.

        Returns:
            A future of the result of the job.
        """
        self.wait()
        done: Future[object] = Future()

        def run() -> None:
            try:
                done.set_result(job())
            except Exception as error:
                self._error = error
                done.set_exception(error)

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()
        return done

    @property
    def failed(self) -> bool:
        """Returns True if a job has raised an error; does not wait."""
        return self._error is not None

    def wait(self) -> None:
        """Waits for the job and raises its error."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


def take(directory: Path, resume: bool) -> None:
    """Keeps other runs out of the directory until `files.unlock`; all processes call it.

    Args:
        directory: directory of the checkpoints; it is made if it is missing.
        resume: True if it may hold checkpoints.

    Raises:
        InputError: if another run uses the directory, a process does not see it, or it holds
            checkpoints and `resume` is False.
    """

    def lock_it() -> str:
        # If this process has locked it before, the leftovers are being written by itself.
        if lock(directory):
            remove_leftovers(directory)
            if directory in remote.ADDRESSES:
                remote.pull(directory)
        if processes.count() > 1:
            token = uuid.uuid4().hex
            atomic_write(directory / _TOKEN, lambda path: path.write_text(token))
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
            f"process {processes.index()} cannot see what the first one writes to "
            f"{directory}; give a directory on a disk that all processes share"
        )


def _check_new(directory: Path, resume: bool) -> None:
    if not resume and list_checkpoints(directory):
        raise InputError(
            f"{directory} holds checkpoints of a run; continue it with resume=True, or "
            "give another directory"
        )


def path_of(folder: Path, step: int) -> Path:
    """Returns the path of the checkpoint after a step."""
    return folder / f"{PREFIX}{step:08d}"


def save(
    folder: Path,
    run: RunState,
    arrays: Mapping[str, Arrays],
    keep: int | None = 2,
    best: str | None = None,
    mode: str = "min",
) -> Path:
    """Writes `folder/step_<n>`, then removes older ones; all processes call it, for one step.

    Args:
        folder: directory of the checkpoints of one run.
        run: state of the run; its step names the directory.
        arrays: values of the variables that this process writes, by part of the checkpoint and
            name, as `format.write` takes them.
        keep: how many of the newest stay; at least 1. None leaves removing to a `Keeper`; of the
            local copies of an address the newest two stay then.
        best: name of the number in the logs whose best checkpoint stays too.
        mode: "min" or "max".

    Raises:
        InputError: if a weight is not finite, the disk is full or the folder cannot be written;
            former checkpoints stay.
    """
    target = path_of(folder, run.step)
    size = sum(a.nbytes for part in arrays.values() for a in part.values())

    def saying(act: Callable[[], T]) -> Callable[[], T]:
        def guarded() -> T:
            try:
                return act()
            except OSError as error:
                raise InputError(
                    f"cannot write checkpoint {target} of {size:,} bytes: "
                    f"{error.strerror or error}; make room or give another directory"
                ) from error

        return guarded

    weights = arrays["model"], arrays["optimizer"]
    all_or_raise("checkpoint is finite", lambda: [*map(state.check_finite, weights)])
    with ExitStack() as stack:
        begin = saying(lambda: str(stack.enter_context(atomic_directory(target))))
        new = Path(processes.broadcast("checkpoint begins", begin))
        own = all_or_raise("checkpoint has its parts", saying(lambda: _write(new, run, arrays)))
        stamps = processes.all_gather_object("checkpoint has its hashes", own)

        def end() -> None:
            text = json.dumps({"format": FORMAT, **run.to_json()}, indent=1)
            (new / STATE).write_text(text + "\n")
            manifest = {name: stamp for part in stamps for name, stamp in part.items()}
            manifest |= {STATE: stamp(new / STATE)}
            text = json.dumps(dict(sorted(manifest.items())), indent=1)
            (new / MANIFEST).write_text(text + "\n")
            stack.close()
            published = folder in remote.ADDRESSES
            if published:
                remote.push(folder, target)
            if keep is not None or published:
                _remove_old(folder, target, keep or 2, best, mode)
            if published and keep is not None:
                remote.remove_others(folder, target)

        processes.broadcast("checkpoint ends", saying(end))
    return target


def _write(new: Path, run: RunState, arrays: Mapping[str, Arrays]) -> dict[str, Any]:
    """Writes the files of this process, and returns size and hash of each by its name."""
    averages = state.finite_averages(arrays.get("metrics", {}))
    arrays = {**arrays, "metrics": averages, "other": run.to_arrays()}
    parts = ((part, arrays.get(part, {})) for part in format.PARTS)
    files = [file for part, values in parts for file in format.write(new, part, values)]
    for file in files if not processes.is_rank_zero() else ():
        sync(file)  # On a disk of the network nobody else can do it.
    return {file.name: stamp(file) for file in files}


def _remove_old(folder: Path, target: Path, keep: int, best: str | None, mode: str) -> None:
    # Newer ones did not verify when this run was resumed, and do not count.
    older = [path for path in list_checkpoints(folder) if path.name < target.name]
    best_kept = find_best([target, *older], best, mode) if best else None
    for old in older[max(keep, 1) - 1 :]:
        if best_kept is None or old != best_kept[1]:
            remove_directory(old)


def find_best(paths: Sequence[Path], name: str, mode: str) -> tuple[float, Path] | None:
    """Returns the best value of a log and its checkpoint, of equal ones the earliest.

    Args:
        paths: paths of checkpoints; those without the log, or that cannot be read, do not count.
        name: name of the log, such as "val_loss".
        mode: "min" or "max".
    """
    candidates: list[tuple[float, Path]] = []
    for path in sorted(paths):
        try:
            value = json.loads((path / "state.json").read_text())["logs"][name]
            value = float(value)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
        if math.isfinite(value):
            candidates.append((value, path))
    pick = min if mode == "min" else max
    return pick(candidates, key=lambda pair: pair[0]) if candidates else None


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints of a run, newest first, verified or not."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if _NAME.match(path.name) and path.is_dir()]
    return sorted(paths, key=lambda path: int(_NAME.match(path.name)[1]), reverse=True)  # type: ignore[index]


def up_to(path: Path) -> list[Path]:
    """Returns a checkpoint and those before it, the oldest first; the same in all processes."""
    names: list[str] = processes.broadcast("checkpoints before", lambda: _names(path.parent))
    return [path.parent / name for name in sorted(names) if name <= path.name]


def newest_step(folder: Path) -> int:
    """Returns the step of a run's newest checkpoint, verified or not; -1 if there is none."""
    names: list[str] = processes.broadcast("newest checkpoint", lambda: _names(folder))
    return int(names[0].removeprefix(PREFIX)) if names else -1


def verify(path: Path) -> RunState:
    """Checks a checkpoint and returns its state; of several processes each checks a share of it.

    The arrays of the state are not read, see `RunState.with_arrays`.

    Raises:
        CheckpointError: naming the file that is missing, cut short or changed.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if not isinstance(manifest, dict) or not _is_whole(set(manifest)):
            raise CheckpointError(
                f"{path / MANIFEST} does not list {STATE}, {', '.join(format.PARTS)} and no other"
            )
        arrays = sorted(set(manifest) - {STATE})
        for name in (STATE, *arrays[processes.index() :: processes.count()]):
            if stamp(path / name) != manifest[name]:
                raise CheckpointError(f"{path / name} is not what was written (size or sha256)")
        content = json.loads((path / STATE).read_text())
        check_shape(content, STATE_SHAPE, path / STATE)
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing") from error
    except InputError as error:
        raise CheckpointError(str(error)) from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("step"), int):
        raise CheckpointError(f"{path / STATE} has no number of the step")
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {content.get('format')}; this version reads format {FORMAT}"
        )
    return RunState.from_json(content)


def _is_whole(names: set[str]) -> bool:
    parts = {format.part_of(name) for name in names - {STATE}}
    return STATE in names and parts == set(format.PARTS)


def newest(folder: Path) -> tuple[Path, RunState, list[str]] | None:
    """Returns the newest checkpoint that verifies, also while another run writes and removes some.

    One that a process finds damaged is passed over by all of them.

    Returns:
        Its path, its state and why newer ones were passed over; None if there is none at all.

    Raises:
        CheckpointError: if there are some and none verifies.
    """
    reasons: list[str] = []
    listed: list[str] | None = None
    while True:
        names: list[str] = processes.broadcast("checkpoints", lambda: _names(folder))
        if names == listed:
            break
        listed, reasons = names, []
        for name in names:
            run, problem = RunState(-1), None
            try:
                run = verify(folder / name)
            except CheckpointError as error:
                problem = str(error)
            problems = [
                said for said in processes.all_gather_object("checkpoint is good", problem) if said
            ]
            if not problems:
                return folder / name, run, reasons
            reasons.append(problems[0])
    if reasons:
        raise CheckpointError(f"no checkpoint in {folder} verifies: {'; '.join(reasons)}")
    return None


def _names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def restore_newest(folder: str | Path, model: keras.Model) -> Path:
    """Fills the model for evaluation, with the moving average of the weights if there is one.

    Args:
        folder: directory of the checkpoints of one run, local or an address.
        model: compiled as the run's.

    Raises:
        CheckpointError: if no checkpoint verifies, or it is of another model.
    """
    # Each process reads a copy of its own.
    folder = all_or_raise("checkpoints are here", lambda: remote.copy_to_read(folder))
    while True:
        checkpoint = newest(folder)
        if checkpoint is None:
            raise CheckpointError(f"there is no checkpoint in {folder}; train first")
        try:
            restore(*checkpoint[:2], model)
            break
        except InputError:
            # Another process may have removed it since, having written a newer one.
            if checkpoint[0].is_dir():
                raise
    for variable, average in state.averages(model.optimizer):
        if state.sharded(variable):
            variable.assign(average.value)
        else:
            state.put(variable, state.host_values(average))
    return checkpoint[0]


def restore(path: Path, run: RunState, model: keras.Model) -> None:
    """Fills a compiled model and its optimizer, all or none.

    Args:
        path: path of the checkpoint, verified.
        run: its state.
        model: compiled as the run's; it gets the `loss_normalization` of the run.

    Raises:
        CheckpointError: lists all misfits, or says that the frozen weights are others.
    """
    former = run.loss_normalization
    if getattr(model, "loss_normalization", former) != former:
        if processes.is_rank_zero():
            warnings.warn(
                f"{path} is of a run with loss_normalization={former!r}; it continues with that",
                stacklevel=2,
            )
        model.normalize_loss(former)
    base = run.base
    wanted = state.parts(model, base is not None)
    if base is not None and state.base_digest(model) != base["sha256"]:
        raise CheckpointError(
            f"{path} was trained beside other frozen weights"
            f"{' (' + str(base['origin']) + ')' if base.get('origin') else ''}; give the same base"
        )
    state.fill(path, {part: wanted[part] for part in ("model", "optimizer")})
