"""The `python` of tests/forked_python.py ends as its program ends, and leaves nothing behind."""

import os
import signal
import subprocess
import time

import pytest

from forked_python import can_fork, quick_python
from python_process import run_python

pytestmark = pytest.mark.skipif(not can_fork(), reason="it is the real Python here")
HELD = """
import os, sys
before = "keras" in sys.modules, "torch" in sys.modules
import kmodels, keras.layers
print(*before, os.environ["KERAS_BACKEND"], keras.backend.backend(), *sys.argv)
"""


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("print('done')", 0),
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('a line')", 1),
        ("raise ValueError", 1),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
)
def test_statuses_and_outputs(program, status, tmp_path):
    (tmp_path / "program.py").write_text(program)
    done = run_python("program.py", cwd=tmp_path, python=quick_python())
    real = run_python("program.py", cwd=tmp_path)
    assert done.returncode == real.returncode == status
    assert done.stdout == real.stdout
    assert done.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


def test_keras_is_there_when_a_program_imports_it():
    done = run_python("-c", HELD, "a", python=quick_python(), KERAS_BACKEND=None)
    assert done.stdout.split() == ["False", "True", "torch", "torch", "-c", "a"], done.stderr
    # Others of Python's options, and variables that torch reads when it is imported.
    for words, more in ((["-B"], {}), ([], {"OMP_NUM_THREADS": "3"})):
        program = "import sys; print('torch' in sys.modules)"
        done = run_python(*words, "-c", program, python=quick_python(), **more)
        assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_arrive(number):
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    child = subprocess.Popen([quick_python(), "-c", program], stdout=subprocess.PIPE, text=True)
    fork = int(child.stdout.readline())
    assert fork != child.pid != os.getpid()
    child.send_signal(number)
    assert child.wait() == -number
    child.stdout.close()
    limit = time.monotonic() + 10
    while os.path.exists(f"/proc/{fork}") and time.monotonic() < limit:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{fork}")
