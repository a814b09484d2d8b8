"""The helper of the tests that run several processes: what it returns, and that nothing stays."""

import subprocess
import time

import pytest
from launch import Process, launch, torch_ranks

pytestmark = pytest.mark.once
SCRIPT = """
import json, os, subprocess, sys, time
what = sys.argv[1]
print("a line", flush=True)
if what == "fail":
    sys.exit("it went wrong")
if what == "hang":
    child = subprocess.Popen(["sleep", "600"], start_new_session=len(sys.argv) > 2)
    print(child.pid, flush=True)
    time.sleep(600)
print(json.dumps({"rank": os.environ.get("RANK"), "home": "HOME" in os.environ}))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def _gone(pid):
    """Whether a process is no more, or waits for nothing but its parent."""
    state = ["ps", "-o", "stat=", "-p", str(pid)]
    for _ in range(100):
        if subprocess.run(state, capture_output=True, text=True).stdout.strip()[:1] in ("", "Z"):
            return True
        time.sleep(0.05)
    return False


def test_results_come_in_order(script):
    ranks = [{**rank, "HOME": None} for rank in torch_ranks(2)]
    outputs = launch([Process(script, ["work"], env=rank) for rank in ranks])
    assert [output.result() for output in outputs] == [
        {"rank": "0", "home": False},
        {"rank": "1", "home": False},
    ]
    assert all(output.status == 0 and not output.late for output in outputs)


@pytest.mark.parametrize("apart", [[], ["apart"]])
def test_time_is_up(script, apart):
    (output,) = launch([Process(script, ["hang", *apart])], seconds=2, check=False)
    assert output.status == -9 and output.late
    assert _gone(int(output.stdout.split()[-1]))


def test_one_that_fails_is_shown(script, monkeypatch):
    monkeypatch.setattr("launch.GRACE", 1.0)
    both = [Process(script, ["hang"]), Process(script, ["fail"])]
    with pytest.raises(AssertionError, match=r"(?s)0: killed.*1: status 1.*it went wrong"):
        launch(both)
