"""A system in its process, as the parent sees it."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vit_peers import SYSTEMS
from vit_peers.common import Settings

HERE = Path(__file__).resolve().parents[1]
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "JAX_PLATFORMS": "cpu",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "src")]),
}


class Child:
    """A system in its process; computes only while it is asked for steps."""

    def __init__(self, name: str, settings: Settings, cpu: int):
        self.name = name
        self.log = tempfile.TemporaryFile()  # noqa: SIM115, lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vit_peers.child", name, json.dumps(asdict(settings))],
            env={
                **os.environ,
                **ONE_THREAD,
                "KERAS_BACKEND": settings.backend,
                **SYSTEMS[name].environment,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            preexec_fn=lambda: os.sched_setaffinity(0, {cpu}),
        )
        try:
            self.built = self._read()
        except BaseException:
            self.process.kill()
            raise

    def steps(self, number: int) -> dict[str, Any]:
        """Runs so many steps: their losses, and `cpu_s` and `wall_s` of all together."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"steps": number}).encode() + b"\n")
        self.process.stdin.flush()
        return self._read()

    def stop(self) -> dict[str, Any]:
        """Ends the process: its peak memory, and which overrides its ops took."""
        last = self.steps(0)
        self.process.wait()
        return last

    def peak_mb(self) -> float:
        """Most memory that the process has held so far, in MiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.split("VmHWM:")[1].split()[0]) / 1024

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.log.seek(0)
        text = self.log.read().decode(errors="replace")
        raise RuntimeError(f"{self.name} ended:\n{text[-2000:]}")
