"""Token ids without a row in the embedding table are one line on each backend."""

import keras
import numpy as np
import pytest

from kmodels.models import ImageTextSimilarity
from pool import pool
from refusals import refused

ROWS = 320


def message_of(wrong):
    return f"token_ids has {wrong}; the embedding table has rows 0 to {ROWS - 1}: use the"


def inputs(wrong):
    ids = np.arange(24, dtype="int32").reshape(2, 12)
    ids[1, 7] = wrong
    return {"token_ids": ids, "padding_mask": np.ones_like(ids)}


def tensors(arrays):
    return keras.tree.map_structure(keras.ops.convert_to_tensor, arrays)


@pytest.mark.parametrize("wrong", [262_144, -1])
def test_ids_beyond_the_table_are_refused(wrong):
    x, y = inputs(wrong), np.zeros((2, 12), "int32")
    with pool("gemma3_debug", preprocessor=None, num_layers=1) as model:
        refused(message_of(wrong), model.fit, x, y, verbose=0)
        refused(message_of(wrong), model.generate, x, 20, stop_token_ids=None)
        refused(message_of(wrong), model.score, **x)
        hidden_is_not_read(model, x, wrong)


def hidden_is_not_read(model, x, wrong):
    """What stands under the mask may be anything."""
    hidden = {**x, "padding_mask": (x["token_ids"] != wrong).astype("int32")}
    found = model.generate(hidden, 14, stop_token_ids=None)["token_ids"]
    assert ((found >= 0) & (found < ROWS)).all()


def test_each_method_refuses_ids_beyond_the_table():
    wrong, message = ROWS, message_of(ROWS)
    x, y = inputs(wrong), np.zeros((2, 12), "int32")
    good = inputs(ROWS - 1)
    with pool("gemma3_debug", preprocessor=None, num_layers=1) as model:
        for call in (
            lambda: model.fit(x, y, verbose=0),
            lambda: model.fit(iter([(x, y)]), steps_per_epoch=1, verbose=0),
            lambda: model.fit(tensors(x), tensors(y), verbose=0),
            lambda: model.fit([(tensors(x), tensors(y))], verbose=0),
            lambda: model.train_on_batch(tensors(x), y),
            lambda: model.predict(tensors(x), verbose=0),
            lambda: model(x),
            lambda: model.backbone.predict(x["token_ids"], verbose=0),
            lambda: model.fit(good, y, validation_data=(x, y), verbose=0),
            lambda: model.evaluate(x, y, verbose=0),
            lambda: model.predict(x, verbose=0),
            lambda: model.train_on_batch(x, y),
            lambda: model.predict_on_batch(x),
            lambda: model.predict(x["token_ids"], verbose=0),
            lambda: model.generate(x, 20, stop_token_ids=None),
            lambda: model.generate(x["token_ids"], max_new_tokens=2, stop_token_ids=None),
            lambda: model.generate(iter([x]), 20, stop_token_ids=None),
            lambda: model.score(**x),
            lambda: model.score(keras.ops.convert_to_tensor(x["token_ids"])),
        ):
            refused(message, call)
        targets = x["token_ids"]
        loss = {"scoring_mode": "loss", "target_ids": targets}
        refused(f"a label is {wrong}; give 0 to {ROWS - 1}", model.score, **good, **loss)
        assert np.isfinite(model.evaluate(good, y, verbose=0)).all()
        hidden_is_not_read(model, x, wrong)


@pytest.mark.parametrize("on_disk", [False, True])
def test_arrays_are_checked_before_the_first_step_and_files_by_batch(tmp_path, on_disk):
    ids = np.concatenate([inputs(0)["token_ids"]] * 6 + [inputs(ROWS)["token_ids"]])
    np.save(tmp_path / "ids.npy", ids)
    ids = np.load(tmp_path / "ids.npy", mmap_mode="r" if on_disk else None)
    done = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: done.append(1))
    with pool("gemma3_debug", preprocessor=None, num_layers=1) as model:
        settings = {"batch_size": 1, "shuffle": False, "callbacks": [count], "verbose": 0}
        refused("token_ids has 320", model.fit, ids, np.zeros_like(ids), **settings)
    assert bool(done) == on_disk


def test_texts_of_two_towers():
    model = ImageTextSimilarity.from_preset("clip_debug", preprocessor=None)
    length = model.backbone.config.text_encoder["max_sequence_length"]
    ids = np.full((2, length), ROWS, "int32")
    images = np.zeros((2, *model.backbone.config.vision_encoder["image_shape"]), "float32")
    x = {"images": images, "token_ids": ids, "padding_mask": np.ones_like(ids)}
    message = f"token_ids has {ROWS}; the embedding"
    refused(message, model.predict, x, verbose=0)
    refused(message, model.encode_text, ids)
