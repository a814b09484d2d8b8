"""Ctrl-C and SIGTERM of the process that waits for a run: workers save and stop at the same step.

The process writes the signal to the store of the cluster, which each worker reads once a second and
handles like its own signal.
"""

import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from kmodels.checkpoint import preemption
from kmodels.checkpoint.preemption import Interrupted

_NAMESPACE = "kmodels"
_SECONDS = 1.0


def new_key() -> str:
    """Returns the key of a run in the cluster's store."""
    return f"stop-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class Stopped:
    """The return value of a worker that stopped after a signal, with the message of the run."""

    signum: int
    message: str


@contextmanager
def listening(key: str) -> Iterator[None]:
    """Handles signals for the run like signals for this worker, inside the block."""
    over = threading.Event()
    threading.Thread(target=_look, args=(key, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()
        preemption.tell(None)


def wait(work: Callable[[], Any], key: str) -> Any:
    """Calls a function; the first signal stops its run, a second one ends it at once.

    In the main thread, Ray ends a run at the first signal, without a checkpoint and with the exit
    code of success, so the function is called in another thread.

    Raises:
        Interrupted: after the second signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    outcomes: list[Any] = []
    over = threading.Event()

    def call() -> None:
        try:
            outcomes.append((work(), None))
        except BaseException as error:
            outcomes.append((None, error))
        finally:
            over.set()

    with _signals(key):
        threading.Thread(target=call, daemon=True).start()
        # Without a timeout, signals would be handled only at the end.
        while not over.wait(_SECONDS):
            pass
    result, error = outcomes[0]
    if error is not None:
        raise error
    return result


@contextmanager
def _signals(key: str) -> Iterator[None]:
    came = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            message = f"ended at once by signal {signum}; its newest checkpoint stays"
            print(message, file=sys.stderr, flush=True)
            raise Interrupted(signum, message)
        came = True
        print("the run saves and stops; once more ends it at once", file=sys.stderr)
        _store()._internal_kv_put(key, str(signum), namespace=_NAMESPACE)

    former = {number: signal.signal(number, note) for number in preemption.SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        if came:
            _store()._internal_kv_del(key, namespace=_NAMESPACE)


def _look(key: str, over: threading.Event) -> None:
    while not over.wait(_SECONDS):
        try:
            signum = _store()._internal_kv_get(key, namespace=_NAMESPACE)
        except Exception:  # The cluster ends, and this worker too.
            return
        if signum is not None:
            preemption.tell(int(signum))
            return


def _store() -> Any:
    from ray.experimental import internal_kv

    return internal_kv
