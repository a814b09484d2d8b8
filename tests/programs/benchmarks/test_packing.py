"""The benchmark of packing in its smallest form: more useful tokens, the same losses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kmodels.text import demo

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.once  # tests/models has the losses of packed rows on each backend
def test_packing_removes_padding_and_keeps_losses(backend, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in demo.instructions().rows[:60]))
    small = ["--length", "128", "--batch", "2", "--steps", "2", "--rounds", "1", "--examples", "8"]
    command = [sys.executable, str(ROOT / "benchmarks" / "packing.py"), str(data), *small]
    done = subprocess.run(
        [*command, "--backends", backend],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rows"]["packed"] < found["rows"]["padded"] == found["records"] == 60
    assert found["filled"]["packed"] > found["filled"]["padded"]
    assert 0 <= found["loss_difference"] < 1e-5
