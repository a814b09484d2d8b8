"""The faults of tests/nightly/seeded_faults.py still have their place: the run takes long."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "nightly" / "seeded_faults.py"
SEEDED = runpy.run_path(str(SCRIPT))
FAULTS = [fault for faults in SEEDED["FAULTS"].values() for fault in faults]


@pytest.mark.parametrize(("file", "old", "new"), FAULTS, ids=lambda text: text.splitlines()[0])
def test_a_fault_has_one_place_and_tests_near_it(file, old, new):
    text = (SEEDED["ROOT"] / "src" / "kmodels" / file).read_text()
    assert text.count(old) == 1
    compile(text.replace(old, new), file, "exec")
    near = next(tests for start, tests in SEEDED["NEAREST"].items() if file.startswith(start))
    assert all((SEEDED["ROOT"] / path).exists() for path in near)
