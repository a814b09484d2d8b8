"""Several processes train on what one is given: every kind of data, meshes over all, errors."""

import input_cases
import keras
import numpy as np
import pytest
from launch import Process, jax_cache, jax_ranks, launch, torch_ranks

from kmodels.core.errors import InputError
from tolerances import tolerance

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    pytest.skip("one process has all devices there", allow_module_level=True)

EVERYWHERE = (
    input_cases.arrays,
    input_cases.pictures,
    input_cases.numbered,
    input_cases.generated,
    input_cases.own,
)
OF_OTHERS = (input_cases.dataloader, input_cases.tf_data, input_cases.grain, input_cases.datasets)
# Both processes feed rows of their own to the first, and the same rows to the second.
MESHES = ("fsdp=2,model=2", "model=4") if BACKEND == "jax" else ()
MAIN = "data=4" if BACKEND == "jax" else "data=2"


def _processes(kinds, cache, meshes=(), folder="", **options):
    arguments = [";".join((MAIN, *meshes)), str(folder), *(kind.__name__ for kind in kinds)]
    ranks = jax_ranks(2) if BACKEND == "jax" else torch_ranks(2)
    process = Process(input_cases.__file__, arguments, jax_cache(cache), ranks=ranks)
    return launch([process], 280, **options)


def _compare(found, wanted):
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(
            found[name], values, atol=tolerance("losses_of_ranks"), rtol=0, err_msg=name
        )


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    cache, written = (tmp_path_factory.mktemp(name) for name in ("cache", "written"))
    outputs = _processes(EVERYWHERE, cache, MESHES, written, check=False)
    for output in outputs:
        assert not output.late and output.stdout.splitlines()[-1][0] == "{", output.stderr[-3000:]
    return outputs


@pytest.fixture(scope="module")
def alone():
    with pytest.warns(UserWarning, match="the data makes its own batches"):
        return input_cases.fed(None, EVERYWHERE)


@pytest.mark.parametrize("kind", [kind.__name__ for kind in EVERYWHERE])
def test_each_kind_of_data(two, alone, kind):
    for output in two:
        _compare(output.result()["fed"][kind], alone[kind])


def test_meshes_over_both(two, alone):
    for output in two:
        for mesh in MESHES:
            _compare(output.result()[mesh], alone["arrays"])


def test_one_writes_and_all_decide_alike(two):
    for output in two:
        found = output.result()
        assert found["followed"] == {"epochs": 3, "rate": pytest.approx(0.01)}
        assert found["files"] == ["0.csv", "0.weights.h5"]
    assert "Epoch 3/9" in two[0].stdout and "Epoch" not in two[1].stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("counts", "number of batches is 3 on process 0, 2 on process 1"),
        ("content", "the first batch is '"),
        ("stream", "the first batch is '"),
        ("own", "ends after 3 batches on process 1 and continues on others"),
        ("batch", "does not divide the batch of 15; the nearest batches that work are"),
        ("few", "the data has 9 samples and a batch 16; give a smaller batch_size"),
        ("metrics", r"metrics=\['accuracy'\] would count the rows .* 56 samples"),
        ("backup", r"BackupAndRestore restores in one process .* plan.callbacks\(directory\)"),
        ("prepare", "would be trained in each process alone; call model = plan.prepare"),
    ],
)
def test_what_is_told_before_the_first_step(two, name, message):
    for output in two:
        said = output.result()["refused"][name]
        with pytest.raises(InputError, match=message):
            raise InputError(said)


def test_data_that_ends_early_ends_the_run(two):
    """By the time they compare how many there were, or one of them has waited in vain."""
    assert two[0].status == 1 and two[1].status not in (0, None)
    compared = "number of batches is 2 on process 0, 3 on process 1; give all of them the same"
    waited = "process 0 of 2 waited 3 s for the others"
    assert compared in two[0].stderr or waited in two[0].stderr, two[0].stderr[-3000:]


@pytest.mark.nightly
@pytest.mark.across("jax", "torch")
def test_data_of_other_packages(tmp_path):
    wanted = input_cases.fed(None, OF_OTHERS)
    for output in _processes(OF_OTHERS, tmp_path):
        found = output.result()["fed"]
        assert found.keys() == wanted.keys()
        for kind in wanted:
            _compare(found[kind], wanted[kind])
