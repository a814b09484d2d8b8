"""Runs on a real Ray of this machine: torch and JAX, lost workers, fewer workers, errors."""

import json
import re
from pathlib import Path

import keras
import pytest
import ray_cases
from launch import Process, jax_ranks, launch, torch_ranks

from kmodels.checkpoint import manager
from kmodels.runs import recipe
from tolerances import tolerance

# One driver serves both backends, so the test runs once.
pytestmark = [pytest.mark.across("torch"), pytest.mark.needs("ray")]

CASES = Path(ray_cases.__file__)
BACKENDS = ("torch", "jax")
NAMES = ["killed-torch", "killed-jax", "elastic-torch", "faults-torch", "recipe-torch"]
SECONDS = 900.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def home(folder):
    """What processes take for the home folder, to see what is left in it."""
    (folder / "home").mkdir()
    return folder / "home"


@pytest.fixture(scope="module")
def found(folder, home):
    """What the driver found, by case; all on one cluster."""
    env = ray_cases.variables_of_a_driver(folder)
    driver = Process(CASES, ["ray", str(folder), *NAMES], env)
    return launch([driver], SECONDS)[0].result()


@pytest.fixture(scope="module")
def plain(folder):
    """What one process and two find without Ray, by backend, number and model."""
    results = {}
    for backend in BACKENDS:
        for count in (1, 2):
            place = folder / f"plain-{backend}-{count}"
            place.mkdir()
            ranks = torch_ranks(count) if backend == "torch" else jax_ranks(count, devices=1)
            ranks = ranks if count > 1 else [{"XLA_FLAGS": ranks[0].get("XLA_FLAGS", "")}]
            env = {"KERAS_BACKEND": backend}
            arguments = ["plain", str(place)]
            launch([Process(CASES, arguments, rank | env) for rank in ranks], SECONDS)
            results[backend, count] = read(place)
    return results


def read(place):
    return {name: json.loads((place / f"{name}.json").read_text()) for name in ("vit", "gemma")}


def newest(place):
    path, run, passed_over = manager.newest(place)
    assert not passed_over
    return path.name, run.step


@pytest.mark.parametrize("model", ["vit", "gemma"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_worker_changes_nothing(backend, model, found, plain, folder):
    place = folder / f"killed-{backend}"
    assert (place / f"died-{model}-{ray_cases.DEATH}").exists() == (
        model in ray_cases.DYING[backend]
    )
    ours, two = read(place)[model], plain[backend, 2][model]
    assert ours["processes"] == two["processes"] == 2
    assert ours["digest"] == two["digest"]
    alone = plain[backend, 1][model]
    for run in (ours, two):
        assert run["losses"] == pytest.approx(
            alone["losses"], abs=tolerance("losses_of_ranks", "float32"), rel=0
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_ray_has_the_checkpoints(backend, found, folder):
    case = found[f"killed-{backend}"]
    assert case["returned"] == 0
    assert case["metrics"]["step"] == 8 and case["metrics"]["epoch"] == 2
    checkpoints = folder / f"killed-{backend}" / "run" / "checkpoints"
    expected = [
        str(checkpoints / model / f"step_{step:08d}")
        for model in ("vit", "gemma")
        for step in (3, 6, 8)
    ]
    assert case["checkpoints"] == expected
    assert sorted(map(str, checkpoints.glob("*/step_*"))) == sorted(expected)
    for path in expected:
        manager.verify(Path(path))


def test_fewer_workers_and_more_go_on(found, plain, folder):
    """Two, one and two workers on a bucket; Ray keeps the newest two in it."""
    case = found["elastic-torch"]
    for error, worker in zip(case["errors"], (".", "0"), strict=True):
        assert re.match(f"worker {worker} was lost and 0 failures had been allowed: ", error)
        assert "\n" not in error
    ours = json.loads((folder / "elastic-torch" / "vit.json").read_text())
    assert ours["processes"] == 2
    assert ours["losses"] == pytest.approx(
        plain["torch", 1]["vit"]["losses"], abs=tolerance("losses_of_ranks", "float32"), rel=0
    )
    place = folder / "elastic-torch" / "bucket" / "runs" / "first" / "checkpoints" / "vit"
    kept = [str(place / f"step_{step:08d}") for step in (6, 8)]
    assert case["checkpoints"] == kept
    assert sorted(str(file.parent) for file in place.glob("step_*/published.json")) == kept
    assert sorted(map(str, place.iterdir())) == kept


def test_an_error_of_the_function_ends_all_at_once(found, folder):
    error = found["faults-torch"]["raised"]
    assert re.fullmatch(r"ValueError: the rows are bad \(ray_cases.py:\d+, in worker 1\)", error)
    attempts = (folder / "faults-torch" / "raised" / "attempts").read_text().splitlines()
    assert len(attempts) == 2


@pytest.mark.parametrize(
    ("name", "says", "checkpoints"),
    [("full", "make room", "checkpoints"), ("lost", "give another directory", "elsewhere")],
)
def test_a_disk_that_is_full_or_gone_damages_nothing(name, says, checkpoints, found, folder):
    error = found["faults-torch"][name]
    assert error.startswith("cannot write checkpoint") and says in error
    assert "\n" not in error
    place = folder / "faults-torch" / name / "run" / checkpoints / "vit"
    assert newest(place) == ("step_00000003", 3)
    assert len(manager.list_checkpoints(place)) == 1


def test_a_recipe_by_one_flag(found, folder, tmp_path):
    assert found["recipe-torch"]["code"] == 0
    assert found["recipe-torch"]["again"] == 2, "its directory holds a run"
    assert recipe.run("vit", [*ray_cases.FLAGS, "--out", str(tmp_path / "alone")]) == 0
    on_ray, alone = (
        json.loads((place / "result.json").read_text())
        for place in (folder / "recipe-torch" / "run", tmp_path / "alone")
    )
    assert on_ray["step_losses"] == pytest.approx(
        alone["step_losses"], abs=tolerance("losses_of_ranks", "float32"), rel=0
    )
    assert (folder / "recipe-torch" / "run" / "report.html").exists()


def test_nothing_is_left(found, home):
    assert not (home / "ray_results").exists()
    assert not (home / ".ray").exists()
    assert keras.backend.backend() == "torch"
