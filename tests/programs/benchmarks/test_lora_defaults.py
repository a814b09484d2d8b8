"""benchmarks/lora_defaults.py compares two settings of a recipe on the same tokens."""

import json
from pathlib import Path

import pytest

from python_process import run_python

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "lora_defaults.py"


@pytest.mark.nightly
def test_both_settings_are_trained_and_measured_alike():
    done = run_python(SCRIPT, "--seeds", "3", "--tokens", "4096", KMODELS_SMALL="1")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    former, proposed, summary = map(json.loads, done.stdout.splitlines()[-3:])
    assert [row["settings"] for row in (former, proposed)] == ["former", "proposed"]
    flags = dict(zip(proposed["flags"], proposed["flags"][1:], strict=False))
    assert {"--rank": "16", "--targets": "all-linear", "--loss-on": "responses"}.items() <= (
        flags.items()
    )
    assert float(flags["--learning-rate"]) > 5e-4 and int(flags["--sequence-length"]) % 16 == 0
    assert former["steps"] == 4 and former["base"] == proposed["base"]
    assert proposed["steps"] == max(4096 // (8 * int(flags["--sequence-length"])), 1)
    assert proposed["filled"] > former["filled"]
    gain = former["held_out"]["responses"] - proposed["held_out"]["responses"]
    assert abs(summary["gain"] - gain) < 2e-5
