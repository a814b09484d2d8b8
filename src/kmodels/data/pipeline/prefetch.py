"""Batches made ahead of who asks for them, in a thread, a bounded number of them."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

# While the device is busy nobody waits for data; this often it is asked whether it still is.
_LOOK = 0.002
running: "weakref.WeakSet[Ahead]" = weakref.WeakSet()


def settle() -> None:
    """Waits until every thread has made all it may, so that nothing draws random numbers.

    A state read or put back after it belongs to a known batch: as many as are made ahead after the
    last one that was given out.
    """
    for ahead in list(running):
        ahead.settle()


class Ahead:
    """Takes batches from an iterator in a thread of its own.

    Args:
        batches: touched by that thread alone.
        count: batches made that wait to be taken, at most.
        place: what the thread does with each, such as putting it on the device.
    """

    def __init__(self, batches: Iterator[Any], count: int, place: Callable[[Any], Any]):
        self._shelf = _Shelf(count)
        # The thread holds the shelf, not this object: left alone, this one ends the thread.
        thread = threading.Thread(
            target=_make, args=(self._shelf, batches, place), name="kmodels-prefetch", daemon=True
        )
        self._finalizer = weakref.finalize(self, _end, self._shelf, thread)
        running.add(self)
        thread.start()

    def take(self, busy: Callable[[], bool] | None = None) -> tuple[Any, float]:
        """Returns the next batch, and the seconds waited for it.

        Args:
            busy: whether the device still works at what it was given; that time is not counted.

        Raises:
            StopIteration: after the last one.
            BaseException: what the iterator raised, after the batches before it.
        """
        shelf = self._shelf
        with shelf.changed:
            while busy is not None and not shelf.has_answer and busy():
                shelf.changed.wait(_LOOK)
            begun = perf_counter()
            while not shelf.has_answer:
                shelf.changed.wait()
            waited = perf_counter() - begun
            if shelf.batches:
                batch = shelf.batches.popleft()
                shelf.changed.notify_all()
                return batch, waited
            running.discard(self)  # The thread has ended, whoever still holds this.
            if shelf.error is not None:
                raise shelf.error
            raise StopIteration

    def settle(self) -> None:
        """Waits until as many batches are made as may be."""
        shelf = self._shelf
        with shelf.changed:
            while not (shelf.ended or shelf.closed or len(shelf.batches) >= shelf.count):
                shelf.changed.wait()

    def close(self) -> None:
        """Ends the thread, once the batch that it is at is made."""
        running.discard(self)
        self._finalizer()


class _Shelf:
    """Holds what the thread and its owner share."""

    def __init__(self, count: int):
        self.count = count
        self.batches: deque[Any] = deque()
        self.changed = threading.Condition()
        self.ended = self.closed = False
        self.error: BaseException | None = None

    @property
    def has_answer(self) -> bool:
        return bool(self.batches) or self.ended

    def wait_for_room(self) -> bool:
        """Waits for room, and returns False where nobody wants more."""
        with self.changed:
            while len(self.batches) >= self.count and not self.closed:
                self.changed.wait()
            return not self.closed

    def put(self, batch: object) -> None:
        with self.changed:
            self.batches.append(batch)
            self.changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        with self.changed:
            self.ended, self.error = True, error
            self.changed.notify_all()


def _make(shelf: _Shelf, batches: Iterator[Any], place: Callable[[Any], Any]) -> None:
    error = None
    try:
        while shelf.wait_for_room():
            shelf.put(place(next(batches)))
    except StopIteration:
        pass
    except BaseException as caught:
        error = caught
    finally:
        # Here, and not where the last reference goes: it may have files and processes to let go.
        if (close := getattr(batches, "close", None)) is not None:
            close()
        shelf.end(error)


def _end(shelf: _Shelf, thread: threading.Thread) -> None:
    with shelf.changed:
        shelf.closed = True
        shelf.batches.clear()
        shelf.changed.notify_all()
    if thread is not threading.current_thread():
        thread.join()
