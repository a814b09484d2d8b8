"""`kmodels bench` on real processes: one backend here, all of them in the full environment."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import pytest

from command_line import run
from kmodels.tools.compare_backends import work
from kmodels.tools.compare_backends.bench import LOSSES, Refused, differences
from refusals import refused

BACKEND = keras.backend.backend()


@pytest.mark.nightly
@pytest.mark.each_backend("nightly")
def test_one_backend_by_both_paths(capsys, tmp_path):
    code = run(
        *("bench", "vit_debug", "--backends", BACKEND, "--ops", "override,generic"),
        *("--rounds", 2, "--threads", 1, "--out", tmp_path),
    )
    printed = capsys.readouterr().out
    assert code == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    override, generic = found["rows"]
    assert (override["ops"], generic["ops"]) == ("override", "generic")
    assert override["took"]["attention"] != "not called"
    assert set(generic["took"].values()) == {"generic", "not called"}
    for row in found["rows"]:
        assert row["facts"]["threads"] == 1
        assert row["facts"]["parameters"] == override["facts"]["parameters"]
        assert row["loss_difference"] <= LOSSES["float32"]
        assert len(row["losses"]) == 3 and len(row["seconds"]) == 2
        # Training has moved the loss by more than may lie between the rows.
        assert abs(row["losses"][2] / row["losses"][0] - 1) > LOSSES["float32"]
        assert row["peak_memory_mb"] > 50
    assert (tmp_path / "bench.png").is_file()
    assert "losses agree" in printed and "images/s" in printed


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_leaves_no_child(tmp_path):
    mark = f"KMODELS_TEST_MARK={os.getpid()}-{time.monotonic_ns()}"
    name, _, value = mark.partition("=")

    def marked():
        """What the processes with the mark run; libraries start some for a moment."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdecimal() and mark.encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_bytes())
            except OSError:
                continue
        return found

    # A suite that a shell put into the background ignores the signal, and its children would.
    # preexec_fn would fork, of which JAX warns where it has threads.
    script = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", script, "-m", "kmodels.tools.cli", "bench", "vit_debug"]
    parent = subprocess.Popen(
        [*command, "--backends", BACKEND, "--out", str(tmp_path)],
        env={**os.environ, name: value},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not any(b"kmodels.tools.compare_backends.child" in command for command in marked()):
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    parent.send_signal(signal.SIGINT)
    _, error = parent.communicate(timeout=30)
    assert parent.returncode == 130
    assert error.strip().splitlines()[-1] == "kmodels: stopped"
    assert not marked()
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
@pytest.mark.across("torch")
def test_all_backends_on_text_give_one_loss(monkeypatch, tmp_path):
    code = run(
        *("bench", "gemma2_debug", "--precision", "mixed_bfloat16", "--batch-size", 2),
        *("--sequence-length", 16, "--rounds", 1, "--out", tmp_path / "text.json"),
    )
    assert code == 0
    found = json.loads((tmp_path / "text.json").read_text())
    assert found["unit"] == "tokens"
    assert [row["backend"] for row in found["rows"]] == ["jax", "torch", "tensorflow"]
    for row in found["rows"]:
        # Adapters alone are trained.
        assert 0 < row["facts"]["trainable_parameters"] < 0.1 * row["facts"]["parameters"]
        assert row["loss_difference"] <= LOSSES[row["precision"]]
    # Two backends round differently, which is told where nothing is tolerated.
    monkeypatch.setitem(LOSSES, "mixed_bfloat16", 0.0)
    told = differences(found["rows"])
    assert len(told) == 2 and told[0].startswith("torch · mixed_bfloat16 · none · override: the")
    assert "jax · " in told[0]


def test_a_refusal_is_listed_and_leaves_no_file(capsys, monkeypatch, tmp_path):
    assert run("bench", "vit_debug", "--backends", "theano") == 2
    assert capsys.readouterr().err.startswith("kmodels: backends is 'theano'; give some of")

    def refuse(options, console):
        raise Refused(["a: the loss differs", "b: threads is 2"])

    monkeypatch.setattr("kmodels.tools.compare_backends.bench.run", refuse)
    assert run("bench", "vit_debug", "--backends", BACKEND, "--out", tmp_path / "none") == 2
    error = capsys.readouterr().err
    assert error == "kmodels: refused: a: the loss differs\nkmodels: refused: b: threads is 2\n"
    assert not (tmp_path / "none").exists()


def test_a_model_without_a_loss_of_its_own_is_refused():
    refused("which has no default loss; give a", work.make_model, "clip_text_debug", "float32")
