"""Runs a script in several processes at once, and leaves none of them behind.

    outputs = launch([Process(SCRIPT, ranks=torch_ranks(2))], seconds=120)
    losses = [output.result()["losses"] for output in outputs]

A script prints what it found as one line of JSON, its last. Several checks belong in one launch,
since imports cost most: ranks are forks of one process, which has imported kmodels.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked_python import quick_python

ROOT = Path(__file__).resolve().parents[3]
# How long the others may continue when one has failed and all were to succeed.
GRACE = 15.0
# What a process reads, of which this module makes forks.
RANKS, RANKS_FOLDER = "KMODELS_TEST_RANKS", "KMODELS_TEST_RANKS_FOLDER"


@dataclass(frozen=True)
class Process:
    """What one process runs: a Python file, or a module by its name, without a slash and a dot.

    `env` is put over the variables of the tests; None takes one away. With `ranks` the script runs
    once for each of them, with these variables on top, which nothing reads before `main`.
    """

    script: Path | str
    arguments: Sequence[str] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    folder: Path | None = None
    ranks: Sequence[Mapping[str, str]] = ()


@dataclass(frozen=True)
class Output:
    """What one process left; `late`: it was killed because time was up."""

    status: int
    stdout: str
    stderr: str
    seconds: float
    late: bool

    def result(self) -> Any:
        return json.loads(self.stdout.splitlines()[-1])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torch_ranks(count: int) -> list[dict[str, str]]:
    port = str(free_port())
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        for rank in range(count)
    ]


def jax_ranks(count: int, devices: int = 2) -> list[dict[str, str]]:
    """What a user tells each of `count` JAX processes of `devices` virtual devices each."""
    others = [
        flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag
    ]
    return [
        {
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"127.0.0.1:{port}",
            "KERAS_DISTRIBUTION_NUM_PROCESSES": str(count),
            "KERAS_DISTRIBUTION_PROCESS_ID": str(rank),
            "XLA_FLAGS": " ".join([*others, f"--xla_force_host_platform_device_count={devices}"]),
        }
        for port in [free_port()]
        for rank in range(count)
    ]


def jax_cache(folder: Path) -> dict[str, str]:
    """Has JAX processes compile a program once that they make several times."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def launch(
    processes: Sequence[Process], seconds: float = 120.0, check: bool = True
) -> list[Output]:
    """Runs all at once; when it returns, they and all that they started are gone.

    After so many seconds all that still run are killed. With `check` an `AssertionError` shows the
    end of what each wrote, where one fails or is late.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = [_Child(process, Path(folder) / str(i)) for i, process in enumerate(processes)]
        try:
            limit, alone = time.monotonic() + seconds, False
            while any(child.running() for child in children) and time.monotonic() < limit:
                if check and not alone and any(child.failed() for child in children):
                    limit, alone = min(limit, time.monotonic() + GRACE), True
                time.sleep(0.05)
        finally:
            for child in children:
                child.kill()
        outputs = [output for child in children for output in child.outputs()]
    bad = [output.status != 0 or output.late for output in outputs]
    if check and any(bad):
        raise AssertionError("\n".join(_tail(i, output) for i, output in enumerate(outputs)))
    return outputs


class _Child:
    """A process, the leader of a group of its own, with its files."""

    def __init__(self, process: Process, folder: Path):
        folder.mkdir()
        self.folder, self.ranks = folder, range(len(process.ranks))
        env: dict[str, str] = dict(os.environ) | {
            RANKS: json.dumps([*map(dict, process.ranks)]),
            RANKS_FOLDER: str(folder),
        }
        paths = [ROOT / "src", ROOT / "tests", ROOT / "tests" / "loop" / "distribution"]
        # What tests/conftest.py spares the processes that tests start.
        paths += [ROOT / "tests" / "children"]
        env["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        env.setdefault("OMP_NUM_THREADS", "1")
        for name, value in process.env.items():
            env.pop(name, None)
            if value is not None:
                env[name] = value
        self.begun = time.monotonic()
        self.ended: float | None = None
        self.late = False
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            self.popen = subprocess.Popen(
                [quick_python(), __file__, str(process.script), *process.arguments],
                stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, env=env,
                cwd=process.folder, start_new_session=True,
            )  # fmt: skip

    def running(self) -> bool:
        if self.popen.poll() is None:
            return True
        self.ended = self.ended or time.monotonic()
        return False

    def statuses(self) -> list[int | None]:
        """Exit statuses of the process, or of its ranks: None while one runs."""
        if not self.ranks:
            return [self.popen.poll()]
        files = [self.folder / f"{rank}.status" for rank in self.ranks]
        return [int(file.read_text()) if file.exists() else None for file in files]

    def failed(self) -> bool:
        return any(status not in (None, 0) for status in self.statuses())

    def kill(self) -> None:
        self.late = self.running()
        # torchrun's workers lead groups of their own.
        for pid in [*descendants(self.popen.pid), self.popen.pid]:
            try:
                os.killpg(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        self.popen.wait()
        if self.popen.stdin is not None:
            self.popen.stdin.close()

    def text(self, rank: int | str, name: str) -> str:
        """What a rank wrote, or the process itself where imports failed before there were ranks."""
        own = self.folder / f"{rank}{name}"
        return (own if own.exists() else self.folder / name).read_text(errors="replace")

    def outputs(self) -> list[Output]:
        seconds = (self.ended or time.monotonic()) - self.begun
        outputs = []
        for status, rank in zip(self.statuses(), self.ranks or [""], strict=True):
            texts = [self.text(rank, name) for name in ("stdout", "stderr")]
            late = self.late and (not self.ranks or status is None)
            status = self.popen.returncode if status is None else status
            outputs.append(Output(status, *texts, seconds, late))
        return outputs


def descendants(pid: int) -> list[int]:
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,comm="], capture_output=True, text=True)
    parents = []
    for line in table.stdout.splitlines():
        child, its, name = line.split(maxsplit=2)
        parents.append((int(child), int(its)))
        if name.startswith("fork "):  # see forked_python.py
            parents.append((int(name.split()[1]), int(child)))
    found = [pid]
    for parent in found:
        found += [child for child, its in parents if its == parent]
    return found[1:]


def _tail(index: int, output: Output) -> str:
    how = "killed, time was up" if output.late else f"status {output.status}"
    text = f"{output.stdout[-1000:]}\n{output.stderr[-3000:]}"
    return f"--- process {index}: {how} after {output.seconds:.0f} s\n{text}"


def _end_with_parent() -> None:
    """Kills this process and its group when whoever holds the other end of stdin is gone."""
    while os.read(0, 1024):
        pass
    os.killpg(0, signal.SIGKILL)


def _fork(ranks: list[dict[str, str]], folder: Path) -> None:
    """Returns in a copy of this process for each rank; this one ends after them."""
    # Names, because a package of kmodels imports its modules, and Keras, when it is asked for one.
    from kmodels.models import GemmaCausalLM, ViTImageClassifier  # noqa: F401
    from kmodels.training import AdamW  # noqa: F401

    running = {}
    for rank, env in enumerate(ranks):
        if pid := os.fork():
            running[pid] = rank
            continue
        os.environ.update(env)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            with (folder / f"{rank}{name}").open("wb") as file:
                os.dup2(file.fileno(), descriptor)
        return
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while running:
        pid, status = os.wait()
        written = folder / "status"
        written.write_text(str(os.waitstatus_to_exitcode(status)))
        written.rename(folder / f"{running.pop(pid)}.status")
    os._exit(0)


if __name__ == "__main__":
    if ranks := json.loads(os.environ.pop(RANKS)):
        _fork(ranks, Path(os.environ[RANKS_FOLDER]))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv = sys.argv[1:]
    name = sys.argv[0]
    # The folder of this file would let its neighbours stand for packages of the same name.
    sys.path[0] = str(Path(name).parent)
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
