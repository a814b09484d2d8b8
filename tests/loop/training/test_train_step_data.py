"""Batches with names reach a loss function whole, whatever yields them."""

import functools

import keras
import numpy as np
import pytest

from kmodels.data.pipeline.arrays import one_piece, tensors
from kmodels.data.pipeline.kinds import prepare
from kmodels.data.pipeline.request import FitRequest, Method

BATCHES = [{"image": np.full((2, 3), i, "float32"), "label": np.array([i, i])} for i in range(3)]


class Loader:
    """Has what loaders have, and can be gone through again."""

    def __iter__(self):
        return iter(BATCHES)

    def __len__(self):
        return len(BATCHES)


def generate():
    yield from BATCHES


def batches(data, **settings):
    """The batches that a step gets of data, as `TrainStep` asks for them."""
    request = FitRequest.of(Method.FIT, x=data, shuffle=False, **settings)
    pipeline = prepare(request, split=one_piece).x
    pipeline.start()
    return list(pipeline.raw())


@pytest.mark.once
@pytest.mark.parametrize(
    "data", [BATCHES, Loader(), generate, functools.partial(iter, BATCHES), generate()]
)
def test_dictionaries_stay_whole(data):
    found = batches(data)
    assert len(found) == 3
    for (batch, *rest), wanted in zip(found, BATCHES, strict=True):
        assert not rest
        assert set(batch) == set(wanted)
        np.testing.assert_array_equal(batch["image"], wanted["image"])


@pytest.mark.once
def test_what_has_no_names_goes_its_way():
    arrays = {"image": np.zeros((4, 3)), "label": np.zeros(4)}
    ((x,),) = batches(arrays)
    assert x["image"].shape == (4, 3)
    x, y = batches([(np.ones((2, 3)), np.zeros(2))])[0]
    assert (x.shape, y.shape) == ((2, 3), (2,))


@pytest.mark.needs("tensorflow")
def test_tf_data_with_names():
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices({"image": np.zeros((4, 3)), "label": np.zeros(4)})
    (batch,) = batches(rows.batch(2))[0]
    assert set(batch) == {"image", "label"}


@pytest.mark.needs("datasets")
def test_a_hugging_face_dataset_with_names():
    import datasets

    rows = datasets.Dataset.from_dict({"image": [[0.0, 1.0]] * 5, "label": [0, 1, 2, 3, 4]})
    (batch,) = batches(rows, batch_size=2)[2]
    np.testing.assert_array_equal(batch["label"], [4])


def test_float64_becomes_what_keras_computes_in():
    found = tensors({"x": np.zeros(2), "y": np.zeros(2, "int32"), "z": None})
    kinds = [keras.backend.standardize_dtype(found[name].dtype) for name in "xy"]
    assert kinds == ["float32", "int32"]
    assert found["z"] is None
