"""What `import kmodels` costs: no other framework, nothing that only some tasks need."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import keras
import pytest

ROOT = Path(__file__).resolve().parents[3]
BACKENDS = ("jax", "torch", "tensorflow")
ENVIRONMENT = os.environ.get("KMODELS_ENVIRONMENT", "")
HEAVY = {
    *("matplotlib", "sklearn", "PIL", "pandas", "ray"),
    *("transformers", "timm", "peft", "keras_hub"),
}
# What keras itself loads is not ours to answer for, so each list is taken after it.
CHILD = (
    "import sys, keras; before = set(sys.modules)\n{}\nprint(*sorted(set(sys.modules) - before))"
)


def modules_loaded_by(statement: str) -> set[str]:
    """Top-level names that a statement loads in a new process, on top of keras."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(statement)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in done.stdout.split()}


def test_import_loads_no_other_framework_and_nothing_heavy(backend):
    statement = "import kmodels; kmodels.models, kmodels.layers, kmodels.ops"
    loaded = modules_loaded_by(statement)
    assert "kmodels" in loaded
    unwanted = loaded & (HEAVY | set(BACKENDS) - {backend})
    assert not unwanted, f"{statement} loads {sorted(unwanted)}"


def test_what_tests_spare_keras_is_there_for_others():
    """tests/children/sitecustomize.py is at work here and in the processes of tests."""
    statement = "assert not {'sklearn', 'matplotlib'} & before; import matplotlib.pyplot, sklearn"
    assert {"sklearn", "matplotlib"} <= modules_loaded_by(statement)


def test_an_unknown_name_says_so():
    import kmodels

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = kmodels.no_such_name


def test_the_backend_is_the_one_asked_for_and_the_only_one_installed(backend):
    """Proves that the other frameworks are not needed, wherever the environment promises it."""
    assert keras.backend.backend() == backend
    if ENVIRONMENT in BACKENDS:
        assert backend == ENVIRONMENT
        assert not [name for name in BACKENDS if name != backend and find_spec(name)]


@pytest.mark.across
def test_everything_is_installed():
    for name in (*BACKENDS, "transformers", "timm", "peft"):
        assert find_spec(name), f"the full environment lacks {name}"
