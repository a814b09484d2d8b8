"""The ViT itself: sizes, variants, names, and the same model on each backend."""

import keras
import numpy as np
import pytest

from arrays import to_numpy
from gradients import value_and_grad
from kmodels.core import keras_internals
from kmodels.core.dispatch import decisions, generic_only, reset_decisions
from kmodels.core.errors import InputError
from kmodels.models import ViTBackbone, ViTConfig, ViTImageClassifier
from kmodels.models.vit.presets import PRESETS
from tolerances import tolerance

TINY = {
    "image_shape": (16, 24, 3),
    "patch_size": 8,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 16,
    "mlp_dim": 32,
}

# Logits of the first image after seed 11, the same on each backend.
GOLDEN_LOGITS = [-0.10895590, -0.09822464, -0.09796409, 0.00051133, -0.04171935]


def _images(batch=2, shape=(16, 24, 3)):
    return np.random.default_rng(0).normal(size=(batch, *shape)).astype("float32")


def _fields(preset):
    return {k: v for k, v in PRESETS[preset].items() if not k.startswith("task_")}


@pytest.fixture(scope="module")
def model():
    return ViTImageClassifier(ViTBackbone(**TINY), 5)


def test_base_with_1000_classes_has_the_published_number_of_parameters():
    with keras_internals.without_values():
        model = ViTImageClassifier(ViTBackbone(**_fields("vit_base_patch16_224")), 1000)
    assert model.count_params() == 86_567_656


def test_tutorial_preset_has_the_layers_of_the_tutorial():
    preset = PRESETS["vit_keras_tutorial_base_patch16_224"]
    assert (preset["task_pooling"], preset["task_dropout"]) == ("gap", 0.5)
    config = ViTConfig(**_fields("vit_keras_tutorial_base_patch16_224"))
    with keras_internals.without_values():
        backbone = ViTBackbone(**{**config.to_dict(), "num_layers": 1})
    shapes = {v.path: tuple(v.shape) for v in backbone.trainable_variables}
    assert shapes["patch_embedding/kernel"] == (16 * 16 * 3, 768)
    assert shapes["tokens/position_embedding"] == (1, 196, 768)
    assert shapes["block_0/attention/query/kernel"] == (768, 768)
    assert shapes["block_0/mlp/up/kernel"] == (768, 3072)
    assert shapes["block_0/mlp/down/kernel"] == (3072, 768)
    assert not any("class_token" in path for path in shapes)
    assert (config.num_layers, config.num_heads, config.dropout_rate) == (12, 12, 0.1)


def test_every_preset_is_valid_and_debug_is_small():
    for name in PRESETS:
        ViTConfig(**_fields(name))
    assert ViTBackbone(**_fields("vit_debug")).count_params() < 100_000
    for size in ("tiny", "small", "base", "large", "huge"):
        for patch in (14, 16, 32):
            assert f"vit_{size}_patch{patch}_224" in PRESETS


VARIANTS = {
    "registers": ({"num_register_tokens": 3, "position_over_prefix": False}, {}, 10),
    "scales": ({"layer_scale": 0.1, "qk_norm": True, "pre_norm": True}, {}, 7),
    "no token": ({"use_class_token": False}, {"pooling": "gap"}, 6),
    "map": ({"num_register_tokens": 2}, {"pooling": "map"}, 9),
    "distilled": ({"use_distillation_token": True}, {"pooling": "distilled"}, 8),
    "swiglu": ({"use_swiglu_ffn": True, "use_mask_token": True}, {"pooling": "token_gap"}, 7),
    "quick": ({"approximate_gelu": "sigmoid"}, {"head_bias": False}, 7),
    "pooled norm": ({"final_norm": False}, {"pooling": "gap", "pooled_norm": True}, 7),
    "pre-logits": ({"approximate_gelu": True}, {"intermediate_dim": 4}, 7),
    "no biases": (
        {"use_mha_bias": False, "use_mlp_bias": False, "use_patch_bias": False},
        {"activation": "softmax"},
        7,
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_runs_and_its_config_makes_it_again(name):
    fields, head, tokens = VARIANTS[name]
    model = ViTImageClassifier(ViTBackbone(**TINY, **fields), 5, **head)
    x = _images()
    assert tuple(model.backbone(x).shape) == (2, tokens, 16)
    logits = to_numpy(model(x))
    assert logits.shape == (2, 5) and np.ptp(logits[0] - logits[1]) > 0
    if name == "no biases":
        np.testing.assert_allclose(logits.sum(-1), 1, atol=1e-5)
    again = ViTImageClassifier.from_config(model.get_config())
    again.set_weights(model.get_weights())
    assert [v.path for v in again.variables] == [v.path for v in model.variables]
    np.testing.assert_allclose(to_numpy(again(x)), logits, atol=1e-6)


def test_intermediates_come_in_the_order_of_computation(model):
    found = model.backbone.intermediates(_images())
    names = ["patch_embedding", "tokens", "block_0", "block_1", "final_norm"]
    assert list(found) == names
    np.testing.assert_allclose(
        to_numpy(found["final_norm"]), to_numpy(model.backbone(_images())), atol=1e-6
    )


def test_attention_maps_are_those_of_the_blocks(model):
    maps = model.backbone.attention_maps(_images())
    assert [tuple(m.shape) for m in maps] == [(2, 2, 7, 7)] * 2
    np.testing.assert_allclose(to_numpy(maps[1]).sum(-1), 1, atol=1e-5)
    block = model.backbone.blocks[1]
    x = model.backbone.intermediates(_images())["block_0"]
    expected = block.attention.probabilities(block.attention_norm(x))
    np.testing.assert_allclose(to_numpy(maps[1]), to_numpy(expected), atol=1e-6)


@pytest.mark.parametrize("kept", [1, 4])
@pytest.mark.parametrize("more", [{}, {"num_register_tokens": 3, "layer_scale": 0.1}])
def test_the_first_tokens_alone_have_the_values_and_gradients_that_they_have_among_all(kept, more):
    backbone = ViTBackbone(**{**TINY, "final_norm": kept > 1, **more})
    images = _images()
    whole, of_whole = value_and_grad(lambda x: backbone(x)[:, :kept], images, compiled=True)
    alone, of_alone = value_and_grad(lambda x: backbone(x, keep=kept), images, compiled=True)
    assert alone.shape == (2, kept, 16)
    np.testing.assert_allclose(to_numpy(alone), to_numpy(whole), atol=tolerance("hidden"))
    assert np.abs(of_whole[0]).max() > 1e-2
    largest = np.abs(of_whole[0]).max()
    np.testing.assert_allclose(of_alone[0], of_whole[0], atol=tolerance("hidden") * largest)


def test_the_last_block_of_a_classifier_by_the_class_token_makes_that_token_alone(monkeypatch):
    classifier = ViTImageClassifier(ViTBackbone(**TINY), 5)
    lengths = []
    for block in classifier.backbone.blocks:
        call = block.mlp.call
        spy = lambda x, call=call, **kw: lengths.append(x.shape[1]) or call(x, **kw)  # noqa: E731
        monkeypatch.setattr(block.mlp, "call", spy)
    logits = classifier(_images())
    assert lengths == [7, 1]
    token = classifier.backbone(_images())[:, 0]
    expected = classifier.get_layer("logits")(token)
    np.testing.assert_allclose(to_numpy(logits), to_numpy(expected), atol=tolerance("logits"))


def test_one_seed_gives_the_same_model_on_each_backend():
    keras.utils.set_random_seed(11)
    logits = to_numpy(ViTImageClassifier(ViTBackbone(**TINY), 5)(_images()))
    keras.utils.set_random_seed(12)
    other = to_numpy(ViTImageClassifier(ViTBackbone(**TINY), 5)(_images()))
    assert np.abs(logits - other).max() > 1e-2
    np.testing.assert_allclose(logits[0], GOLDEN_LOGITS, atol=1e-5)


def test_overridden_and_generic_path_give_the_same_logits(model):
    x = _images()
    reset_decisions()
    overridden = to_numpy(model(x))
    taken = decisions()
    with generic_only():
        reset_decisions()
        generic = to_numpy(model(x))
        assert all(counts["override"] == 0 for counts in decisions().values())
    np.testing.assert_allclose(overridden, generic, atol=1e-5)
    assert sum(sum(counts.values()) for counts in taken.values()) > 10


def test_drop_path_grows_with_depth_and_dropout_acts_in_training_only():
    backbone = ViTBackbone(
        **{**TINY, "num_layers": 3},
        drop_path_rate=0.2,
        dropout_rate=0.1,
        attention_dropout=0.1,
    )
    assert [round(b.drop_path.rate, 6) for b in backbone.blocks] == [0.0, 0.1, 0.2]
    x = _images()
    still = [to_numpy(backbone(x)) for _ in range(2)]
    np.testing.assert_array_equal(*still)
    moved = [to_numpy(backbone(x, training=True)) for _ in range(2)]
    assert np.abs(moved[0] - moved[1]).max() > 1e-2


def test_mixed_bfloat16_keeps_weights_and_logits_in_float32():
    model = ViTImageClassifier(ViTBackbone(**TINY, dtype="mixed_bfloat16"), 5)
    x = _images()
    assert {str(v.dtype) for v in model.trainable_variables} == {"float32"}
    assert keras.backend.standardize_dtype(model.backbone(x).dtype) == "bfloat16"
    logits = model(x)
    assert keras.backend.standardize_dtype(logits.dtype) == "float32"
    exact = ViTImageClassifier(ViTBackbone(**TINY), 5)
    exact.set_weights(model.get_weights())
    difference = np.abs(to_numpy(logits) - to_numpy(exact(x))).max()
    assert 0 < difference < 0.03


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patch_size": 7}, "does not divide the image side of 16; the nearest .* are 14 and 21"),
        ({"patch_size": 32}, "the nearest sides that work are 32 and 64"),
        ({"num_heads": 3}, "3 heads do not divide the width of 16; .* work are 1, 2, 4"),
        ({"num_layers": 0}, "num_layers is 0; give at least 1"),
        ({"dropout_rate": 1.0}, r"dropout_rate is 1.0; give a rate in \[0, 1\)"),
        ({"image_shape": (16, 16)}, r"image_shape is \(16, 16\); give"),
        ({"num_register_tokens": -1}, "num_register_tokens is -1"),
        ({"approximate_gelu": "tanh"}, "approximate_gelu is 'tanh'; give False, True or \"sigmoid"),
        ({"position_interpolation": "area"}, "position_interpolation is 'area'; choose one of bi"),
        ({"use_swiglu_ffn": True, "approximate_gelu": True}, "use_swiglu_ffn leaves no GELU"),
        (
            {"use_class_token": False, "use_distillation_token": True},
            "use_distillation_token needs the class token",
        ),
        ({"depth": 3}, "ViTBackbone takes no depth; it takes image_shape, patch_size"),
    ],
)
def test_sizes_that_do_not_fit_together(fields, message):
    with pytest.raises(InputError, match=message):
        ViTBackbone(**{**TINY, **fields})


def test_a_head_that_does_not_fit():
    backbone = ViTBackbone(**TINY, use_class_token=False)
    with pytest.raises(InputError, match='pooling is "token" but the backbone has no class token'):
        ViTImageClassifier(backbone, 5)
    known = "token, gap, max, avgmax, token_gap, distilled, map"
    with pytest.raises(InputError, match=f"pooling is 'mean'; choose one of {known}"):
        ViTImageClassifier(backbone, 5, pooling="mean")
    with pytest.raises(InputError, match="num_classes is -1; give at least 0"):
        ViTImageClassifier(backbone, -1, pooling="gap")
    with pytest.raises(InputError, match='pooling is "token_gap" but the backbone has no class'):
        ViTImageClassifier(backbone, 5, pooling="token_gap")
    with pytest.raises(InputError, match='is "distilled" but the backbone has no distillation'):
        ViTImageClassifier(ViTBackbone(**TINY), 5, pooling="distilled")
    with pytest.raises(InputError, match="leave out intermediate_dim and pooled_norm"):
        distilled = ViTBackbone(**TINY, use_distillation_token=True)
        ViTImageClassifier(distilled, 5, pooling="distilled", pooled_norm=True)
