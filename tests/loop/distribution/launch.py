"""Runs a script in several processes at once, and leaves none of them behind.

    outputs = launch([Process(SCRIPT, env=rank) for rank in torch_ranks(2)], seconds=120)
    losses = [output.result()["losses"] for output in outputs]

A script prints what it found as one line of JSON, its last. Several checks belong in one launch,
since imports cost most.
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

ROOT = Path(__file__).resolve().parents[3]
# How long the others may continue when one has failed and all were to succeed.
GRACE = 15.0


@dataclass(frozen=True)
class Process:
    """What one process runs: a Python file, or a module by its name, without a slash and a dot.

    `env` is put over the variables of the tests; None takes one away.
    """

    script: Path | str
    arguments: Sequence[str] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    folder: Path | None = None


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


def torch_ranks(count: int, **env: str) -> list[dict[str, str]]:
    port = str(free_port())
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            **env,
        }
        for rank in range(count)
    ]


def jax_ranks(count: int, devices: int = 2, **env: str) -> list[dict[str, str]]:
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
            **env,
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
        outputs = [child.output() for child in children]
    bad = [output.status != 0 or output.late for output in outputs]
    if check and any(bad):
        raise AssertionError("\n".join(_tail(i, output) for i, output in enumerate(outputs)))
    return outputs


class _Child:
    """A process, the leader of a group of its own, with its files."""

    def __init__(self, process: Process, folder: Path):
        folder.mkdir()
        self.files = folder / "stdout", folder / "stderr"
        env: dict[str, str] = dict(os.environ)
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
        with self.files[0].open("wb") as stdout, self.files[1].open("wb") as stderr:
            self.popen = subprocess.Popen(
                [sys.executable, __file__, str(process.script), *process.arguments],
                stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, env=env,
                cwd=process.folder, start_new_session=True,
            )  # fmt: skip

    def running(self) -> bool:
        if self.popen.poll() is None:
            return True
        self.ended = self.ended or time.monotonic()
        return False

    def failed(self) -> bool:
        return self.popen.poll() not in (None, 0)

    def kill(self) -> None:
        self.late = self.running()
        # torchrun's workers lead groups of their own.
        for pid in [*_descendants(self.popen.pid), self.popen.pid]:
            try:
                os.killpg(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        self.popen.wait()
        if self.popen.stdin is not None:
            self.popen.stdin.close()

    def output(self) -> Output:
        texts = [file.read_text(errors="replace") for file in self.files]
        seconds = (self.ended or time.monotonic()) - self.begun
        return Output(self.popen.returncode, *texts, seconds, self.late)


def _descendants(pid: int) -> list[int]:
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)
    parents = [tuple(map(int, line.split())) for line in table.stdout.splitlines()]
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
    os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv = sys.argv[1:]
    name = sys.argv[0]
    # The folder of this file would let its neighbours stand for packages of the same name.
    sys.path[0] = str(Path(name).parent)
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
