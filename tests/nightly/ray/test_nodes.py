"""Nodes of a Ray cluster that go and come while a run is on them."""

import json
from pathlib import Path

import node_cases
import pytest
import ray_cases
from launch import Process, launch, torch_ranks

from tolerances import tolerance

# One driver serves both backends, so the test runs once.
pytestmark = [pytest.mark.across("torch"), pytest.mark.needs("ray")]

NAMES = ["spare-torch", "elastic-torch", "elastic-jax"]
SECONDS = 1800.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def found(folder):
    """What the driver found, by case; all on one cluster."""
    (folder / "home").mkdir()
    env = ray_cases.variables_of_a_driver(folder)
    driver = Process(Path(node_cases.__file__), [str(folder), *NAMES], env)
    return launch([driver], SECONDS)[0].result()


def plain(folder, backend, count):
    """What processes find that Ray did not start."""
    place = folder / f"plain-{backend}-{count}"
    place.mkdir()
    ranks = torch_ranks(count) if count > 1 else [{}]
    env = {"KERAS_BACKEND": backend}
    script, arguments = Path(ray_cases.__file__), ["plain", str(place), "vit"]
    launch([Process(script, arguments, rank | env) for rank in ranks])
    return json.loads((place / "vit.json").read_text())


def left(folder, name):
    """What a run left, and how many workers it had at which steps, one after another."""
    lines = (folder / name / "steps").read_text().splitlines()
    result = json.loads((folder / name / "vit.json").read_text())
    return result, [json.loads(line) for line in lines]


def test_a_spare_node_changes_nothing(found, folder):
    ours, steps = left(folder, "spare-torch")
    # Callbacks hear once more of the step that was saved.
    assert steps == [[2, step] for step in (1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8)]
    assert ours["digest"] == plain(folder, "torch", 2)["digest"]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_run_has_as_many_workers_as_there_are_nodes(backend, found, folder):
    ours, steps = left(folder, f"elastic-{backend}")
    assert [count for count, _ in steps] == [2] * 5 + [1] * 5 + [2] * 3
    assert [step for _, step in steps] == [1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 6, 7, 8]
    assert ours["processes"] == 2
    assert ours["losses"] == pytest.approx(
        plain(folder, backend, 1)["losses"], abs=tolerance("losses_of_ranks", "float32"), rel=0
    )
    assert len(found[f"elastic-{backend}"]["checkpoints"]) == 2
    assert not (folder / "home" / ".ray").exists()
