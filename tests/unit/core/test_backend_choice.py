"""Which backend a new process has: KERAS_BACKEND, keras.json, or what is installed."""

import json
import os
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from kmodels.core import environment
from python_process import run_python
from refusals import refused

SOURCE = Path(environment.__file__).parents[2]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes a machine with these backends installed, this keras.json and this KERAS_BACKEND."""

    def make(installed=(), configured=None, variable=None):
        monkeypatch.setattr(
            environment, "find_spec", lambda name: name if name in installed else None
        )
        monkeypatch.delitem(sys.modules, "keras")
        monkeypatch.setenv("KERAS_HOME", str(tmp_path))
        if variable is None:
            monkeypatch.delenv("KERAS_BACKEND", raising=False)
        else:
            monkeypatch.setenv("KERAS_BACKEND", variable)
        if configured is not None:
            (tmp_path / "keras.json").write_text(configured)

    return make


def config(name):
    return json.dumps({"backend": name})


@pytest.mark.parametrize(
    ("installed", "configured", "variable", "chosen", "said"),
    [
        (("jax", "torch"), config("torch"), "jax", "jax", False),
        (("jax", "torch"), config("torch"), None, "torch", False),
        (("jax", "torch"), config("torch"), "", "torch", False),
        (("torch",), config("tensorflow"), None, "torch", True),
        (("torch", "tensorflow"), None, None, "torch", True),
        (("jax", "torch", "tensorflow"), None, None, "jax", True),
        (("tensorflow",), "no JSON", None, "tensorflow", True),
        (("tensorflow",), "[]", None, "tensorflow", True),
        (("tensorflow",), config("numpy"), None, "tensorflow", True),
        (("torch",), None, "wrong", "wrong", False),
        ((), None, None, None, False),
    ],
)
def test_choice(machine, capsys, installed, configured, variable, chosen, said):
    machine(installed, configured, variable)
    environment.choose_backend()
    assert os.environ.get("KERAS_BACKEND") == chosen
    words = capsys.readouterr().err
    assert words.count("\n") == said
    assert not said or f"the backend is {chosen}" in words


def test_a_keras_that_is_imported_keeps_its_backend(machine, monkeypatch):
    machine(("jax",))
    monkeypatch.setitem(sys.modules, "keras", object())
    environment.choose_backend()
    assert "KERAS_BACKEND" not in os.environ


@pytest.mark.parametrize(
    ("installed", "variable", "words"),
    [
        ((), None, "no backend is installed; pip install jax, torch or tensorflow"),
        (("jax",), "wrong", "KERAS_BACKEND is 'wrong'; choose one of jax, torch, tensorflow"),
        (("jax", "torch"), "tensorflow", "not installed; pip install tensorflow, or set it to jax"),
    ],
)
def test_a_backend_that_is_not_there_is_told_in_a_line(machine, installed, variable, words):
    machine(installed, None, variable)
    refused(words, environment.check_backend)


@pytest.fixture
def keras_packages(monkeypatch):
    """Makes a machine with these versions of packages, whose Keras is not imported yet."""

    def make(**installed):
        def version(name):
            if name.replace("-", "_") in installed:
                return installed[name.replace("-", "_")]
            raise PackageNotFoundError(name)

        monkeypatch.setattr(environment, "version", version)
        monkeypatch.delitem(sys.modules, "keras")

    return make


@pytest.mark.parametrize(
    "installed",
    [
        {"keras": environment.OLDEST_KERAS},
        {"keras": "3.101.2"},
        {"keras": "4.0"},
        {"keras_nightly": "3.16.0.dev2026102704"},
        {"keras_nightly": "3.16.0.dev2026102704", "keras": "2.15"},
    ],
)
def test_a_keras_that_is_new_enough(keras_packages, installed):
    keras_packages(**installed)
    environment.check_keras()
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
    assert f"keras>={environment.OLDEST_KERAS}" in project["dependencies"]


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({}, "and none is installed; pip install"),
        ({"keras": "3.5.0"}, "and 3.5.0 is installed; pip install"),
        ({"keras": "2.15.0"}, "and 2.15.0 is installed; pip install"),
    ],
)
def test_an_old_keras_is_told_in_a_line(keras_packages, installed, words, monkeypatch, capsys):
    keras_packages(**installed)
    with pytest.raises(ImportError, match=words) as error:
        environment.check_keras()
    line = str(error.value)
    assert line.startswith("kmodels needs Keras 3.")
    assert "\n" not in line
    for argv, orig in [
        (["/usr/bin/kmodels", "vit"], ["python", "/usr/bin/kmodels", "vit"]),
        (["-m", "vit"], ["python", "-m", "kmodels", "vit"]),
    ]:
        monkeypatch.setattr("sys.argv", argv)
        monkeypatch.setattr("sys.orig_argv", orig)
        with pytest.raises(SystemExit) as stop:
            environment.check_keras()
        assert stop.value.code == 2
        assert capsys.readouterr().err == f"kmodels: {line}\n"


def test_an_imported_keras_counts_as_it_is(monkeypatch):
    monkeypatch.setattr(sys.modules["keras"], "__version__", "3.5.0")
    with pytest.raises(ImportError, match=r"3\.5\.0 is installed"):
        environment.check_keras()


@pytest.mark.parametrize(("words", "code"), [(("-c", "import kmodels"), 1), (("-m", "kmodels"), 2)])
def test_processes_with_an_old_keras(tmp_path, words, code):
    """The metadata of another version stands in front on the path."""
    metadata = tmp_path / "keras-3.5.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: keras\nVersion: 3.5.0\n")
    done = run_python(*words, PYTHONPATH=f"{tmp_path}{os.pathsep}{SOURCE}")
    assert done.returncode == code
    assert "and 3.5.0 is installed; pip install" in done.stderr.splitlines()[-1]
    assert done.stderr.count("\n") == 1 or code == 1


def test_variables_with_another_name_or_value_are_told(monkeypatch, capsys):
    named = (set(re.findall(r"\bKMODELS_[A-Z_]+", p.read_text())) for p in SOURCE.rglob("*.py"))
    assert set().union(*named) == set(environment.VARIABLES)
    monkeypatch.setenv("KMODELS_GENERIC_OP", "all")
    monkeypatch.setenv("KMODELS_OF_SOMEBODY", "all")
    environment.report_misspelt()
    line = "kmodels: KMODELS_GENERIC_OP is not read; did you mean KMODELS_GENERIC_OPS?\n"
    assert capsys.readouterr().err == line
    for value, answer in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("KMODELS_SMALL", value)
        assert environment.is_on("KMODELS_SMALL") is answer
    monkeypatch.setenv("KMODELS_SMALL", "yes")
    refused("KMODELS_SMALL is 'yes'; give 1 or 0", environment.is_on, "KMODELS_SMALL")


def test_a_fresh_home_works_twice(tmp_path):
    """Keras writes a keras.json that names TensorFlow, which must not decide the second time."""
    home = {"HOME": str(tmp_path), "KERAS_HOME": None, "KERAS_BACKEND": None}
    imports = "import kmodels; kmodels.models; import keras; print(keras.backend.backend())"
    command = "from kmodels.tools import cli; cli.main(['doctor'])"
    done = run_python("-c", f"{imports}; {command}", **home, KMODELS_GENERIC_OPS="nonsense")
    (backend,) = environment.installed_backends()[:1]
    assert done.stdout.strip() == backend, done.stderr
    # The command ends with the wrong name in the environment, which the imports do not mind.
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("kmodels: KMODELS_GENERIC_OPS names")
    assert "Traceback" not in done.stderr
    assert (tmp_path / ".keras" / "keras.json").is_file()
    # Keras takes its backend from the variable, so its own import is left out the second time.
    done = run_python("-c", "import os, kmodels; print(os.environ['KERAS_BACKEND'])", **home)
    assert done.stdout.strip() == backend, done.stderr
