"""The time that steps wait for data, and the number of workers that would avoid it."""

import math
import os
import time
from collections.abc import Callable
from time import perf_counter
from typing import Any

from kmodels.core.errors import pluralize

# A smaller share, or less time in an epoch, is not worth a line.
SHOWN_SHARE, SHOWN_SECONDS = 0.05, 0.1


class DataWaitTimer:
    """Measures how long steps wait for data, in each epoch and over the run of `fit`.

    Only time in which a step has no batch and the device is idle counts: if the device computes
    while the next batch is made, no time is lost. The device is not synchronized for this.

    Args:
        workers: processes that make batches; 0 if the training process makes them.
        parameter: name of the argument for their number, such as "workers" or "--workers", or None.
        faster: other advice, for data that workers cannot make.

    Attributes:
        last_output: returns an output array of the last step of `fit`, or None.
        batches: number of batches of the epoch.
        waited: seconds of the epoch in which steps waited.
        seconds: seconds of training in the epoch.
    """

    def __init__(self, workers: int = 0, parameter: str | None = None, faster: str | None = None):
        self.workers, self.parameter, self.faster = workers, parameter, faster
        self.last_output: Callable[[], Any] = lambda: None
        self._all_waited = self._all_seconds = 0.0
        self.begin_epoch()
        self._ended = True

    def begin_epoch(self) -> None:
        """Starts measuring, as the training of an epoch begins."""
        self.batches = self._made = 0
        self.waited = self.seconds = self._making = self._making_cpu = 0.0
        self._begun, self._begun_cpu = perf_counter(), time.process_time()
        self._later: tuple[float, float] | None = None
        self._ended = False

    def made(self, seconds: float, cpu: float) -> None:
        """Records the seconds in which a batch was made, here or by workers."""
        self._made += 1
        self._making += seconds
        self._making_cpu += cpu

    def waits(self, seconds: float) -> None:
        """Records the seconds that a step waited for its batch."""
        if self.batches == 1:
            # The first step compiles, and workers start, before this.
            self._later = (perf_counter() - seconds, self.waited)
        self.waited += seconds
        self.batches += 1

    def end_epoch(self) -> None:
        """Ends measuring, before the validation of an epoch."""
        if self._ended:
            return
        self._ended = True
        now = perf_counter()
        self._cpu = time.process_time() - self._begun_cpu
        self.seconds = now - self._begun
        self._all_seconds += self.seconds
        self._all_waited += self.waited

    @property
    def share(self) -> float:
        """Share of the training time of the run in which steps waited, from 0 to 1."""
        return min(self._all_waited / self._all_seconds, 1.0) if self._all_seconds else 0.0

    def line(self) -> str | None:
        """Returns the line to print after an epoch, or None if the wait was short."""
        self.end_epoch()
        if self.waited < max(SHOWN_SHARE * self.seconds, SHOWN_SECONDS):
            return None
        count = max(self.batches, 1)
        return (
            f"waited for data {self.waited / self.seconds:.0%} of the epoch "
            f"({1000 * self.waited / count:.1f} of {1000 * self.seconds / count:.1f} ms a batch): "
            f"{self._advice()}"
        )

    def _advice(self) -> str:
        if self.faster is not None:
            return self.faster
        since, first = self._later or (self._begun, 0.0)
        seconds, waited = self.seconds - (since - self._begun), self.waited - first
        count = self.batches - 1
        if count < 1 or waited < SHOWN_SHARE * seconds:
            return "nearly all of it before the first batch; keep workers between epochs"
        step = max((seconds - waited) / count, 1e-6)
        # Busy workers together make a batch in the time of a step and its wait.
        make = self.workers * seconds / count if self.workers else self._making / self._made
        # The share of computing in the time of workers, who may wait for a disk, is not known.
        make_cpu = 0.0 if self.workers else self._making_cpu / self._made
        # While the first step is compiled, about one core is busy.
        own = self._cpu - (since - self._begun - first)
        own -= 0.0 if self.workers else self._making_cpu
        cores = _cores()
        best = max(step, (make_cpu + max(own, 0.0) / count) / cores)
        left, share = 1 - step / best, waited / seconds
        need = max(math.ceil(make / best - SHOWN_SHARE), self.workers + 1)
        if left > 0.75 * share:
            return (
                f"no number of workers ends that, since {cores} cores have no room beside the "
                f"step for {1000 * make_cpu:.1f} ms a batch; make batches cheaper, or keep them"
            )
        named = f"a loader with {pluralize(need, 'worker')}"
        if self.parameter is not None:
            named = f"{self.parameter}{' ' if self.parameter.startswith('-') else '='}{need}"
        if self.workers and need > cores:
            return f"{named} would end that, unless they compute: there are {cores} cores"
        if left > SHOWN_SHARE:
            return f"{named} would leave {left:.0%}, and {cores} cores have no room for more"
        return f"{named} would end that"


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
