"""The quick form of benchmarks/faults: the bars are the same, the counts are small."""

import os
import signal
import sys
from pathlib import Path

import pytest

from recipe_modules import load

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "faults"
sys.path.insert(0, str(FOLDER))
try:
    import adapters
    import foreign
    import hostile
    import inputs
    import nonfinite
    import resume
    import runs
    import settings
    import writing
finally:
    sys.path.remove(str(FOLDER))

SIZE = 80 * 2**20  # more than is unpacked whatever it came from
CASES = settings.cases()
RECIPES = [case for case in CASES if ".py " in case.name]
# A part of the recipes' settings: most of these are tried in tests/programs too.
QUICK = [case for case in CASES if case not in RECIPES] + RECIPES[::5]
forks = pytest.mark.filterwarnings("ignore:.*fork.*")


# === Checkpoints ===


@forks
def test_killed_while_writing():
    counts = writing.kill_while_writing(6)
    assert counts["whole"] == counts["trials"]
    assert counts["damaged"] == counts["left over"] == 0


@forks
def test_a_full_disk():
    counts = writing.full_disk(2)
    assert counts["clear errors"] == counts["former intact"] == counts["trials"] >= 2
    assert counts["left over"] == 0


def test_bits_and_cuts():
    counts = writing.damage(60, 12)
    assert counts["wrong loads"] == 0
    assert counts["passed over"] > 60


@forks
def test_a_reader_beside_a_writer():
    counts = writing.read_while_writing(15)
    assert counts["whole"] == counts["reads"]
    assert counts["states seen"] > 1


def test_the_order_of_one_save(tmp_path, monkeypatch):
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
    path = writing.manager.save(tmp_path, *writing.snapshot(1, 10))
    at = next(n for n, (kind, _) in enumerate(calls) if kind == "replace")
    new = calls[at][1]
    synced = {path for _, path in calls[:at]}
    assert synced == {new, *(new / file.name for file in path.iterdir())}
    assert calls[at + 1 :] == [("fsync", tmp_path)]


# === Runs ===


def test_a_run_that_is_killed_goes_on_bit_by_bit(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)  # a child imports what lies beside it
    recipe = load("vit")
    flags = (*runs.FLAGS, "--epochs", "3")
    killed = runs.Run("vit", tmp_path / "killed", *flags)
    killed.to_step(11)
    killed.interrupt(signal.SIGKILL)
    assert killed.code == -signal.SIGKILL
    assert any((tmp_path / "killed" / "checkpoints").glob("step_*"))
    assert recipe.main(["--resume", "--out", str(tmp_path / "killed")]) == 0
    assert recipe.main([*flags, "--out", str(tmp_path / "whole")]) == 0
    assert runs.result(tmp_path / "killed") == runs.result(tmp_path / "whole")


def test_cut_within_an_epoch_and_gone_on_with():
    counts = resume.resumed("all of them", (9,))
    assert counts["equal"] == counts["same decisions"] == counts["cuts"] == 1, counts
    assert counts["largest difference"] == 0.0


@pytest.mark.parametrize("way", ["fit, loss not looked at", "run that skips"])
def test_what_is_not_finite_reaches_no_checkpoint(way):
    for kind in nonfinite.KINDS:
        counts = nonfinite.trials(kind, way, range(2, 3))
        assert counts["not finite"] == counts["told badly"] == 0, (kind, counts)
        assert counts["checkpoints"] > 1


# === Files and settings ===


@pytest.mark.parametrize("kind", ["safetensors", "indexes", "pickles"])
def test_files_from_elsewhere(kind):
    trials = 100
    counts = getattr(foreign, kind)(trials)
    assert counts["other errors"] == counts["more than a line"] == counts["events"] == 0, counts
    assert counts["of them loaded"] == 0
    assert counts["refused"] > trials / 3


@pytest.mark.parametrize(("kind", "trials"), [("pictures", 45), ("lines", 120)])
def test_damaged_data(kind, trials):
    counts = getattr(inputs, kind)(trials)
    assert counts["other errors"] == counts["told badly"] == 0, counts
    assert counts["told in a line"] > trials / 5


def test_bits_and_cuts_of_an_adapter():
    counts = adapters.damage(60, 12)
    assert counts["wrong loads"] == counts["other errors"] == 0, counts
    assert counts["models changed by a refusal"] == 0
    assert counts["refused"] + counts["harmless"] == 72
    assert counts["refused"] > 50
    assert counts["whole after all"] == 1


@pytest.mark.parametrize(
    ("kind", "arguments", "mutated"),
    [
        ("keras_files", (60, SIZE), 60),
        ("npz_files", (60, SIZE), 60),
        ("picture_zips", (40, SIZE), 40),
        ("from_preset", (), 0),
        pytest.param("gguf_files", (100,), 100, marks=pytest.mark.needs("gguf")),
        pytest.param("torch_files", (60, SIZE), 60, marks=pytest.mark.needs("torch")),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_hostile_files(kind, arguments, mutated):
    found = getattr(hostile, kind)(*arguments)
    assert not found["problems"] and not found["events"], found
    assert found["other errors"] == found["changed by a refusal"] == 0
    assert not found.get("which"), found  # of the handmade ones
    assert found["refused"] > 20 + mutated / 3
    assert found["most MB"] < 300


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_wrong_settings(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert settings.problem(case, tmp_path) is None
