"""The ViT itself: sizes, variants, seeds, and what timm's and Keras' users change of theirs."""

from importlib import import_module

import keras
import numpy as np
import pytest

from arrays import to_numpy
from family_table import row_of, run
from gradients import value_and_grad
from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.models import (
    DeiTBackbone,
    DINOV2Backbone,
    DINOV3Backbone,
    SigLIPVisionEncoder,
    ViTBackbone,
    ViTConfig,
    ViTImageClassifier,
    ViTImageClassifierPreprocessor,
)
from kmodels.models.vit.presets import PRESETS
from kmodels.models.vit.weights import resizing
from kmodels.weights.positions import resize_matrix
from refusals import refused
from tolerances import tolerance

TINY = {
    "image_shape": (16, 24, 3), "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16,
    "mlp_dim": 32,
}  # fmt: skip
# Logits of the first image after seed 11, the same on each backend.
GOLDEN_LOGITS = [-0.10895590, -0.09822464, -0.09796409, 0.00051133, -0.04171935]
IMAGES = np.random.default_rng(0).normal(size=(2, 16, 24, 3)).astype("float32")
LABELS = np.array([0, 2])


def classifier(**settings):
    pooling = settings.pop("pooling", "token")
    return ViTImageClassifier.from_preset(
        "vit_debug", num_classes=3, pooling=pooling, preprocessor=None, **settings
    )


def pictures(*shape):
    return np.random.default_rng(0).random(shape or (2, 16, 16, 3), "float32")


def close(found, wanted, what="logits_across"):
    np.testing.assert_allclose(to_numpy(found), to_numpy(wanted), rtol=0, atol=tolerance(what))


def fields_of(preset):
    return {k: v for k, v in PRESETS[preset].items() if not k.startswith("task_")}


@pytest.fixture(scope="module")
def model():
    return ViTImageClassifier(ViTBackbone(**TINY), 5)


# === Presets ===


def test_tutorial_preset_has_the_layers_of_the_tutorial():
    preset = PRESETS["vit_keras_tutorial_base_patch16_224"]
    assert (preset["task_pooling"], preset["task_dropout"]) == ("gap", 0.5)
    config = ViTConfig(**fields_of("vit_keras_tutorial_base_patch16_224"))
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


def test_presets_are_valid_and_listed_on_the_classes():
    for name in PRESETS:
        ViTConfig(**fields_of(name))
    assert ViTBackbone(**fields_of("vit_debug")).count_params() < 100_000
    for size in ("tiny", "small", "base", "large", "huge"):
        for patch in (14, 16, 32):
            assert f"vit_{size}_patch{patch}_224" in PRESETS
    assert ViTBackbone.presets["vit_base_patch16_224"]["hidden_dim"] == 768
    for kind in (ViTImageClassifier, ViTImageClassifierPreprocessor):
        assert set(kind.presets) == set(ViTBackbone.presets)
    for kind, part, name in (
        (DINOV2Backbone, "dinov2", "dinov2_small_patch14_518"),
        (SigLIPVisionEncoder, "siglip", "siglip_so400m_patch14_384"),
        (DeiTBackbone, "distilled", "deit_small_distilled_patch16_224"),
    ):
        assert name in kind.presets and all(part in preset for preset in kind.presets)


# === Variants ===


VARIANTS = [
    (
        {
            "num_register_tokens": 3, "position_over_prefix": False, "layer_scale": 0.1,
            "qk_norm": True, "pre_norm": True, "use_mha_bias": False, "use_mlp_bias": False,
            "use_patch_bias": False, "approximate_gelu": "sigmoid",
        },
        {"pooling": "map", "head_bias": False}, 10,
    ),
    (
        {"use_class_token": False, "final_norm": False},
        {"pooling": "gap", "pooled_norm": True}, 6,
    ),
    ({"use_distillation_token": True}, {"pooling": "distilled"}, 8),
    (
        {"use_swiglu_ffn": True, "use_mask_token": True},
        {"pooling": "token_gap", "intermediate_dim": 4, "activation": "softmax"}, 7,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "head", "tokens"), VARIANTS)
def test_variant_runs_and_its_config_makes_it_again(fields, head, tokens):
    model = ViTImageClassifier(ViTBackbone(**TINY, **fields), 5, **head)
    assert tuple(model.backbone(IMAGES).shape) == (2, tokens, 16)
    logits = to_numpy(model(IMAGES))
    assert logits.shape == (2, 5) and np.ptp(logits[0] - logits[1]) > 0
    if head.get("activation") == "softmax":
        np.testing.assert_allclose(logits.sum(-1), 1, atol=1e-5)
    again = ViTImageClassifier.from_config(model.get_config())
    again.set_weights(model.get_weights())
    assert [v.path for v in again.variables] == [v.path for v in model.variables]
    np.testing.assert_allclose(to_numpy(again(IMAGES)), logits, atol=1e-6)


def test_intermediates_come_in_the_order_of_computation(model):
    found = model.backbone.intermediates(IMAGES)
    names = ["patch_embedding", "tokens", "block_0", "block_1", "final_norm"]
    assert list(found) == names
    features = model.backbone.feature_model([*names[:-1], "sequence_output"])(IMAGES)
    for name, ours in found.items():
        wanted = features["sequence_output" if name == "final_norm" else name]
        np.testing.assert_allclose(to_numpy(ours), to_numpy(wanted), atol=1e-6)
    np.testing.assert_allclose(
        to_numpy(found["final_norm"]), to_numpy(model.backbone(IMAGES)), atol=1e-6
    )


@pytest.mark.parametrize("kept", [1, 4])
@pytest.mark.parametrize("more", [{}, {"num_register_tokens": 3, "layer_scale": 0.1}])
def test_the_first_tokens_alone_have_the_values_and_gradients_that_they_have_among_all(kept, more):
    backbone = ViTBackbone(**{**TINY, "final_norm": kept > 1, **more})
    whole, of_whole = value_and_grad(lambda x: backbone(x)[:, :kept], IMAGES, compiled=True)
    alone, of_alone = value_and_grad(lambda x: backbone(x, keep=kept), IMAGES, compiled=True)
    assert alone.shape == (2, kept, 16)
    close(alone, whole, "hidden")
    largest = np.abs(of_whole[0]).max()
    assert largest > 1e-2
    np.testing.assert_allclose(of_alone[0], of_whole[0], atol=tolerance("hidden") * largest)


def test_the_last_block_of_a_classifier_by_the_class_token_makes_that_token_alone(monkeypatch):
    classifier = ViTImageClassifier(ViTBackbone(**TINY), 5)
    lengths = []
    for block in classifier.backbone.blocks:
        call = block.mlp.call
        spy = lambda x, call=call, **kw: lengths.append(x.shape[1]) or call(x, **kw)  # noqa: E731
        monkeypatch.setattr(block.mlp, "call", spy)
    logits = classifier(IMAGES)
    assert lengths == [7, 1]
    close(logits, classifier.get_layer("logits")(classifier.backbone(IMAGES)[:, 0]), "logits")


@pytest.mark.each_backend
def test_one_seed_gives_the_same_model_on_each_backend():
    keras.utils.set_random_seed(11)
    logits = to_numpy(ViTImageClassifier(ViTBackbone(**TINY), 5)(IMAGES))
    keras.utils.set_random_seed(12)
    other = to_numpy(ViTImageClassifier(ViTBackbone(**TINY), 5)(IMAGES))
    assert np.abs(logits - other).max() > 1e-2
    np.testing.assert_allclose(logits[0], GOLDEN_LOGITS, atol=1e-5)


@pytest.mark.each_backend
def test_drop_path_grows_with_depth_and_dropout_acts_in_training_only():
    rates = {"drop_path_rate": 0.2, "dropout_rate": 0.1, "attention_dropout": 0.1}
    backbone = ViTBackbone(**{**TINY, "num_layers": 3}, **rates)
    assert [round(b.drop_path.rate, 6) for b in backbone.blocks] == [0.0, 0.1, 0.2]
    np.testing.assert_array_equal(*(to_numpy(backbone(IMAGES)) for _ in range(2)))
    one, other = (to_numpy(backbone(IMAGES, training=True)) for _ in range(2))
    assert np.abs(one - other).max() > 1e-2


# === What is refused ===


NO_CLASS = {"use_class_token": False}
TURNING = {
    **TINY, "num_register_tokens": 2, "use_position_embedding": False, "rope_theta": 100.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patch_size": 7}, "does not divide the image side of 16; the nearest .* are 14 and 21"),
        ({"patch_size": 32}, "the nearest sides that work are 32 and 64"),
        ({"patch_size": (8, 16)}, r"patch_size is \(8, 16\); patches are square here"),
        ({"num_heads": 3}, "3 heads do not divide the width of 16; .* work are 1, 2, 4"),
        ({"num_layers": 0}, "num_layers is 0; give at least 1"),
        ({"dropout_rate": 1.0}, r"dropout_rate is 1.0; give a rate in \[0, 1\)"),
        ({"image_shape": (16, 16)}, r"image_shape is \(16, 16\); give"),
        ({"num_register_tokens": -1}, "num_register_tokens is -1"),
        ({"approximate_gelu": "tanh"}, "approximate_gelu is 'tanh'; give False, True or \"sigmoid"),
        ({"position_interpolation": "area"}, "position_interpolation is 'area'; give 'bi"),
        ({"use_swiglu_ffn": True, "approximate_gelu": True}, "use_swiglu_ffn leaves no GELU"),
        (
            {**NO_CLASS, "use_distillation_token": True},
            "use_distillation_token needs the class token",
        ),
        ({"depth": 3}, "ViTBackbone takes no depth; it takes image_shape, patch_size"),
        ({"data_format": "channels_first"}, "data_format is 'channels_first'"),
        ({"patch_drop_rate": 1.0}, r"patch_drop_rate is 1.0; give a rate in \[0, 1\)"),
        ({"token_merging": -1}, "token_merging is -1; give at least 0"),
        ({**TURNING, "rope_type": "mixed"}, "rope_type is 'mixed'; choose one of dinov3, cat"),
        ({**TURNING, "rope_theta": -1.0}, "rope_theta is -1.0; give a number above 0, or None"),
        ({**TURNING, "num_heads": 8}, "multiple of 4; hidden_dim 16 and num_heads 8 give 2"),
        ({**TURNING, "pos_embed_jitter": 0.5}, "pos_embed_jitter is 0.5; give 1 or more, or None"),
        ({**TURNING, "pos_embed_shift": -0.1}, "pos_embed_shift is -0.1; give 0 or more, or None"),
        (
            {**TURNING, "rope_theta": None, "pos_embed_rescale": 2.0},
            "pos_embed_rescale without a rotary embedding; give rope_theta",
        ),
        (
            {**TURNING, "ref_feat_shape": (0, 4)},
            r"ref_feat_shape is \(0, 4\); give \(rows, columns\)",
        ),
        ({**TURNING, "pooling_num_heads": 3}, "3 heads do not divide the width of 16"),
        (
            {"hidden_activation": "relu", "kind": DINOV3Backbone},
            "'relu' with use_gated_mlp=False; choose one of gelu",
        ),
        (
            {"use_gated_mlp": True, "kind": DINOV3Backbone},
            "'gelu' with use_gated_mlp=True; choose one of silu",
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_together(fields, message):
    fields = {**TINY, "kind": ViTBackbone, **fields}
    refused(message, fields.pop("kind"), **fields)


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        (NO_CLASS, {}, 'pooling is "token" but the backbone has no class token'),
        (
            *(NO_CLASS, {"pooling": "mean"}),
            "pooling is 'mean'; choose one of token, gap, max, avgmax, token_gap, distilled, map",
        ),
        (NO_CLASS, {"num_classes": -1, "pooling": "gap"}, "num_classes is -1; give at least 0"),
        (
            NO_CLASS,
            {"pooling": "token_gap"},
            'pooling is "token_gap" but the backbone has no class',
        ),
        ({}, {"pooling": "distilled"}, 'is "distilled" but the backbone has no distillation'),
        (
            {"use_distillation_token": True},
            {"pooling": "distilled", "pooled_norm": True},
            "leave out intermediate_dim and pooled_norm",
        ),
    ],
)
def test_a_head_that_does_not_fit(fields, settings, message):
    with pytest.raises(InputError, match=message):
        ViTImageClassifier(ViTBackbone(**TINY, **fields), **{"num_classes": 5, **settings})


# === Channels and patches ===


def test_one_channel_gets_the_sum_over_all_and_more_repeat_them_scaled(tmp_path):
    model = classifier()
    model.preprocessor = ViTImageClassifierPreprocessor((16, 16), (0.1, 0.2, 0.3), (0.2, 0.2, 0.5))
    model.save_to_preset(tmp_path / "model")
    grey = ViTImageClassifier.from_preset(tmp_path / "model", image_shape=(16, 16, 1))
    x = pictures(2, 16, 16, 1)
    close(grey(x), model(np.repeat(x, 3, -1)))
    np.testing.assert_allclose(grey.preprocessor.mean, (0.2,))
    np.testing.assert_allclose(grey.preprocessor.std, (0.3,))
    five = ViTImageClassifier.from_preset(
        tmp_path / "model", image_shape=(16, 16, 5), preprocessor=None
    )
    x = pictures(2, 16, 16, 5)
    # Channels 3 and 4 are the first two again; all count 3 / 5.
    folded = np.stack([x[..., 0] + x[..., 3], x[..., 1] + x[..., 4], x[..., 2]], -1) * 0.6
    close(five(x), model(folded.astype("float32")))
    twice = ViTImageClassifier.from_preset(
        tmp_path / "model", image_shape=(32, 32, 1), patch_size=16
    )
    matrix = resize_matrix(8, 16, "bicubic_antialias")
    patches = pictures(2, 2, 8, 2, 8)
    large = np.einsum("ai,briwj,cj->brawc", matrix, patches, matrix).astype("float32")
    small = np.repeat(patches.reshape(2, 16, 16, 1), 3, -1)
    close(twice(large.reshape(2, 32, 32, 1)), model(small))


@pytest.mark.needs("timm")
@pytest.mark.parametrize("number", [1, 2, 4, 6])
def test_channels_are_those_of_timm(number):
    torch, manipulate = import_module("torch"), import_module("timm.models._manipulate")
    kernel = pictures(4, 4, 3, 8)
    conv = torch.from_numpy(kernel.transpose(3, 2, 0, 1).copy())
    wanted = manipulate.adapt_input_conv(number, conv).numpy().transpose(2, 3, 1, 0)
    close(resizing.adapt(kernel, number), wanted)


@pytest.mark.needs("timm")
@pytest.mark.parametrize(("method", "smooth"), [("bicubic_antialias", True), ("bilinear", False)])
@pytest.mark.parametrize("side", [8, 18, 32])
def test_kernels_of_other_patches_are_those_of_timm(side, method, smooth):
    torch, layers = import_module("torch"), import_module("timm.layers")
    kernel = pictures(16, 16, 2, 3)
    conv = torch.from_numpy(kernel.transpose(3, 2, 0, 1).copy())
    wanted = layers.resample_patch_embed(
        conv, (side, side), interpolation=method.split("_")[0], antialias=smooth
    )
    close(resizing.resample(kernel, side, method), wanted.numpy().transpose(2, 3, 1, 0))


# === Sizes ===


def test_a_resized_copy_is_what_a_preset_of_that_size_is(references, tmp_path):
    model = classifier()
    model.save_to_preset(tmp_path / "model")
    wanted = ViTImageClassifier.from_preset(tmp_path / "model", image_shape=(24, 32, 3))
    copy, backbone = model.resized((24, 32)), model.backbone.resized((24, 32))
    x = pictures(2, 24, 32, 3)
    close(copy(x), wanted(x))
    close(backbone(x), wanted.backbone(x))
    assert model.backbone.image_shape == (16, 16, 3)
    refused("8 pixels does not divide the image side of 20", model.resized, (20, 32))
    row = row_of("vit_recent/dinov3", references)
    x = row.expected["resized_images"]
    resized = row.model.backbone.resized(x.shape[1:3])
    close(run(resized, x), row.expected["resized_final"], "hidden")


@pytest.mark.needs("timm")
@pytest.mark.parametrize(("size", "patch"), [((40, 24), None), ((40, 24), 4), ((48, 24), 12)])
def test_a_resized_copy_is_what_timm_makes_of_its_own(tmp_path, size, patch):
    torch, timm = import_module("torch"), import_module("timm")
    theirs = timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=1, num_classes=3
    ).eval()
    file = tmp_path / "vit_tiny_patch16_224.augreg_in21k.safetensors"
    import_module("safetensors.torch").save_file(theirs.state_dict(), file)
    ours = ViTImageClassifier.from_preset(file, num_heads=1).resized(size, patch)
    theirs.set_input_size(size, patch and (patch, patch))
    x = pictures(2, *size, 3)
    with torch.no_grad():
        given = torch.from_numpy(x.transpose(0, 3, 1, 2))
        wanted, tokens = theirs(given).numpy(), theirs.forward_features(given)
        pooled = theirs.forward_head(tokens, pre_logits=True).numpy()
    close(ours(x), wanted, "logits")
    close(ours.backbone(x), tokens.numpy(), "hidden")
    close(ours.head(ours.backbone(x), pre_logits=True), pooled, "hidden")
    close(ours.head(ours.backbone(x)), wanted, "logits")


# === Heads ===


def test_the_head_alone_makes_the_logits_of_the_tokens():
    backbone = DeiTBackbone((16, 16, 3), 8, 1, 2, 16, 32)
    distilled = ViTImageClassifier(backbone, 3, pooling="distilled")
    poolings = ("token", "max", "token_gap", "map")
    for model in (distilled, *(classifier(pooling=pooling) for pooling in poolings)):
        tokens = model.backbone(pictures())
        close(model.head(tokens), model(pictures()))
        if model is not distilled:
            pooled = model.feature_model("pooled_output")(pictures())
            close(model.head(tokens, pre_logits=True), pooled)


def test_another_head_over_the_same_backbone():
    model = classifier()
    other = model.with_head(5, "avg")
    assert other.backbone is model.backbone and other.pooling == "gap"
    assert tuple(other(pictures()).shape) == (2, 5)
    without = model.with_head(0)
    assert without.output_dense is None
    close(without(pictures()), model.head(model.backbone(pictures()), pre_logits=True))
    with pytest.raises(InputError, match=r"pooling is 'prr'; choose one of .*avg; tokens that are"):
        model.with_head(2, pooling="prr")


@pytest.mark.needs("timm")
@pytest.mark.parametrize("pooling", ["max", "avgmax"])
def test_the_maximum_over_the_patches_is_that_of_timm(tmp_path, pooling):
    torch, timm = import_module("torch"), import_module("timm")
    model = classifier(pooling=pooling)
    model.export_to_timm(tmp_path / "model")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    again = ViTImageClassifier.from_preset(tmp_path / "model", preprocessor=None)
    assert theirs.global_pool == again.pooling == pooling
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(pictures().transpose(0, 3, 1, 2))).numpy()
    close(model(pictures()), wanted, "logits")
    close(again(pictures()), wanted, "logits")


def test_fields_are_attributes_and_pictures_may_have_a_name():
    backbone = ViTBackbone.from_preset("vit_debug")
    assert (backbone.hidden_dim, backbone.patch_size, backbone.num_layers) == (16, 8, 2)
    close(backbone({"images": pictures()}), backbone(pictures()))
    assert ViTConfig(patch_size=(16, 16)).patch_size == 16


# === compile ===


def test_a_classifier_is_compiled_as_keras_hub_compiles_it(tmp_path):
    model = classifier()
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")  # where a warning is an error
    assert not again.optimizer.built
    close(again(pictures()), model(pictures()))
    again.fit(pictures(), LABELS, verbose=0)
    logs = model.fit(pictures(), LABELS, verbose=0).history
    assert set(logs) == {"loss", "sparse_categorical_accuracy"}
    assert isinstance(model.optimizer, keras.optimizers.Adam)
    np.testing.assert_allclose(float(model.optimizer.learning_rate), 5e-5, rtol=1e-6)
    with pytest.raises(ValueError, match="You must call `compile"):
        classifier(compile=False).fit(pictures(), LABELS)


@pytest.mark.parametrize("activation", [None, "softmax", "sigmoid"])
def test_the_default_loss_is_that_of_the_activation(activation):
    """Of one class, which may come as logits, or of several labels at once."""
    model, labels = classifier(activation=activation), LABELS
    shares = to_numpy(model(pictures())).astype("float64")
    if activation is None:
        shares = np.exp(shares) / np.exp(shares).sum(-1, keepdims=True)
    wanted = -np.log(shares[[0, 1], labels]).mean()
    if activation == "sigmoid":
        labels = np.array([[1, 0, 1], [0, 0, 1]], "float32")
        wanted = -(labels * np.log(shares) + (1 - labels) * np.log(1 - shares)).mean()
    found = model.evaluate(pictures(), labels, verbose=0, return_dict=True)
    np.testing.assert_allclose(found["loss"], wanted, atol=tolerance("first_loss"))
    assert ("binary_accuracy" in found) == (activation == "sigmoid")


def test_no_default_loss_is_made_up():
    model = classifier(activation="tanh")
    refused("no loss is known for the activation 'tanh'", model.compile)
    for chosen in (model, classifier()):  # the second has metrics from its default
        chosen.compile(loss="mse")
        assert chosen.evaluate(pictures(), np.zeros((2, 3)), verbose=0) > 0
