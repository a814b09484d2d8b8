"""Benchmarks in their smallest form, on CPU.

Every piece of `make accelerator` runs, resumes, and fails alone; packing gives more useful tokens
and the same losses.
"""

import json
import subprocess
from pathlib import Path

import pytest

from kmodels.text import demo
from python_process import run_python

ROOT = Path(__file__).resolve().parents[3]
# What every result of a table has beside its rows; correctness and suite have no times.
UNTIMED = {"correctness", "suite"}


def accelerator(out: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    given = {"KMODELS_SMALL": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    program = ROOT / "benchmarks" / "accelerator"
    return run_python(program, "--out", out, *arguments, seconds=300, **given)


@pytest.mark.nightly
@pytest.mark.across("torch", "jax")
def test_every_piece_runs_and_resumes(backend, tmp_path) -> None:
    listed = accelerator(tmp_path, "--list", "--only", backend)
    names = [line.split()[0] for line in listed.stdout.splitlines()[:-1]]
    assert listed.returncode == 0 and len(names) == 10, listed.stderr
    broken = f"matmul-{backend}"
    done = accelerator(tmp_path, "--only", backend, KMODELS_ACCELERATOR_BREAK=broken)
    assert done.returncode == 1, done.stdout + done.stderr
    failure = "RuntimeError: this piece was told to break"
    assert f"failed: {broken}: {failure}" in done.stdout
    for name in names:
        found = json.loads((tmp_path / f"{name}.json").read_text())
        if name == broken:
            assert found["state"] == "failed" and found["error"] == failure
            continue
        assert found["state"] == "done", found
        assert found["rows"] and found["hardware"]["versions"]["keras"] != "absent"
        assert not [row for row in found["rows"] if "failed" in row]
        assert not found.get("outside")
        if found["key"]["table"] not in UNTIMED:
            assert any(row.get("median_ms", 0) > 0 for row in found["rows"])
            assert (tmp_path / f"{name}.png").stat().st_size > 0

    again = accelerator(tmp_path, "--only", backend)
    assert again.returncode == 1  # the failure stays, until it is tried again
    assert "0 ran now, 9 done, 1 failed, 0 left" in again.stdout
    others = [piece for piece in names if piece != broken]
    assert accelerator(tmp_path, "--only", *others).returncode == 0


def test_time_that_is_too_short_leaves_pieces_and_unknown_names_are_refused(tmp_path) -> None:
    late = accelerator(tmp_path, "--only", "matmul", "--minutes", "0.1")
    assert late.returncode == 1
    assert "left: matmul-torch, matmul-jax; call again to continue" in late.stdout
    wrong = accelerator(tmp_path, "--only", "nobody")
    assert wrong.returncode == 2
    assert "no piece is called nobody; --list names all" in wrong.stderr


def test_packing_removes_padding_and_keeps_losses(backend, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in demo.instructions().rows[:60]))
    small = ["--length", "128", "--batch", "2", "--steps", "2", "--rounds", "1", "--examples", "8"]
    script = ROOT / "benchmarks" / "packing.py"
    done = run_python(script, data, *small, "--backends", backend)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rows"]["packed"] < found["rows"]["padded"] == found["records"] == 60
    assert found["filled"]["packed"] > found["filled"]["padded"]
    assert 0 <= found["loss_difference"] < 1e-5
