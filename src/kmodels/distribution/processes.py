"""The run that this process is of: which one of its processes, what they agree on, its plan."""

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kmodels.core import keras_internals
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError

if TYPE_CHECKING:
    from kmodels.distribution.plan import ParallelPlan

ENVIRONMENT = "KMODELS_PROCESS_SECONDS"
_SECONDS = 600.0
_FAILED = "\0failed"

T = TypeVar("T")


class ProcessesBackend(Protocol):
    """Several processes on one backend."""

    def join(self, seconds: float) -> None:
        """Makes this process one of the run, where its launcher started several."""
        ...

    def index(self) -> int:
        """Returns which process this is, 0 before `join`."""
        ...

    def count(self) -> int:
        """Returns how many there are, 1 before `join`."""
        ...

    def exchange(self, key: str, text: str, seconds: float) -> list[str]:
        """Returns the texts of all processes in the order of their index, from any thread.

        Raises:
            TimeoutError: where one does not come in that time.
        """
        ...

    def give_up(self, code: int) -> None:
        """Ends the process at once, without waiting for others."""
        ...


_engine = backend_module("kmodels.distribution.processes", ProcessesBackend, optional=True)
_meetings: Counter[str] = Counter()
_lock = threading.Lock()
# What feeds, saves or places something asks for it.
_current: "ParallelPlan | None" = None


def limit() -> float:
    """Returns seconds after which a process that waits for others ends the run with an error.

    Raises:
        InputError: where the environment says something else than a number above 0.
    """
    text = os.environ.get(ENVIRONMENT)
    try:
        seconds = _SECONDS if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise InputError(f"{ENVIRONMENT} is {text!r}; give a number of seconds above 0")
    return seconds


def join() -> None:
    """Makes this process one of the run that its launcher started; does nothing in a run of one.

    Call it before anything touches a device; `distribute` does. For torch, torchrun tells RANK,
    WORLD_SIZE and where the first one is. For JAX, KERAS_DISTRIBUTION_JOB_ADDRESSES, _NUM_PROCESSES
    and _PROCESS_ID do, or the cluster itself (SLURM, Open MPI, GKE, TPU pods), as in
    `jax.distributed.initialize`. If no seed was set, all take one that the first has drawn.

    Raises:
        InputError: where what was told makes no sense, or the others do not come in time.
    """
    if _engine is None:
        return
    _engine.join(limit())
    if count() > 1 and keras_internals.random_seed() is None:
        seed = broadcast("seed", lambda: int.from_bytes(os.urandom(4), "little"))
        keras_internals.set_random_seed(seed)


def current() -> "ParallelPlan | None":
    """Returns the plan in force, or None on one device."""
    return _current


def set_current(plan: "ParallelPlan | None") -> None:
    """Puts a plan in force, or takes it back; `distribute` calls it."""
    global _current
    _current = plan


def index() -> int:
    """Returns which of the processes this is, from 0."""
    return 0 if _engine is None else _engine.index()


def count() -> int:
    """Returns how many processes train together; 1 before `join`."""
    return 1 if _engine is None else _engine.count()


def is_rank_zero() -> bool:
    """Returns whether this process writes files and shows progress."""
    return index() == 0


def all_gather_object(what: str, value: object) -> list[Any]:
    """Returns what each process gives, by rank; all must call it in the same order.

    Args:
        what: is being agreed on, for keys and messages.
        value: plain and small, as JSON has it.

    Raises:
        InputError: where a process does not come in time.
    """
    if _engine is None or count() == 1:
        return [value]
    with _lock:
        number = _meetings[what]
        _meetings[what] += 1
    try:
        texts = _engine.exchange(f"{what}/{number}", json.dumps(value), limit())
    except TimeoutError as error:
        raise InputError(
            f"process {index()} of {count()} waited {limit():g} s for the others at "
            f"{what!r}: one has ended, hangs, or has other data ({_first_line(error)}); see what "
            f"they wrote, or set {ENVIRONMENT} higher"
        ) from error
    return [json.loads(text) for text in texts]


def broadcast(what: str, make: Callable[[], Any]) -> Any:
    """Returns what the first process makes, in all of them; an `InputError` of its too.

    Args:
        what: see `all_gather_object`.
        make: called in the first process alone; gives something plain and small.

    Raises:
        InputError: as `make` raised it, in all processes.
    """
    found: Any = None
    if is_rank_zero():
        try:
            found = make()
        except InputError as error:
            if count() > 1:
                all_gather_object(what, {_FAILED: str(error)})
            raise
    found = all_gather_object(what, found)[0]
    if isinstance(found, dict) and _FAILED in found:
        raise InputError(found[_FAILED])
    return found


def check_equal(what: str, facts: Mapping[str, Any]) -> None:
    """Raises `InputError` in all processes where they do not tell the same.

    Args:
        what: the facts are of, such as "the training data".
        facts: plain and small values by name.
    """
    told = all_gather_object(what, dict(facts))
    for name in facts:
        values = [one.get(name) for one in told]
        if any(value != values[0] for value in values):
            by_process = ", ".join(f"{value!r} on process {i}" for i, value in enumerate(values))
            raise InputError(
                f"{what} differs between the processes: {name} is {by_process}; give all of them "
                "the same data in the same order, or each its own rows by plan.shard(..., own=True)"
            )


def give_up(code: int) -> None:
    """Ends a process of several that has failed, so that the others do not wait for it."""
    if _engine is not None and count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        _engine.give_up(code)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def all_or_raise(what: str, act: Callable[[], T]) -> T:
    """Does something in every process; where it is an `InputError` in one, it is in all.

    Args:
        what: is done, see `all_gather_object`.
        act: without a collective in it.

    Raises:
        InputError: that of this process, or the first that another one had.
    """
    if count() == 1:
        return act()
    try:
        found = act()
    except InputError as error:
        all_gather_object(what, str(error))
        raise
    problems = [problem for problem in all_gather_object(what, None) if problem is not None]
    if problems:
        raise InputError(problems[0])
    return found
