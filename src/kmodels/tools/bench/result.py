"""The results of a benchmark as plain values."""

import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kmodels.tools.bench.compare import LOSSES
from kmodels.tools.bench.options import BenchOptions

FORMAT = 1


def times(
    seconds: Sequence[float], first_s: float, options: BenchOptions, text: bool
) -> dict[str, Any]:
    """Returns what the times of a row come to.

    Args:
        seconds: seconds of each step.
        first_s: seconds of the first one, which compiles.
        options: options of the run.
        text: whether tokens are counted, or images.
    """
    median = statistics.median(seconds)
    low, high = median, median
    if len(seconds) > 1:
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    items = options.batch_size * (options.sequence_length if text else 1)
    return {
        "rate": round(items / median, 3),
        "step_s": {"median": round(median, 5), "low": round(low, 5), "high": round(high, 5)},
        "seconds": [round(one, 5) for one in seconds],
        "compile_s": round(max(first_s - median, 0.0), 2),
    }


def result(
    options: BenchOptions, rows: Sequence[dict[str, Any]], notes: Sequence[str]
) -> dict[str, Any]:
    """Returns the content of bench.json, see `run`."""
    settings = asdict(options)
    # The place of interpreters concerns this machine alone.
    settings.pop("python")
    text = any(row["facts"]["text"] for row in rows if row["failed"] is None)
    return {
        "kind": "kmodels bench",
        "format": FORMAT,
        "preset": options.preset,
        "unit": "tokens" if text else "images",
        "options": settings,
        "hardware": {"processor": _processor(), "cpus": len(options.cpus) or os.cpu_count()},
        "date": time.strftime("%Y-%m-%d"),
        "tolerances": {name: LOSSES[name] for name in options.precisions},
        "left_out": list(notes),
        "rows": list(rows),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
