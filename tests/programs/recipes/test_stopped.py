"""Runs whose output, folder or user goes away: one line, a documented exit code, nothing lost."""

import json
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest

from forked_python import quick_python
from recipe_modules import load

COMMAND = ["-m", "kmodels.tools.cli"]
SMALL = ["--preset", "vit_debug", "--data", "synthetic:48", "--batch-size", "8"]
# A recipe without Keras: what it does in place of training is added.
RECIPE = """
import sys, time
from kmodels.runs import recipe
class Settings(recipe.Common): pass
def train(settings, folder):
    print("begun", flush=True)
    {body}
sys.exit(recipe.main("toy", Settings, train, ["--out", sys.argv[1]]))
"""
BODIES = {
    "waits": "time.sleep(60)",
    "swallows": """
    for _ in range(600):
        try: time.sleep(0.1)
        except KeyboardInterrupt: pass""",
}
NOT_TRAINING = "toy: stopped; no training was in progress, so nothing was saved"


def start(*words: object, stdout: Any = subprocess.PIPE) -> Any:
    return subprocess.Popen(
        [str(word) for word in words], stdout=stdout, stderr=subprocess.PIPE, text=True
    )


def end(child):
    """Exit code and lines on stderr that are not warnings of a package."""
    errors = child.stderr.read()
    code = child.wait(timeout=240)
    for pipe in filter(None, (child.stdout, child.stderr)):
        pipe.close()
    assert "Traceback" not in errors, errors
    return code, [x for x in errors.splitlines() if x.startswith(("kmodels:", "stopped", "toy:"))]


@pytest.mark.each_time("2")
@pytest.mark.parametrize("epochs_read", [0, 2])
def test_a_closed_pipe_stops_a_run_after_saving(tmp_path, epochs_read):
    # While Keras is imported, the pipe is closed before the first step.
    python = quick_python() if epochs_read else sys.executable
    child = start(python, *COMMAND, "vit", *SMALL, "--epochs", 500, "--out", tmp_path)
    for line in child.stdout:
        if not epochs_read or line.strip().startswith(f"{epochs_read}/500"):
            break
    child.stdout.close()
    code, lines = end(child)
    assert code == 128 + signal.SIGPIPE
    assert lines[0] == "kmodels: standard output was closed; the run stops"
    assert "by signal 13; continue with --resume" in lines[1]
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert bool(steps) == bool(epochs_read)
    assert not (tmp_path / "result.json").exists()


def test_a_full_disk_behind_the_output_costs_no_training(tmp_path):
    words = (*COMMAND, "vit", *SMALL, "--epochs", 2, "--out", tmp_path)
    with open("/dev/full", "w") as full:
        child = start(quick_python(), *words, stdout=full)
        code, lines = end(child)
    assert code == 74
    assert lines == [
        "kmodels: cannot write to standard output: No space left on device; the run goes on "
        "without it"
    ]
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 12


@pytest.mark.parametrize("words", [["--help"], ["vit", "--help"], ["--version"]])
def test_no_command_shows_a_traceback(words):
    with open("/dev/full", "w") as full:
        code, lines = end(start(sys.executable, *COMMAND, *words, stdout=full))
    assert (code, len(lines)) == (74, 1)
    check_closed_pipe(sys.executable, words)


def check_closed_pipe(python, words):
    child = start(python, *COMMAND, *words)
    child.stdout.close()
    assert end(child)[0] == 141


def test_a_long_table_shows_no_traceback():
    check_closed_pipe(quick_python(), ["doctor"])


@pytest.mark.parametrize("body", BODIES)
def test_an_interrupt_ends_what_is_not_training(tmp_path, body):
    file = tmp_path / "toy.py"
    file.write_text(RECIPE.format(body=BODIES[body]))
    child = start(sys.executable, file, tmp_path / "out")
    assert child.stdout.readline() == "begun\n"
    child.send_signal(signal.SIGINT)
    assert end(child) == (130, [NOT_TRAINING])


def test_an_interrupt_while_keras_is_loaded_ends_the_run(tmp_path):
    child = start(sys.executable, *COMMAND, "vit", *SMALL, "--epochs", 500, "--out", tmp_path)
    child.stdout.readline()
    child.send_signal(signal.SIGINT)
    code, lines = end(child)
    assert (code, len(lines)) in ((130, 0), (130, 1))


def test_a_folder_that_is_removed_is_one_line(tmp_path, monkeypatch, capsys):
    from kmodels.runs.runner import Runner

    out, real = tmp_path / "out", Runner.on_train_batch_end

    def on_train_batch_end(self, batch, logs=None):
        if self.step == 3:
            shutil.rmtree(out)
        real(self, batch, logs)

    monkeypatch.setattr(Runner, "on_train_batch_end", on_train_batch_end)
    assert load("vit").main([*SMALL, "--epochs", "2", "--out", str(out)]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert (
        line == f"vit: error: --out {out} was removed during the run, so the run is lost; "
        "start it again"
    )
