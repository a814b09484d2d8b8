"""The tests of ops and overrides, with the accelerator as the backend's device."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from accelerator import clock
from accelerator.pieces import SMALL

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/numerics/ops", "tests/numerics/overrides")
FEW = ("tests/numerics/ops/test_ops.py", "-k", "keeps_a_float32_scale")


def run(settings: dict[str, Any]) -> clock.Parts:
    """Yields counts of passed, failed and skipped tests, and the names of those that failed."""
    if clock.absent(pytest="pytest"):
        yield {"absent": ["pytest"]}
        return
    platforms = "cuda,cpu" if clock.on_gpu() else "cpu"
    environment = {**os.environ, "JAX_PLATFORMS": platforms}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--tb=line", "-rf", *(FEW if SMALL else FOLDERS)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    pattern = r"(\d+) (passed|failed|skipped|error)"
    counts = {kind: int(count) for count, kind in re.findall(pattern, done.stdout)}
    if not counts:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise RuntimeError(f"pytest ended with {done.returncode}: {' '.join(last)}")
    failed = re.findall(r"^FAILED (\S.*)$", done.stdout, re.MULTILINE)
    row = {"case": " ".join(FEW if SMALL else FOLDERS), "system": "pytest", **counts}
    yield {"rows": [row], "outside": [line[:200] for line in failed]}
