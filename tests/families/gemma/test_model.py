"""Gemma itself: sizes, packed rows, the same model on each backend, training without logits."""

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.models import (
    Gemma3Backbone,
    Gemma3CausalLM,
    GemmaBackbone,
    GemmaCausalLM,
    GemmaConfig,
)
from kmodels.models.common.sharding import DECODER
from kmodels.models.gemma.presets import PRESETS
from tolerances import tolerance

DEBUG = ("gemma_debug", "gemma2_debug", "gemma3_debug")
# The sum of each debug model's logits of `_inputs()` after seed 1234, the same on each backend.
GOLDEN = {"gemma_debug": 63.98524, "gemma2_debug": -37.19574, "gemma3_debug": -38.95985}


def _inputs(length=13):
    ids = np.random.default_rng(0).integers(3, 320, (2, length)).astype("int32")
    return {"token_ids": ids, "padding_mask": np.ones_like(ids)}


@pytest.fixture(scope="module")
def models():
    made = {}
    for name in DEBUG:
        keras.utils.set_random_seed(1234)
        made[name] = GemmaCausalLM(GemmaBackbone(**PRESETS[name]))
    return made


def test_debug_presets_are_small_and_each_generation_is_what_it_says(models):
    for generation, name in enumerate(DEBUG, 1):
        backbone = models[name].backbone
        assert backbone.count_params() < 100_000
        assert backbone.config.generation == generation
        assert backbone.config.num_key_value_heads < backbone.config.num_query_heads


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gemma_2b_en", 2_506_172_416),
        ("gemma_7b_en", 8_537_680_896),
        ("gemma2_2b_en", 2_614_341_888),
        ("gemma2_9b_en", 9_241_705_984),
        ("gemma2_27b_en", 27_227_128_320),
        ("gemma3_270m", 268_098_176),
        ("gemma3_1b", 999_885_952),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, parameters):
    config = GemmaConfig(**PRESETS[name])
    width, heads = config.hidden_dim, config.num_query_heads
    attention = 2 * width * config.head_dim * (heads + config.num_key_value_heads)
    norms = 2 * width * (1 + config.use_post_ffw_norm) + 2 * config.head_dim * (
        config.use_query_key_norm
    )
    block = attention + 3 * width * config.mlp_dim + norms
    assert config.vocabulary_size * width + config.num_layers * block + width == parameters
    # The formula is the model's own at a size that can be built.
    with keras_internals.without_values():
        small = {**PRESETS[name], "num_layers": 1, "vocabulary_size": 8, "hidden_dim": 8}
        small |= {"intermediate_dim": 8, "head_dim": 2}
        backbone = GemmaBackbone(**small)
    c = backbone.config
    assert backbone.count_params() == (
        64
        + 8
        + 32 * (c.num_query_heads + c.num_key_value_heads)
        + 24 * c.mlp_dim
        + 16 * (1 + c.use_post_ffw_norm)
        + 4 * c.use_query_key_norm
    )


@pytest.mark.each_backend
@pytest.mark.parametrize("name", DEBUG)
def test_golden_logits(models, name):
    logits = to_numpy(models[name](_inputs()))
    assert abs(float(logits.sum()) - GOLDEN[name]) < 1e-2


@pytest.mark.each_backend
def test_packed_texts_are_as_if_alone(models):
    model, alone, length, cut = models["gemma3_debug"], _inputs(18), 18, 9
    packed = {
        **alone,
        "segment_ids": np.repeat([[0] * cut + [1] * (length - cut)], 2, 0).astype("int32"),
        "positions": np.repeat([[*range(cut), *range(length - cut)]], 2, 0).astype("int32"),
    }
    together = to_numpy(model(packed))
    for part in (slice(0, cut), slice(cut, length)):
        one = to_numpy(model({name: value[:, part] for name, value in alone.items()}))
        np.testing.assert_allclose(together[:, part], one, atol=tolerance("logits"), rtol=0)


def test_what_stands_behind_a_token_does_not_matter(models):
    for model in models.values():
        inputs, changed = _inputs(), _inputs()
        changed["token_ids"][:, 11:] = 5
        one, other = (to_numpy(model(x))[:, :11] for x in (inputs, changed))
        np.testing.assert_allclose(one, other, atol=tolerance("logits"), rtol=0)


def test_inside_another_model_and_from_its_config(models):
    model = models["gemma2_debug"]
    ids, mask = (keras.Input((None,), dtype="int32") for _ in range(2))
    outer = keras.Model([ids, mask], model.backbone({"token_ids": ids, "padding_mask": mask}))
    inputs = _inputs()
    found = to_numpy(outer([inputs["token_ids"], inputs["padding_mask"]]))
    np.testing.assert_allclose(found, to_numpy(model.backbone(inputs)), atol=1e-6)
    again = GemmaCausalLM.from_config(model.get_config())
    assert again.backbone.config == model.backbone.config


def test_names_of_keras_hub(models):
    sizes = {"vocabulary_size": 16, "num_layers": 2, "num_query_heads": 2, "hidden_dim": 8}
    sizes |= {"num_key_value_heads": 1, "intermediate_dim": 12, "head_dim": 4}
    backbone = Gemma3Backbone(image_size=None, **sizes)
    assert backbone.config.mlp_dim == 12 and backbone.config.global_rope_wavelength == 1e6
    assert Gemma3CausalLM(backbone).backbone_class is Gemma3Backbone
    assert GemmaBackbone(**sizes).config.mlp_dim == 6
    with pytest.raises(InputError, match="text only"):
        Gemma3Backbone(vision_encoder=1, **sizes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "3 key/value heads do not divide 4 query heads"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"intermediate_dim": 9}, "intermediate_dim is 9"),
        ({"final_logit_soft_cap": -1.0}, "final_logit_soft_cap is -1"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"sliding_windw_size": 3}, "takes no sliding_windw_size"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    with pytest.raises(InputError, match=message):
        GemmaBackbone(**{**PRESETS["gemma_debug"], **change})


def test_layout_cuts_every_matrix_in_two_axes(models):
    import re

    for variable in models["gemma3_debug"].backbone.variables:
        found = [axes for pattern, axes in DECODER.items() if re.fullmatch(pattern, variable.path)]
        assert len(found) == (1 if len(variable.shape) == 2 else 0), variable.path
        assert all("embed" in axes and None not in axes for axes in found)


def _labels(inputs):
    weights = np.ones(inputs["token_ids"].shape, "float32")
    weights[:, :3] = 0.0
    return np.roll(inputs["token_ids"], -1, 1), weights


@pytest.mark.each_backend
def test_training_without_logits_is_training_with_them(models):
    inputs = _inputs()
    labels, weights = _labels(inputs)
    logs = []
    for fused in (True, False):
        keras.utils.set_random_seed(5)
        model = GemmaCausalLM(GemmaBackbone(**PRESETS["gemma2_debug"]))
        # An unweighted metric needs the logits.
        metrics = None if fused else ["sparse_categorical_accuracy"]
        model.compile(optimizer=keras.optimizers.SGD(0.1), metrics=metrics)
        steps = [
            model.train_on_batch(inputs, labels, sample_weight=weights, return_dict=True)
            for _ in range(2)
        ]
        steps.append(model.test_on_batch(inputs, labels, weights, return_dict=True))
        logs.append(steps)
    for one, other in zip(*logs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=tolerance("losses"))
        name = next(key for key in other if key not in ("loss", "sparse_categorical_accuracy"))
        assert one["sparse_categorical_accuracy"] == pytest.approx(other[name], abs=1e-6)


def test_the_loss_is_of_weighted_labels_over_all_positions(models):
    model, inputs = models["gemma_debug"], _inputs()
    labels, weights = _labels(inputs)
    logits = to_numpy(model(inputs)).astype("float64")
    logits -= logits.max(-1, keepdims=True)
    losses = (
        np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    )
    hits = logits.argmax(-1) == labels
    model.compile()
    logs = model.test_on_batch(inputs, labels, weights, return_dict=True)
    assert logs["loss"] == pytest.approx((losses * weights).mean(), abs=tolerance("losses"))
    accuracy = (hits * weights).sum() / weights.sum()
    assert logs["sparse_categorical_accuracy"] == pytest.approx(accuracy, abs=1e-6)
    assert model.predict_on_batch(inputs).shape == (2, 13, 320)
