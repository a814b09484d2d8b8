"""Python processes of kmodels import nothing from the folder that a command runs in."""

import os
import sys
from pathlib import Path

import pytest

from kmodels.core.environment import SAFE_PATH, environ_with
from kmodels.tools.compare_backends.children import installed
from python_process import run_python
from source_tree import SOURCE, imports, trees

# One starts nvidia-smi, which is not Python, the other `python -I`, which leaves the folder out.
OTHERS = {"core/runtime_tensorflow.py", "lora/modules.py"}
HOSTILE = ("kmodels.py", "json.py", "pickle.py", "signal.py", "multiprocessing.py", "keras.py")
# A loader of torch whose processes come from the forkserver, which Python starts by `-c`.
LOADER = """
import multiprocessing, torch
data = torch.utils.data.TensorDataset(torch.zeros(4, 2))
if __name__ == "__main__":
    from kmodels.data.pipeline import stream
    stream.device_put.FORKS = False
    multiprocessing.set_start_method("fork")
    print(len(list(stream.started(torch.utils.data.DataLoader(data, 2, num_workers=1)))))
"""

# What `bench`, `parity` and `doctor` start.
CHILD = """
from kmodels.tools.compare_backends.children import Child
with Child("toy", "toy_child", {"what": "serve"}) as child:
    print(child.started())
"""
BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture
def hostile(tmp_path):
    for name in HOSTILE:
        (tmp_path / name).write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\nraise SystemExit(9)\n"
        )
    return tmp_path


def paths():
    """PYTHONPATH with whole paths, so that the working directory does not matter."""
    return os.pathsep.join([str(SOURCE.parent), str(BENCH)])


@pytest.mark.each_time("words1", "words2")
@pytest.mark.parametrize(
    "words",
    [
        ("-P", "-m", "kmodels", "vit", "--data", "synthetic:40", "--workers", "1", "--epochs", "1"),
        (CHILD,),
        (LOADER,),
    ],
)
def test_a_hostile_folder(hostile, words, tmp_path_factory):
    if len(words) == 1:  # a script that lies elsewhere
        script = tmp_path_factory.mktemp("own") / "script.py"
        script.write_text(words[0])
        words = (script,)
    small = {"KMODELS_SMALL": "1", "PYTHONPATH": paths()}
    done = run_python(*words, cwd=hostile, **small)
    assert not (hostile / "ran").exists(), (hostile / "ran").read_text()
    assert done.returncode == 0, done.stderr[-800:]


def test_an_interpreter_is_asked_outside_of_the_folder(hostile, monkeypatch):
    monkeypatch.chdir(hostile)
    (hostile / "not_a_package_of_anybody.py").touch()
    other = hostile / "python"
    other.symlink_to(sys.executable)
    assert installed(str(other), ["not_a_package_of_anybody"]) == set()
    assert not (hostile / "ran").exists()


@pytest.mark.parametrize("former", [None, "x"])
def test_the_environment_comes_back(monkeypatch, former):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    if former is not None:
        monkeypatch.setenv("PYTHONSAFEPATH", former)
    with environ_with(SAFE_PATH):
        assert os.environ["PYTHONSAFEPATH"] == "1"
    assert os.environ.get("PYTHONSAFEPATH") == former


def test_every_file_that_starts_processes_leaves_the_folder_out():
    starts = ("subprocess", "multiprocessing", "concurrent.futures.ProcessPoolExecutor")
    for file, tree in trees().items():
        names = {name for _, name in imports(tree, ("kmodels", *Path(file).parts[:-1]))}
        if file not in OTHERS and any(name.startswith(starts) for name in names):
            assert any(name.startswith("kmodels.core.environment.") for name in names), file
