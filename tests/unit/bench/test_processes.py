"""Children that are driven, stopped, killed; none of them imports Keras."""

import sys
import time
from pathlib import Path

import pytest

from kmodels.core.errors import InputError
from kmodels.tools.compare_backends.children import (
    Child,
    ChildError,
    LeftOut,
    OutOfMemory,
    installed,
)
from refusals import refused

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))

    def child(what, **settings):
        return Child("toy", "toy_child", {"what": what}, **settings)

    return child


def state(pid):
    """The letter that Linux has for what a process does; None where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def wait_for(condition):
    for _ in range(200):
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_it_answers_in_turn_and_is_stopped_in_between(make):
    with make("serve", hidden=["colorsys"]) as child:
        assert child.started()["hidden"]
        pid = child._process.pid
        for number in (3, 4):
            assert wait_for(lambda: state(pid) == "T")
            assert child.ask(number=number) == {"twice": 2 * number}
        folder = child._folder
        assert folder.is_dir()
    assert state(pid) is None
    assert not folder.exists()


def test_nothing_that_it_started_is_left(make):
    with make("start") as child:
        other = child.started()["started"]
        assert state(other) is not None
    # Whoever adopted it may not have asked yet how it ended.
    assert wait_for(lambda: state(other) in (None, "Z"))


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("refuse", InputError, "^the setting is wrong; give another$"),
        ("leave_out", LeftOut, "^toy: has no such thing$"),
        ("forget", OutOfMemory, "^toy: no more$"),
        ("crash", ChildError, "^toy: ValueError: a first line and a second$"),
        ("exit", ChildError, "^toy: ended with status 0: the last words$"),
        ("draw", ChildError, "^toy: ValueError: agg$"),
    ],
)
def test_failures_are_one_line(make, monkeypatch, what, kind, message):
    # What a notebook draws with is not passed on: another interpreter need not have it.
    monkeypatch.setenv("MPLBACKEND", "module://of_a_notebook")
    with make(what) as child, pytest.raises(kind, match=message) as caught:
        child.started()
    assert type(caught.value) is kind


def test_one_that_hangs_is_killed(make):
    with make("hang", limit=1.0) as child:
        with pytest.raises(ChildError, match="toy: no answer for 1 s, so it was killed"):
            child.started()
        assert state(child._process.pid) is None


def test_one_that_takes_too_much_memory_is_killed(make):
    with make("serve") as child:
        child.started()
        child.memory = 200 * 2**20
        assert child.ask(number=1) == {"twice": 2}
        with pytest.raises(OutOfMemory, match="toy: more than 200 MiB"):
            child.ask(take=400 * 2**20)


def test_what_another_interpreter_has(tmp_path):
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    assert installed(str(python), ["json", "no_such_package"]) == {"json"}
    assert installed(sys.executable, ["json", "no_such_package"]) == {"json"}
    nowhere = str(tmp_path / "nowhere")
    refused("nowhere does not run: .*; give the path of a Python", installed, nowhere, ["json"])
