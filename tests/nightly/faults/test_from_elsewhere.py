"""The quick form of benchmarks/faults/{adapters,hostile,settings}.py: the bars are the same."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "faults"
sys.path.insert(0, str(FOLDER))
try:
    import adapters
    import hostile
    import settings
finally:
    sys.path.remove(str(FOLDER))

SIZE = 80 * 2**20  # more than is unpacked whatever it came from
CASES = settings.cases()
RECIPES = [case for case in CASES if ".py " in case.name]
# Of the recipes a part: most of these settings are tried in tests/recipes too.
QUICK = [case for case in CASES if case not in RECIPES] + RECIPES[::5]


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
