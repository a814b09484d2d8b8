"""What a run says: at 80 columns no line is longer and no word is broken, on a terminal or not."""

import fcntl
import os
import pty
import re
import struct
import termios
import time
from pathlib import Path

import pytest
from rich.cells import cell_len

from command_line import run
from forked_python import quick_python
from kmodels.runs import console
from kmodels.runs.console import Progress

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "vit.py"
SMALL = ("--preset", "vit_debug", "--data", "synthetic:48", "--batch-size", "8", "--epochs", "2")
# What each run has to say, word by word.
SAID = (
    "vit: vit_debug, ",
    "synthetic:48",
    "2 epochs of 6 steps, 8 images per step",
    "results   out",
    "epoch     loss  accuracy     loss  accuracy  samples/s     left",
)


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def on_a_terminal(folder, *arguments):
    """Exit code and text of a recipe on a terminal of 80 columns."""
    python = quick_python()
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.environ["TERM"] = "xterm-256color"
        del os.environ["COLUMNS"]
        os.execv(python, [python, str(RECIPE), *arguments])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    found = b""
    while True:
        try:
            part = os.read(terminal, 2**16)
        except OSError:  # Linux ends a terminal whose process is gone by an error.
            break
        if not part:
            break
        found += part
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), found.decode()


def lines_of(text):
    """What is written without going back to the start of a line; controls take no place."""
    return re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))


def check(lines):
    assert max(map(cell_len, lines)) <= 80
    for words in SAID:
        assert any(words in line for line in lines), words
    assert [line for line in lines if line][-1] == "report: out/report.html"


def test_a_terminal_of_80_columns(tmp_path):
    code, text = on_a_terminal(tmp_path, *SMALL, "--out", "out")
    assert code == 0, text
    lines = lines_of(text)
    check(lines)
    assert any("12/12" in line and "loss" in line for line in lines)  # the bar


def test_piped(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS")
    assert run("vit", *SMALL, "--out", "out") == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    check(lines_of(said))


def test_words_stay_whole(capsys):
    path = "a/" + 100 * "b"
    console.say(f"{30 * 'word '}{path} {20 * 'more '}")
    lines = capsys.readouterr().out.splitlines()
    assert path in [line.strip() for line in lines]
    assert all(len(line) < 80 for line in lines if path not in line)
    assert all(line.startswith("  ") for line in lines[1:])
    console.say_facts("an answer", {"after": 100 * "b", "before": 60 * "語", "none": ""}, fold=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 + 2
    assert max(map(cell_len, lines)) < 80


def test_silent_work_is_told(capsys, monkeypatch):
    monkeypatch.setattr(console, "SILENT_SECONDS", 0.05)
    console.working("reading the weights")
    time.sleep(0.5)
    console.working("answering samples")
    console.working(None)
    time.sleep(0.2)
    assert capsys.readouterr().out == "reading the weights\n"


def test_metrics_that_do_not_fit_a_row_are_wrapped(capsys):
    logs = {f"{part}a_long_metric_{n}": 0.5 for part in ("", "val_") for n in range(4)}
    Progress(10).epoch(1, logs, 10.0, 5.0)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1 and lines[0].startswith("epoch 1/1  a_long_metric_0 0.5000")
    assert max(map(len, lines)) < 80


def test_lines_without_a_bar_are_told_now_and_then(capsys, monkeypatch):
    progress = Progress(4000)
    progress.update(1, 0.5, 10.0)
    assert not capsys.readouterr().out
    monkeypatch.setattr("kmodels.runs.console.QUIET_SECONDS", 0.0)
    progress.update(1200, 0.5, 3600.0)
    assert capsys.readouterr().out == "step 1,200 of 4,000  loss 0.5000  1:00:00 left\n"


def test_times():
    times = {0.0042: "4.2 ms", 0.25: "250 ms", 8.123: "8.1 s", 42: "42 s"}
    times |= {200: "3 min 20 s", 1800: "30 min", 7500: "2 h 5 min"}
    assert {value: console.seconds(value) for value in times} == times


def test_paths_are_those_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert console.short(tmp_path / "runs" / "a") == "runs/a"
    assert console.short("/elsewhere/a") == "/elsewhere/a"
