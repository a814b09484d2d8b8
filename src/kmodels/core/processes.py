"""The processes of one run: their number, the index of this one, and values they exchange."""

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from kmodels.core import keras_internals
from kmodels.core.dispatch import backend, backend_module
from kmodels.core.environment import started_processes
from kmodels.core.errors import InputError, one_line

ENVIRONMENT = "KMODELS_PROCESS_SECONDS"
_SECONDS = 600.0
_FAILED = "\0failed"

T = TypeVar("T")


class ProcessesBackend(Protocol):
    """Several processes on one backend."""

    def join(self, seconds: float) -> None:
        """Joins this process to the others that its launcher started, if any."""
        ...

    def index(self) -> int:
        """Returns the index of this process, 0 before `join`."""
        ...

    def count(self) -> int:
        """Returns the number of processes, 1 before `join`."""
        ...

    def exchange(self, key: str, text: str, seconds: float) -> list[str]:
        """Returns the texts of all processes in the order of their index, from any thread.

        Raises:
            TimeoutError: if a process does not answer in that time.
        """
        ...

    def give_up(self, code: int) -> None:
        """Ends the process at once, without waiting for others."""
        ...


_engine = backend_module("kmodels.core.processes", ProcessesBackend, optional=True)
_meetings: Counter[str] = Counter()
_lock = threading.Lock()


def limit() -> float:
    """Returns the seconds after which a process stops waiting for others and raises.

    Raises:
        InputError: if the environment variable is not a number above 0.
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
    """Joins this process to the others that its launcher started; does nothing without a launcher.

    Call it before anything touches a device, as `distribute` does. On torch, torchrun sets RANK,
    WORLD_SIZE, MASTER_ADDR and MASTER_PORT. On JAX, KERAS_DISTRIBUTION_JOB_ADDRESSES,
    _NUM_PROCESSES and _PROCESS_ID are read, or the cluster is detected (SLURM, Open MPI, GKE, TPU
    pods) as by `jax.distributed.initialize`. If no seed is set, rank zero draws one for all.

    Raises:
        InputError: for variables that do not fit together, or those of another backend's launcher,
            or if the others do not come in time.
    """
    if _engine is not None:
        _engine.join(limit())
    if count() == 1 and (started := started_processes(is_joint=True)):
        name, number = started
        raise InputError(
            f"{name} is {number}, and {backend()} joins no processes by it, so each would train "
            "alone; start them as docs/tasks/many_gpus.md shows, or unset it"
        )
    if count() > 1 and keras_internals.random_seed() is None:
        seed = broadcast("seed", lambda: int.from_bytes(os.urandom(4), "little"))
        keras_internals.set_random_seed(seed)


def index() -> int:
    """Returns the index of this process, from 0."""
    return 0 if _engine is None else _engine.index()


def count() -> int:
    """Returns the number of processes that train together; 1 before `join`."""
    return 1 if _engine is None else _engine.count()


def is_rank_zero() -> bool:
    """Returns True if this process writes files and shows progress."""
    return index() == 0


def all_gather_object(what: str, value: object) -> list[Any]:
    """Returns the values of all processes, by rank; all must call it in the same order.

    Args:
        what: name of the exchange, for keys and messages.
        value: a small value that JSON can hold.

    Raises:
        InputError: if a process does not answer in time.
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
            f"{what!r}: one has ended, hangs, or has other data ({one_line(error)[:200]}); see "
            f"what they wrote, or set {ENVIRONMENT} higher"
        ) from error
    return [json.loads(text) for text in texts]


def broadcast(what: str, make: Callable[[], Any]) -> Any:
    """Returns a small value for JSON that `make` returns on rank zero, in all processes.

    Raises:
        InputError: in all processes, if `make` raises one.
    """
    value: Any = None
    if is_rank_zero():
        try:
            value = make()
        except InputError as error:
            if count() > 1:
                all_gather_object(what, {_FAILED: str(error)})
            raise
    value = all_gather_object(what, value)[0]
    if isinstance(value, dict) and _FAILED in value:
        raise InputError(value[_FAILED])
    return value


def check_equal(what: str, facts: Mapping[str, Any]) -> None:
    """Raises `InputError` in all processes if their facts differ.

    Args:
        what: name of the data that the facts describe, such as "the training data".
        facts: small values by name that JSON can hold.
    """
    everywhere = all_gather_object(what, dict(facts))
    for name in facts:
        values = [one.get(name) for one in everywhere]
        if any(value != values[0] for value in values):
            by_process = ", ".join(f"{value!r} on process {i}" for i, value in enumerate(values))
            raise InputError(
                f"{what} differs between the processes: {name} is {by_process}; give all of them "
                "the same data in the same order, or each its own rows by plan.shard(..., own=True)"
            )


def give_up(code: int) -> None:
    """Ends this process after an error, so that the others do not wait for it."""
    if _engine is not None and count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        _engine.give_up(code)


def all_or_raise(what: str, act: Callable[[], T]) -> T:
    """Calls a function in every process; if it raises `InputError` in one, all raise.

    The function must not call a collective.

    Raises:
        InputError: the error of this process, or the first one of the others.
    """
    if count() == 1:
        return act()
    try:
        result = act()
    except InputError as error:
        all_gather_object(what, str(error))
        raise
    problems = [problem for problem in all_gather_object(what, None) if problem is not None]
    if problems:
        raise InputError(problems[0])
    return result
