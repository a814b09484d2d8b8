"""Batches that a thread makes ahead of the steps, a bounded number of them."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

# Seconds between checks whether the device is still busy, in which case no step waits for data.
_LOOK = 0.002
running: "weakref.WeakSet[Ahead]" = weakref.WeakSet()


def settle() -> None:
    """Waits until every thread has made all its batches, so that none draws random numbers.

    Generators then have the states after a known batch: the last one that was returned plus the
    number of batches that are prefetched.
    """
    for ahead in list(running):
        ahead.settle()


class Ahead:
    """Reads batches in a thread, which alone uses the iterator; at most `count` wait.

    The thread applies `place` to each, such as placing it on the device.
    """

    def __init__(self, batches: Iterator[Any], count: int, place: Callable[[Any], Any]):
        self._shelf = _Shelf(count)
        # The thread refers to the shelf only, so that this object is deleted and ends the thread.
        thread = threading.Thread(
            target=_make, args=(self._shelf, batches, place), name="kmodels-prefetch", daemon=True
        )
        self._finalizer = weakref.finalize(self, _end, self._shelf, thread)
        running.add(self)
        thread.start()

    def take(self, busy: Callable[[], bool] | None = None) -> tuple[Any, float]:
        """Returns the next batch, and the seconds that the step waited for it.

        Time while the device is busy is not counted. After the last batch it raises the error of
        the iterator, or StopIteration.
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
            running.discard(self)  # The thread has ended.
            if shelf.error is not None:
                raise shelf.error
            raise StopIteration

    def settle(self) -> None:
        """Waits until `count` batches are made, or the thread has ended."""
        shelf = self._shelf
        with shelf.changed:
            while not (shelf.ended or shelf.closed or len(shelf.batches) >= shelf.count):
                shelf.changed.wait()

    def close(self) -> None:
        """Ends the thread after its current batch."""
        running.discard(self)
        self._finalizer()


class _Shelf:
    """The state that the thread shares with its owner."""

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
        """Waits for room; returns False if the shelf is closed."""
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
        # In this thread: the iterator may have files and processes to close.
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
