"""What a run on Ray refuses before there is a cluster, in one line each."""

import importlib.util

import pytest

from kmodels.core.errors import InputError
from kmodels.distribution import ray
from kmodels.runs import recipe
from refusals import refused

pytestmark = [pytest.mark.across("torch"), pytest.mark.needs("ray")]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"workers": 0}, "workers is 0; give"),
        ({"workers": (4, 1)}, r"workers is \(4, 1\); give the smaller number first"),
        ({"workers": (1, 2, 4)}, r"workers is \(1, 2, 4\); give a number, or two as in \(1, 4\)"),
        ({"max_failures": -2}, "max_failures is -2"),
        ({"keep": 0}, "keep is 0; give"),
        ({"mode": "best"}, "mode is 'best'; choose one of min, max"),
        ({"resources": {"TPU": 4}}, "resources has TPU, whose slices Ray places by a topology"),
        ({"resources": {"CPU": "x"}}, "CPU of resources is 'x'; give a number from 0"),
        ({"resources": {"CPU": -1}}, "CPU of resources is -1"),
        ({"resources": {"CPU": 1, "GPU": float("nan")}}, "GPU of resources is nan"),
        ({"resources": {"CPU": 0}}, "resources is {'CPU': 0}; give some of a resource"),
        ({"resources": ["CPU"]}, r"resources is \['CPU'\]; give a dictionary"),
        ({"environment": {"A": 1}}, "A of environment is 1; give a text"),
        ({"scaling": {"placement": "PACK"}}, "takes no placement; did you mean placement_strategy"),
        ({"scaling": {"num_workers": 3}}, "scaling takes no num_workers"),
        ({"best": 3}, "best is 3; give the name of a log, True or None"),
        ({"arguments": "--epochs 3"}, "arguments is '--epochs 3'; give a list"),
        ({"recipe_or_function": 3}, "3 is neither a function nor the name of a recipe"),
        ({"backend": "numpy"}, "the backend of the workers is 'numpy', which is unknown or not"),
        ({"backend": "tensorflow"}, "2 workers on tensorflow would each train alone: its replicas"),
        ({"storage": "memory://run"}, "memory://run is in the memory of this process, which no"),
        ({"storage": "/dev/null/run"}, "cannot write to /dev/null/run: Not a directory; give"),
        (
            {"recipe_or_function": "bert"},
            "'bert' is not a recipe; give a function, or one of vit, ",
        ),
        (
            {"recipe_or_function": "vit", "arguments": ["--on", "ray"]},
            "the recipe already runs on Ray; leave --on out",
        ),
        (
            {"recipe_or_function": "vit", "arguments": ["--keep", "5"]},
            r"--keep has no effect in run\(...\); leave it out, and give keep=",
        ),
        (
            {"recipe_or_function": "vit", "arguments": ["--workers", "2"]},
            "--workers has no effect in run",
        ),
        ({"recipe_or_function": "vit", "arguments": ["--out", "a"]}, "leave it out, and give stor"),
        (
            {"recipe_or_function": "vit", "storage": "s3://bucket/run"},
            "--out is the address s3://bucket/run; give a directory",
        ),
    ],
)
def test_settings(given, said, tmp_path):
    refused(said, ray.run, **{"recipe_or_function": print, "storage": tmp_path, **given})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--evaluate"], "--evaluate runs in one process; leave --on out"),
        (["--workers", "-1"], "--workers is -1"),
        (["--resources", "GPU"], "--resources is 'GPU'; write it as in GPU=1,CPU=4"),
        (["--out", "s3://bucket/run"], "give a directory that all nodes share"),
    ],
)
def test_flags(flags, said, capsys):
    assert recipe.run("vit", ["--on", "ray", *flags]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_without_ray(monkeypatch, tmp_path, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ray" else real(name)
    )
    with pytest.raises(InputError, match=r"needs the package ray: pip install 'kmodels\[ray\]'"):
        ray.run(print, storage=tmp_path)
    assert recipe.run("vit", ["--on", "ray", "--out", str(tmp_path / "run")]) == 2
    assert "pip install 'kmodels[ray]'" in capsys.readouterr().err


def test_outside_of_a_worker():
    refused(r"directory\(\) is asked for outside of a worker of Ray", ray.directory)
