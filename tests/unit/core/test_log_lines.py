"""What TensorFlow logs at its import, and what of it a user of the command sees."""

import os
from pathlib import Path

import pytest

from kmodels.core import internals_tensorflow
from python_process import run_python

SOURCE = Path(internals_tensorflow.__file__).parents[2]
INFORMATION = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    "I0000 00:00:1795458400.406527    3399 port.cc:153] oneDNN custom operations are on.\n"
)
NO_DRIVER = (
    "E0000 00:00:1795458400.406527    3399 a.cc:3] failed call to cuInit: UNKNOWN ERROR (303)\n"
)
PROBLEMS = (
    "W0000 00:00:1795458400.406527    3399 a.cc:1] a warning\n"
    "E0000 00:00:1795458400.406527    3399 a.cc:2] an error\n"
    "E0000 00:00:1795458400.406527    3399 a.cc:3] failed call to cuInit: NO DEVICE (100)\n"
)
IMPORT = """
from kmodels.core import internals_tensorflow as lines
lines.hide_information()
import tensorflow
assert tensorflow.found
"""


def run(*words, **variables):
    hidden = {name: None for name in os.environ if name.startswith("TF_CPP")}
    done = run_python(*words, **{**hidden, **variables})
    return done.returncode, done.stderr


@pytest.fixture
def path(tmp_path):
    (tmp_path / "tensorflow").mkdir()
    text = (
        f"import os\nos.write(2, {(INFORMATION + PROBLEMS).encode()!r})\nfound = True\n"
        "class config:\n    def list_physical_devices():\n"
        f"        os.write(2, {NO_DRIVER.encode()!r})\n"
    )
    (tmp_path / "tensorflow" / "__init__.py").write_text(text)
    return f"{tmp_path}{os.pathsep}{SOURCE}"


def test_information_is_hidden_and_nothing_else(path):
    every = f"{IMPORT}tensorflow.config.list_physical_devices()\n"
    assert run("-c", every, PYTHONPATH=path) == (0, PROBLEMS + NO_DRIVER)
    shown = run("-c", IMPORT, PYTHONPATH=path, TF_CPP_MIN_LOG_LEVEL="0")
    assert shown == (0, INFORMATION + PROBLEMS)


def test_an_import_that_fails_shows_why(path, tmp_path):
    package = tmp_path / "tensorflow" / "__init__.py"
    package.write_text(f"{package.read_text()}import no_such_module\n")
    code, said = run("-c", IMPORT, PYTHONPATH=path)
    assert code == 1 and said.startswith(PROBLEMS)
    assert "No module named 'no_such_module'" in said


@pytest.mark.needs("tensorflow")
def test_a_wrong_use_on_tensorflow_is_one_line(tmp_path):
    words = ["-m", "kmodels", "vit", "--preset", "vit_nothing", "--out", str(tmp_path / "run")]
    code, said = run(*words, KERAS_BACKEND="tensorflow")
    assert code == 2
    assert said.startswith("vit: error: 'vit_nothing' is neither") and said.count("\n") == 1
