"""The inputs of a Gemma: any padding mask, none at all, and names that it does not know."""

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels.core.errors import InputError
from kmodels.models import GemmaBackbone, GemmaCausalLM, GemmaConfig
from kmodels.models.gemma.layers import GemmaBlock
from kmodels.models.gemma.presets import PRESETS
from tolerances import tolerance

DEBUG = {
    **{"gemma_debug": "float32", "gemma2_debug": "mixed_bfloat16", "gemma3_debug": "float32"},
    "gemma4_debug": "float32",
}
LENGTH = 13


@pytest.fixture(scope="module")
def models():
    keras.utils.set_random_seed(1234)
    return {
        name: GemmaCausalLM(GemmaBackbone(**PRESETS[name], dtype=dtype))
        for name, dtype in DEBUG.items()
    }


@pytest.fixture(scope="module")
def token_ids():
    return np.random.default_rng(0).integers(3, 320, (3, LENGTH)).astype("int32")


@pytest.fixture(scope="module")
def mask():
    """Padding on the left, holes, and padding on the right: 8 tokens in each row."""
    mask = np.ones((3, LENGTH), "int32")
    mask[0, :5] = mask[1, [0, 2, 7, 8, 12]] = mask[2, 8:] = 0
    return mask


def _there(values, mask):
    """(3, LENGTH, ...) -> (3, 8, ...)."""
    return values[mask == 1].reshape(3, 8, *values.shape[2:])


def _limit(model, values):
    """How far logits may lie apart."""
    return tolerance("logits", model.backbone.compute_dtype) * max(1, np.abs(values).max())


@pytest.mark.each_backend
def test_masked_tokens_are_as_if_they_were_not_there(models, token_ids, mask):
    for model, dtype in zip(models.values(), ("bool", "int32", "float32", "bool"), strict=True):
        inputs = {"token_ids": token_ids, "padding_mask": mask.astype(dtype)}
        found = _there(to_numpy(model(inputs)), mask)
        alone = to_numpy(model(_there(token_ids, mask)))
        np.testing.assert_allclose(found, alone, atol=_limit(model, alone), rtol=0)


def test_padding_on_the_right_changes_no_bit(models, token_ids, mask):
    mask = np.repeat(mask[2:], 3, 0)
    for model in models.values():
        with_mask = to_numpy(model({"token_ids": token_ids, "padding_mask": mask}))
        np.testing.assert_array_equal(with_mask, to_numpy(model(token_ids)))


@pytest.mark.each_backend
def test_the_mask_counts_in_training_as_it_does_in_a_call(models, token_ids, mask):
    model = models["gemma3_debug"]
    model.compile(optimizer=keras.optimizers.SGD(0.0))
    alone = _there(token_ids, mask)
    wanted = model.test_on_batch(alone, np.roll(alone, 1, 1), return_dict=True)["loss"]
    labels = np.zeros_like(token_ids)
    labels[mask == 1] = np.roll(alone, 1, 1).reshape(-1)
    inputs = {"token_ids": token_ids, "padding_mask": mask}
    logs = model.train_on_batch(inputs, labels, mask.astype("float32"), return_dict=True)
    assert logs["loss"] * LENGTH / 8 == pytest.approx(wanted, abs=tolerance("losses"))


def test_segments_and_positions_go_with_their_tokens(models, token_ids, mask):
    model, cut = models["gemma2_debug"], 4
    inputs = {"token_ids": token_ids, "padding_mask": mask}
    for name, values in (
        ("segment_ids", [0] * cut + [1] * (8 - cut)),
        ("positions", [*range(cut), *range(8 - cut)]),
    ):
        inputs[name] = np.zeros_like(token_ids)
        inputs[name][mask == 1] = values * 3
    found = _there(to_numpy(model(inputs)), mask)
    for part in (slice(0, cut), slice(cut, 8)):
        alone = to_numpy(model(_there(token_ids, mask)[:, part]))
        np.testing.assert_allclose(found[:, part], alone, atol=_limit(model, alone), rtol=0)


def test_positions_may_be_called_position_ids(models, token_ids):
    model = models["gemma_debug"]
    positions = np.tile(np.array([0, 2, *range(5, 5 + token_ids.shape[1] - 2)]), (3, 1))
    wanted = to_numpy(model({"token_ids": token_ids, "positions": positions}))
    np.testing.assert_array_equal(
        to_numpy(model({"token_ids": token_ids, "position_ids": positions})), wanted
    )
    assert np.abs(wanted - to_numpy(model(token_ids))).max() > tolerance("logits")
    with pytest.raises(InputError, match="got both position_ids and positions"):
        model({"token_ids": token_ids, "positions": positions, "position_ids": positions})


def test_intermediates_stand_where_their_tokens_stand(models, token_ids, mask):
    backbone = models["gemma3_debug"].backbone
    inputs = {"token_ids": token_ids, "padding_mask": mask}
    found = backbone.intermediates(inputs)
    alone = backbone.intermediates(_there(token_ids, mask))
    assert list(found) == ["token_embedding", "block_0", "block_1", "final_norm"]
    for name, value in found.items():
        np.testing.assert_allclose(
            _there(to_numpy(value), mask), to_numpy(alone[name]), atol=tolerance("hidden"), rtol=0
        )
    graph = keras.Model(backbone.input, backbone.get_layer("final_norm").output)(inputs)
    assert graph.shape == found["final_norm"].shape


def test_token_ids_are_enough_and_unknown_names_are_left_out_with_a_warning(models, token_ids):
    model = models["gemma_debug"]
    wanted = to_numpy(model({"token_ids": token_ids, "padding_mask": np.ones_like(token_ids)}))
    for inputs in (token_ids, {"token_ids": token_ids}, {"token_ids": token_ids[..., None]}):
        np.testing.assert_array_equal(to_numpy(model(inputs)), wanted)
    none = {"token_ids": token_ids, "padding_mask": None, "positions": None}
    np.testing.assert_array_equal(to_numpy(model(none)), wanted)
    limit = tolerance("logits")
    np.testing.assert_allclose(model.predict(token_ids, verbose=0), wanted, atol=limit)
    # Of names before and behind those of the graph.
    for name in ("attention_mask", "zebra"):
        with pytest.warns(UserWarning, match="The structure of `inputs` doesn't match"):
            found = model({"token_ids": token_ids, name: token_ids})
        np.testing.assert_array_equal(to_numpy(found), wanted)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"padding_mask": 1, "ids": 2}, "got ids, padding_mask; it needs token_ids"),
        ({}, "got nothing; it needs token_ids"),
        ([1, 2], "a list of inputs; give token ids as an array"),
    ],
)
def test_without_token_ids_it_says_what_is_missing(models, inputs, message):
    with pytest.raises(InputError, match=message):
        models["gemma_debug"](inputs)


def test_a_model_of_the_users_over_the_graph_trains_with_the_two_usual_inputs(token_ids, mask):
    backbone = GemmaBackbone(**PRESETS["gemma3_debug"])
    assert list(backbone.input) == ["token_ids", "padding_mask"]
    pooled = keras.layers.GlobalAveragePooling1D()(backbone.output)
    model = keras.Model(backbone.input, keras.layers.Dense(2)(pooled))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # On JAX a step that is not compiled is a program for each op.
    compiled = keras.backend.backend() == "jax"
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"], jit_compile=compiled)
    inputs, labels = {"token_ids": token_ids, "padding_mask": mask}, np.array([0, 1, 1])
    history = model.fit(inputs, labels, epochs=8, verbose=0).history
    assert history["loss"][-1] < history["loss"][0] / 2
    hidden = to_numpy(backbone(inputs)).mean(1)
    head = [to_numpy(weight) for weight in model.layers[-1].weights]
    np.testing.assert_allclose(
        model.predict(inputs, verbose=0), hidden @ head[0] + head[1], atol=tolerance("logits")
    )


def test_generate_takes_rows_that_are_padded_on_the_left(models, token_ids, mask):
    model = models["gemma3_debug"]
    found = model.generate(
        {"token_ids": token_ids, "padding_mask": mask}, max_length=20, stop_token_ids=None
    )
    alone = model.generate(_there(token_ids, mask), max_length=20, stop_token_ids=None)
    np.testing.assert_array_equal(found["token_ids"], alone["token_ids"])


def test_a_keras_mask_is_heeded_and_handed_on():
    config = GemmaConfig(31, 1, 2, 1, 8, 24, 4)
    block = GemmaBlock(config, 0)
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")
    there = np.array([[False, False, True, True, True]] * 2)
    masked = keras.layers.Masking(9.0)(np.where(there[..., None], x, 9.0))
    alone = to_numpy(block(x[:, 2:]))  # rotary positions are relative
    for more in ({}, {"segment_ids": np.zeros((2, 5), "int32")}):
        found = block(masked, **more)
        np.testing.assert_array_equal(to_numpy(found._keras_mask), there)
        found = to_numpy(found)[:, 2:]
        np.testing.assert_allclose(found, alone, rtol=0, atol=tolerance("attention"))
