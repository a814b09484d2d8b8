"""Ctrl-C and SIGTERM of the process that waits for a run: its workers save, and stop at one step.

Whoever started the run writes the signal to the cluster's own store, where each worker looks for it
once a second. There it counts as one of the worker's own.
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
    """Says that a worker has stopped after a signal; its work returns it.

    Attributes:
        signum: the signal.
        message: what the run says of it.
    """

    signum: int
    message: str


@contextmanager
def listening(key: str) -> Iterator[None]:
    """Has signals for the run count as those of this worker, inside the block."""
    over = threading.Event()
    threading.Thread(target=_look, args=(key, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()
        preemption.tell(None)


def wait(work: Callable[[], Any], key: str) -> Any:
    """Returns what a function returns; after a signal its run stops, after a second one at once.

    Ray ends a run at the first signal, without a checkpoint and with the exit code of success. It
    does so in the main thread alone, so the function is called in another one.

    Args:
        work: starts a run and waits for its end.
        key: of the run.

    Raises:
        Interrupted: after the second signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    found: list[Any] = []
    over = threading.Event()

    def call() -> None:
        try:
            found.append((work(), None))
        except BaseException as error:
            found.append((None, error))
        finally:
            over.set()

    with _signals(key):
        threading.Thread(target=call, daemon=True).start()
        # Without a limit, a signal would wait for the end.
        while not over.wait(_SECONDS):
            pass
    result, error = found[0]
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
        print(
            "the run saves and stops; once more ends it at once",
            file=sys.stderr,
        )
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
            found = _store()._internal_kv_get(key, namespace=_NAMESPACE)
        except Exception:  # The cluster ends, and this worker with it.
            return
        if found is not None:
            preemption.tell(int(found))
            return


def _store() -> Any:
    from ray.experimental import internal_kv

    return internal_kv
