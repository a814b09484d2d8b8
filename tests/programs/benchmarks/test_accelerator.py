"""Benchmarks in their smallest form, on CPU.

Every piece of `make accelerator` runs, resumes, fails alone and keeps its rows when it is cut;
packing gives more useful tokens and the same losses.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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
    assert "0 ran now, 9 done, 1 failed, 0 cut, 0 left" in again.stdout
    others = [piece for piece in names if piece != broken]
    assert accelerator(tmp_path, "--only", *others).returncode == 0


def test_time_that_is_too_short_leaves_pieces_and_unknown_names_are_refused(tmp_path) -> None:
    late = accelerator(tmp_path, "--only", "matmul", "--minutes", "0.1")
    assert late.returncode == 1
    assert "left: matmul-torch, matmul-jax; call again to continue" in late.stdout
    wrong = accelerator(tmp_path, "--only", "nobody")
    assert wrong.returncode == 2
    assert "no piece is called nobody; --list names all" in wrong.stderr


@pytest.mark.nightly
@pytest.mark.across("torch", "jax")
@pytest.mark.parametrize("command", [1, 2])
def test_a_quarter_runs_and_keeps_what_is_cut(backend, command, tmp_path) -> None:
    chosen = ("--quarter", command, "--only", backend)
    done = accelerator(tmp_path, *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert whole and {content["state"] for content in whole.values()} == {"done"}
    timed = [content for content in whole.values() if content["key"]["table"] not in UNTIMED]
    assert all(any("median_ms" in row for row in content["rows"]) for content in timed)

    name = f"{'vit' if command == 1 else 'generate'}-quarter-{backend}"
    hanging = ("--quarter", command, "--only", name, "--limit", 60)
    cut = accelerator(tmp_path / "cut", *hanging, KMODELS_ACCELERATOR_HANG="all")
    assert cut.returncode == 1 and f"cut: {name}: stopped after" in cut.stdout, cut.stdout
    kept = json.loads((tmp_path / "cut" / f"{name}.json").read_text())
    assert kept["state"] == "cut" and kept["rows"][0]["system"] == "kmodels"


@pytest.fixture
def programs(monkeypatch):
    """The modules of benchmarks/accelerator."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from accelerator import child, page, pieces, runner

    return SimpleNamespace(child=child, page=page, pieces=pieces, runner=runner)


@pytest.mark.parametrize("command", [1, 2])
def test_the_limits_of_a_quarter_leave_half_a_minute(programs, command):
    groups = programs.runner.groups(programs.pieces.quarter(command), command)
    assert sum(group[0].limit for group in groups) == 480
    for group in groups:
        assert {piece.limit for piece in group} == {group[0].limit}
        assert len({piece.backend for piece in group}) == len(group)
    names = [piece.name for piece in programs.pieces.pieces()]
    names += [piece.name for number in (1, 2) for piece in programs.pieces.quarter(number)]
    assert len(set(names)) == len(names)


def test_a_table_that_raises_leaves_the_rows_before(programs, monkeypatch):
    def run(settings):
        yield {"absent": ["nobody"]}
        yield {"rows": [{"case": "a", "system": "kmodels", "median_ms": settings["ms"]}]}
        raise ValueError("the device is gone")

    monkeypatch.setitem(sys.modules, "accelerator.broken", SimpleNamespace(run=run))
    saved: list[dict] = []
    piece = programs.pieces.Piece("broken", "torch", 1.0, settings={"ms": 2.0})
    programs.child.run(piece, saved.append)
    assert [content["state"] for content in saved] == ["cut", "cut", "cut", "failed"]
    assert [len(content["rows"]) for content in saved] == [0, 0, 1, 1]
    assert saved[-1]["error"] == "ValueError: the device is gone"
    assert saved[-1]["absent"] == ["nobody"] and saved[-1]["rows"][0]["median_ms"] == 2.0


def test_processes_that_run_too_long_are_killed_side_by_side(programs, monkeypatch, tmp_path):
    processes = []

    def launch(part, out):
        row = {"case": "a", "system": part[0].backend}
        programs.child.write(out, part[0], "source", {"state": "cut", "rows": [row]})
        command = ["sleep", "60"] if part[0].backend == "torch" else ["false"]
        programs.runner.log_of(part, out).write_text("out of memory\n\n")
        processes.append(subprocess.Popen(command, start_new_session=True))
        return processes[-1]

    monkeypatch.setattr(programs.runner, "launch", launch)
    group = [programs.pieces.Piece("vit", name, 1.0) for name in ("torch", "jax")]
    programs.runner.start(group, tmp_path, "source", 1.0)
    assert [process.returncode for process in processes] == [-9, 1]
    torch, jax = (programs.runner.result(tmp_path, piece, "source") for piece in group)
    assert (torch["state"], torch["error"]) == ("cut", "stopped after 1 s")
    assert (jax["state"], jax["error"]) == ("failed", "the process ended with 1: out of memory")
    assert [content["rows"][0]["system"] for content in (torch, jax)] == ["torch", "jax"]


def test_the_page_of_a_gpu_is_made_of_files(programs, tmp_path):
    page = programs.page
    assert page.PAGE.read_text() == page.text(page.RESULTS), "benchmarks/accelerator --page"
    assert page.text(tmp_path) == page.HEAD + page.NOT_RUN
    rows = [
        {"case": "b16 x128", "system": "kmodels", "median_ms": 50.0, "images_per_s": 2560.0}
        | {"mfu": 0.41, "first_s": 12.3, "calls": 3, "peak_above_held_mib": 9000},
        {"case": "b16 x128", "system": "timm_eager", "median_ms": 75.0, "calls": 1},
        {"case": "b16 x128", "system": "timm_compiled", "failed": "RuntimeError: no compiler"},
    ]
    differences = [{"difference": 1e-6, "allowed": 1e-5}, {"difference": 1e-4, "allowed": 1e-5}]
    compared = [{"case": str(i), "system": "device", **x} for i, x in enumerate(differences)]
    contents = {
        "vit": {"state": "cut", "error": "stopped after 150 s", "rows": rows},
        "correctness": {"state": "done", "rows": compared, "outside": ["1: 1e-4, allowed 1e-5"]},
    }
    folder = tmp_path / "accelerator-nvidia-h100"
    folder.mkdir()
    hardware = {"device": "NVIDIA H100", "python": "3.12.3", "versions": {"torch": "2.11.0"}}
    about = {"date": "2026-12-01", "revision": "abc", "hardware": hardware}
    for table, content in contents.items():
        name = f"{table}-quarter-torch"
        whole = {**about, **content, "piece": name, "key": {"table": table, "backend": "torch"}}
        whole["key"]["small"] = False
        (folder / f"{name}.json").write_text(json.dumps(whole))
    text = page.text(tmp_path)
    assert page.NOT_RUN not in text
    for line in (
        "## NVIDIA H100",
        "The run of 2026-12-01 had commit abc, Python 3.12.3, torch 2.11.0.",
        "1 of 2 results agree with the CPU.",
        "- `1: 1e-4, allowed 1e-5`",
        "The piece ended early: stopped after 150 s.",
        "| b16 x128 | `kmodels` | 50.0 | 1.00 | 2,560.0 images/s, 41% of the bfloat16 rate "
        "| 9,000 | first call 12 s |",
        "| b16 x128 | `timm_eager` | 75.0 | 1.50 |  |  | one call |",
        "| b16 x128 | `timm_compiled` |  |  |  |  | RuntimeError: no compiler |",
    ):
        assert line in text.splitlines(), text


@pytest.mark.nightly
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
