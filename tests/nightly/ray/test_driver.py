"""The command that waits for a run on Ray: killed, and stopped by Ctrl-C."""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray_cases
from launch import ROOT

from kmodels.checkpoint import manager

pytestmark = [pytest.mark.across("torch"), pytest.mark.needs("ray")]

FLAGS = ["--data", "synthetic:64", "--preset", "vit_debug", "--batch-size", "16"]
FLAGS += ["--steps", "100000", "--checkpoint-every", "5", "--log-every", "1"]
SECONDS = 300.0


def marked(mark):
    """The processes that have a variable in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # It has ended, or is another user's.
            continue
    return found


def workers(mark):
    """Those of them that train."""
    lines = [Path(f"/proc/{pid}/cmdline") for pid in marked(mark)]
    return [line for line in lines if line.exists() and b"RayTrainWorker" in line.read_bytes()]


def wait_for(what, seconds=SECONDS):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "time is up"
        time.sleep(0.2)
    return found


@contextmanager
def command(out, temporary, *more):
    """The command of a recipe on Ray; at the end, it and all that it started are gone."""
    mark = f"KMODELS_TEST_MARK={secrets.token_hex(8)}"
    name, value = mark.split("=")
    env = {
        **os.environ,
        **ray_cases.QUIET,
        name: value,
        "KERAS_BACKEND": "torch",
        "PYTHONPATH": str(ROOT / "src"),
        "TMPDIR": str(temporary),
    }
    words = ["vit", *FLAGS, "--on", "ray", "--workers", "2", "--out", str(out), *more]
    with open(f"{out}.txt", "w") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "kmodels", *words],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, start_new_session=True,
        )  # fmt: skip
    try:
        yield child, mark
    finally:
        for pid in marked(mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        child.wait()


def test_a_run_whose_command_was_killed_is_continued_and_stopped(tmp_path):
    out = tmp_path / "run"
    checkpoints = out / "checkpoints"
    # Names of Ray's sockets have to be short.
    temporary = Path(tempfile.mkdtemp(prefix="km", dir="/tmp"))
    try:
        with command(out, temporary) as (child, mark):
            wait_for(lambda: manager.list_checkpoints(checkpoints))
            assert workers(mark)
            child.kill()
            # Ray's helpers, which train nothing, wait a minute for what has ended.
            wait_for(lambda: not workers(mark), 60.0)
        (left,) = temporary.glob("kmodels-ray-*")
        begun = manager.newest(checkpoints)[1].step
        with command(out, temporary, "--resume") as (child, mark):
            wait_for(lambda: manager.newest(checkpoints)[1].step > begun)
            assert not left.exists()
            child.send_signal(signal.SIGINT)
            assert child.wait(SECONDS) == 130
            wait_for(lambda: not marked(mark), 60.0)
        assert not list(temporary.glob("kmodels-ray-*"))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    *_, said = Path(f"{out}.txt").read_text().splitlines()
    stopped = re.fullmatch(r"stopped at step (\d+) by signal 2; continue with --resume", said)
    assert stopped is not None, said
    assert manager.newest(checkpoints)[1].step == int(stopped[1])
