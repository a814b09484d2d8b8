"""The quick form of benchmarks/faults: the bars are the same, the counts are small."""

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "faults"


@pytest.fixture(scope="module", autouse=True)
def _beside():
    """The scripts import what lies beside them."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


def load(name):
    spec = importlib.util.spec_from_file_location(f"faults_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def writing(_beside):
    return load("writing")


@pytest.fixture(scope="module")
def foreign(_beside):
    return load("foreign")


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_killed_while_writing(writing):
    counts = writing.kill_while_writing(6)
    assert counts["whole"] == counts["trials"]
    assert counts["damaged"] == counts["left over"] == 0


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_full_disk(writing):
    counts = writing.full_disk(2)
    assert counts["clear errors"] == counts["former intact"] == counts["trials"] >= 2
    assert counts["left over"] == 0


def test_bits_and_cuts(writing):
    counts = writing.damage(60, 12)
    assert counts["wrong loads"] == 0
    assert counts["passed over"] > 60


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_reader_beside_a_writer(writing):
    counts = writing.read_while_writing(15)
    assert counts["whole"] == counts["reads"]
    assert counts["states seen"] > 1


def test_the_order_of_one_save(writing, tmp_path, monkeypatch):
    """What the full form sees by strace, recorded in the process."""
    calls = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(handle):
        calls.append(("fsync", Path(os.readlink(f"/proc/self/fd/{handle}"))))
        fsync(handle)

    def record_replace(source, target):
        calls.append(("replace", Path(source)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    path = writing.manager.save(tmp_path, writing.snapshot(1, 10))
    at = next(n for n, (kind, _) in enumerate(calls) if kind == "replace")
    new = calls[at][1]
    synced = {path for _, path in calls[:at]}
    assert synced == {new, *(new / file.name for file in path.iterdir())}
    assert calls[at + 1 :] == [("fsync", tmp_path)]


@pytest.mark.parametrize("kind", ["safetensors", "indexes", "pickles"])
def test_files_from_elsewhere(foreign, kind):
    trials = 100
    counts = getattr(foreign, kind)(trials)
    assert counts["other errors"] == counts["more than a line"] == counts["events"] == 0, counts
    assert counts["of them loaded"] == 0
    assert counts["refused"] > trials / 3


@pytest.mark.parametrize(("kind", "trials"), [("pictures", 45), ("lines", 120)])
def test_damaged_data(_beside, kind, trials):
    counts = getattr(load("inputs"), kind)(trials)
    assert counts["other errors"] == counts["told badly"] == 0, counts
    assert counts["told in a line"] > trials / 5


def test_a_run_that_is_killed_goes_on_bit_by_bit(_beside, tmp_path):
    runs, recipe = load("runs"), load("../../recipes/vit")
    flags = (*runs.FLAGS, "--epochs", "3")
    killed = runs.Run("vit", tmp_path / "killed", *flags)
    killed.to_step(11)
    killed.interrupt(signal.SIGKILL)
    assert killed.code == -signal.SIGKILL
    assert any((tmp_path / "killed" / "checkpoints").glob("step_*"))
    assert recipe.main(["--resume", "--out", str(tmp_path / "killed")]) == 0
    assert recipe.main([*flags, "--out", str(tmp_path / "whole")]) == 0
    assert runs.result(tmp_path / "killed") == runs.result(tmp_path / "whole")


def test_cut_within_an_epoch_and_gone_on_with(_beside):
    counts = load("resume").resumed("all of them", (9,))
    assert counts["equal"] == counts["same decisions"] == counts["cuts"] == 1, counts
    assert counts["largest difference"] == 0.0


@pytest.mark.parametrize("way", ["fit, loss not looked at", "run that skips"])
def test_what_is_not_finite_reaches_no_checkpoint(_beside, way):
    nonfinite = load("nonfinite")
    for kind in nonfinite.KINDS:
        counts = nonfinite.trials(kind, way, range(2, 3))
        assert counts["not finite"] == counts["told badly"] == 0, (kind, counts)
        assert counts["checkpoints"] > 1
