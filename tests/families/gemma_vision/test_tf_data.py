"""Images and texts inside `tf.data.Dataset.map`, on each backend where TensorFlow is there."""

import keras
import numpy as np
import pytest

from arrays import assert_equal
from gemma3_processor_case import START, ProcessorCase
from kmodels.data import as_dataset
from kmodels.data.pipeline.kinds import pipeline
from refusals import refused

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 2, 9, 7, 3)).astype("uint8")
TEXTS = {"prompts": [f"{START} a {START}", START * 2, f"b {START}{START}"], "responses": ["x"] * 3}


@pytest.fixture(scope="module")
def case(references):
    return ProcessorCase(references)


@pytest.fixture(scope="module")
def text(case):
    return case.preprocessor(sequence_length=40)


def same(found, expected):
    assert_equal(keras.tree.flatten(found), keras.tree.flatten(expected))


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("batched", [False, True])
def test_as_many_images_for_each(text, batched):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices({**TEXTS, "images": PIXELS})
    data = data.batch(3) if batched else data
    found = data.map(text)
    x = found.element_spec[0]
    rows = (None,) if batched else ()
    assert tuple(x["images"].shape) == (*rows, 2, 20, 20, 3)
    assert tuple(x["vision_indices"].shape) == (*rows, 8)
    found = next(iter((found if batched else found.batch(3)).as_numpy_iterator()))
    same(found, text({**TEXTS, "images": PIXELS}))
    prompts = {"prompts": TEXTS["prompts"], "images": PIXELS}
    data = tf.data.Dataset.from_tensor_slices(prompts).batch(3).map(text.generate_preprocess)
    same(next(iter(data.as_numpy_iterator())), text.generate_preprocess(prompts))
    one = {"prompts": [START] * 3, "responses": ["x"] * 3, "images": PIXELS[:, 0]}
    data = tf.data.Dataset.from_tensor_slices(one).map(text).batch(3)
    same(next(iter(data.as_numpy_iterator())), text(one))


@pytest.mark.needs("tensorflow")
def test_texts_alone(text):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(["a text", "b"]).batch(2).map(text)
    same(next(iter(data.as_numpy_iterator())), text(["a text", "b"]))


@pytest.mark.needs("tensorflow")
@pytest.mark.across("torch", "jax", "tensorflow")
@pytest.mark.parametrize("shape", [(9, 7, 3), None])
def test_ragged_images(text, shape):
    """As many images as each text has, with sides that are known or not, in a map and outside."""
    import tensorflow as tf

    images = [PIXELS[0], PIXELS[1, :1], PIXELS[2, :0]]
    texts = {"prompts": [START * 2, START, "no image"], "responses": ["x"] * 3}
    wanted = text({**texts, "images": [list(one) for one in images]})
    ragged = tf.ragged.constant([one.tolist() for one in images], tf.uint8, inner_shape=shape)
    columns = {name: tf.constant(column) for name, column in texts.items()} | {"images": ragged}
    same(text(columns), wanted)
    prompts = {"prompts": columns["prompts"], "images": ragged}
    listed = {"prompts": texts["prompts"], "images": [list(one) for one in images]}
    same(text.generate_preprocess(prompts), text.generate_preprocess(listed))
    # As fit and predict take them, with the preprocessor of a model.
    for data in (columns, tf.data.Dataset.from_tensor_slices(columns).batch(3)):
        same(next(pipeline(as_dataset(data, preprocess=text)).get_numpy_iterator()), wanted)
    found = tf.data.Dataset.from_tensor_slices(columns).batch(3).map(text)
    assert tuple(found.element_spec[0]["images"].shape) == (None, None, 20, 20, 3)
    same(next(iter(found.as_numpy_iterator())), wanted)


@pytest.mark.needs("tensorflow")
def test_what_is_refused(case, text):
    import tensorflow as tf

    crops = case.preprocessor(crops=True)
    columns = {"prompts": [START], "responses": ["x"]}
    dense = {**columns, "images": PIXELS[:1, 0]}
    for preprocessor, given, message in (
        (crops, dense, "images with do_pan_and_scan cannot be preprocessed inside tf.data"),
        (text, {"images": PIXELS[:1, 0]}, "got images without texts; give prompts too"),
        (text, {**columns, "images": [[1.0, 2.0]]}, r"'images' has shape \(None, 2\) in tf.data"),
    ):
        data = tf.data.Dataset.from_tensor_slices(given).batch(1)
        refused(message, data.map, preprocessor)
