"""What the scripts of this folder share: flags, one thread, processes, memory, and the result."""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
# The environment of a process that computes in one thread on every backend.
ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    **dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1"),
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def flags(question: str | None) -> argparse.ArgumentParser:
    """Returns a parser with --write, described by the first line of a question."""
    parser = argparse.ArgumentParser(description=str(question).splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write benchmarks/results")
    return parser


def child(script: str, backend: str, *words: str, **environment: str) -> Any:
    """Returns the JSON in the last line that a script prints in a process of one backend.

    Raises:
        SystemExit: with the end of its errors, if it fails.
    """
    done = subprocess.run(
        [sys.executable, script, *words],
        env={**os.environ, **ONE_THREAD, "KERAS_BACKEND": backend, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{backend} {words[-1]} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def status(name: str) -> int:
    """Returns a line of the memory of this process in bytes, such as VmRSS or VmHWM, its peak."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) * 1024


def write(name: str, question: str | None, packages: Iterable[str], **content: object) -> Path:
    """Writes results/NAME_DATE.json and returns its path.

    Args:
        name: script, case, backend and hardware.
        question: text whose first line is the question.
        packages: packages whose versions count, if they are installed.
        **content: settings and figures.
    """
    date, versions = time.strftime("%Y-%m-%d"), {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    about = {
        "question": str(question).splitlines()[0],
        "device": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "versions": versions,
        "date": date,
    }
    path = RESULTS / f"{name}_{date}.json"
    path.write_text(json.dumps({**about, **content}, indent=1) + "\n")
    print(path)
    return path
