"""`fit` on records with images, on each backend: batches with two, one and no images."""

import keras
import numpy as np
import pytest

from gemma3_processor_case import START, ProcessorCase
from kmodels.training.loop import Loop
from tolerances import tolerance


class Sums(Loop, keras.Model):
    """A model that adds a mean color of a row's images to the tokens that they fill."""

    def __init__(self, preprocessor):
        super().__init__()
        self.preprocessor = preprocessor
        self.embedding = keras.layers.Embedding(500, 8)
        self.color, self.head = keras.layers.Dense(8), keras.layers.Dense(500)

    def call(self, x):
        color = keras.ops.sum(self.color(keras.ops.mean(x["images"], (2, 3))), 1, keepdims=True)
        filled = keras.ops.cast(x["vision_mask"][..., None], "float32")
        return self.head(self.embedding(x["token_ids"]) + color * filled)


@pytest.fixture(scope="module")
def case(references):
    return ProcessorCase(references)


@pytest.mark.each_time("records", on=("jax", "tensorflow"))
@pytest.mark.each_backend
@pytest.mark.parametrize("form", ["records", "lists", "columns"])
def test_losses(case, form):
    text = case.preprocessor(sequence_length=32)
    square, wide = case.picture("square.png"), str(case.picture("wide3.jpg"))
    records = [
        {"prompts": "no", "responses": "image", "images": []},
        {"prompts": "none", "responses": "here", "images": []},
        {"prompts": f"a {START}", "responses": "x", "images": [square]},
        {"prompts": "b", "responses": "y", "images": []},
        {"prompts": f"{START}{START}", "responses": "z", "images": [wide, square.read_bytes()]},
        {"prompts": f"{START}", "responses": "w", "images": [wide]},
    ]
    given = {
        "records": records,
        "lists": [records[:2], records[2:4], records[4:]],
        "columns": {name: [row[name] for row in records] for name in records[0]},
    }[form]
    keras.utils.set_random_seed(1)
    model, twin = Sums(text), Sums(None)
    ids = text(records[4:])
    model(ids[0]), twin(ids[0])
    twin.set_weights(model.get_weights())
    for one in (model, twin):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        one.compile(keras.optimizers.SGD(0.5), loss)
    settings = {} if form == "lists" else {"batch_size": 2, "shuffle": False}
    model.fit(given, verbose=0, **settings)
    for start in (0, 2, 4):
        twin.train_on_batch(*text(records[start : start + 2]))
    for ours, theirs in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tolerance("optimizer"))
    assert model.predict(records[:3], batch_size=2, verbose=0).shape == (3, 32, 500)
