"""A ViT in other channels, sizes, heads and by other names, as timm's users change theirs."""

from importlib import import_module

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels.core.errors import InputError
from kmodels.models import (
    DeiTBackbone,
    DINOV2Backbone,
    SigLIPVisionEncoder,
    ViTBackbone,
    ViTConfig,
    ViTImageClassifier,
    ViTImageClassifierPreprocessor,
)
from kmodels.models.vit import channels
from kmodels.models.vit.weights import timm as weights_timm
from kmodels.weights.positions import resize_matrix
from tolerances import tolerance


def classifier(**settings):
    pooling = settings.pop("pooling", "token")
    return ViTImageClassifier.from_preset(
        "vit_debug", num_classes=3, pooling=pooling, preprocessor=None, **settings
    )


def pictures(*shape):
    return np.random.default_rng(0).random(shape or (2, 16, 16, 3), "float32")


def close(found, wanted, what="logits_across"):
    np.testing.assert_allclose(to_numpy(found), to_numpy(wanted), rtol=0, atol=tolerance(what))


# === Channels ===


def test_one_channel_gets_the_sum_over_all(tmp_path):
    model = classifier()
    model.preprocessor = ViTImageClassifierPreprocessor((16, 16), (0.1, 0.2, 0.3), (0.2, 0.2, 0.5))
    model.save_to_preset(tmp_path / "model")
    grey = ViTImageClassifier.from_preset(tmp_path / "model", image_shape=(16, 16, 1))
    x = pictures(2, 16, 16, 1)
    close(grey(x), model(np.repeat(x, 3, -1)))
    np.testing.assert_allclose(grey.preprocessor.mean, (0.2,))
    np.testing.assert_allclose(grey.preprocessor.std, (0.3,))


def test_more_channels_repeat_those_of_the_file_scaled(tmp_path):
    model = classifier()
    model.save_to_preset(tmp_path / "model")
    five = ViTImageClassifier.from_preset(tmp_path / "model", image_shape=(16, 16, 5))
    x = pictures(2, 16, 16, 5)
    # Channels 3 and 4 are the first two again; all count 3 / 5.
    folded = np.stack([x[..., 0] + x[..., 3], x[..., 1] + x[..., 4], x[..., 2]], -1) * 0.6
    close(five(x), model(folded.astype("float32")))


@pytest.mark.needs("timm")
@pytest.mark.parametrize("number", [1, 2, 4, 6])
def test_channels_are_those_of_timm(number):
    torch, manipulate = import_module("torch"), import_module("timm.models._manipulate")
    kernel = pictures(4, 4, 3, 8)
    conv = torch.from_numpy(kernel.transpose(3, 2, 0, 1).copy())
    wanted = manipulate.adapt_input_conv(number, conv).numpy().transpose(2, 3, 1, 0)
    close(channels.adapt(kernel, number), wanted)


# === Sizes ===


def test_a_resized_copy_is_what_a_preset_of_that_size_is(tmp_path):
    model = classifier()
    model.save_to_preset(tmp_path / "model")
    wanted = ViTImageClassifier.from_preset(tmp_path / "model", image_shape=(24, 32, 3))
    copy, backbone = model.resized((24, 32)), model.backbone.resized((24, 32))
    x = pictures(2, 24, 32, 3)
    close(copy(x), wanted(x))
    close(backbone(x), wanted.backbone(x))
    assert model.backbone.image_shape == (16, 16, 3)
    with pytest.raises(InputError, match="8 pixels does not divide the image side of 20"):
        model.resized((20, 32))


@pytest.mark.needs("timm")
@pytest.mark.parametrize(("size", "patch"), [((40, 24), None), ((40, 24), 4), ((48, 24), 12)])
def test_a_resized_copy_is_what_timm_makes_of_its_own(tmp_path, size, patch):
    torch, timm = import_module("torch"), import_module("timm")
    theirs = timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=1, num_classes=3
    ).eval()
    file = tmp_path / "vit_tiny_patch8_32.augreg.safetensors"
    import_module("safetensors.torch").save_file(theirs.state_dict(), file)
    ours = ViTImageClassifier.from_preset(file, num_heads=1).resized(size, patch)
    theirs.set_input_size(size, patch and (patch, patch))
    x = pictures(2, *size, 3)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(x.transpose(0, 3, 1, 2))).numpy()
        tokens = theirs.forward_features(torch.from_numpy(x.transpose(0, 3, 1, 2)))
        pooled = theirs.forward_head(tokens, pre_logits=True).numpy()
    close(ours(x), wanted, "logits")
    close(ours.backbone(x), tokens.numpy(), "hidden")
    close(ours.head(ours.backbone(x), pre_logits=True), pooled, "hidden")
    close(ours.head(ours.backbone(x)), wanted, "logits")


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
    close(channels.resample(kernel, side, method), wanted.numpy().transpose(2, 3, 1, 0))


def test_larger_patches_of_larger_pictures_give_the_same(tmp_path):
    model = classifier()
    model.save_to_preset(tmp_path / "model")
    twice = ViTImageClassifier.from_preset(
        tmp_path / "model", image_shape=(32, 32, 1), patch_size=16
    )
    matrix = resize_matrix(8, 16, "bicubic_antialias")
    patches = pictures(2, 2, 8, 2, 8)
    large = np.einsum("ai,briwj,cj->brawc", matrix, patches, matrix).astype("float32")
    grey = np.repeat(patches.reshape(2, 16, 16, 1), 3, -1)
    close(twice(large.reshape(2, 32, 32, 1)), model(grey))


def test_patches_are_given_as_one_number_or_two_equal_ones():
    assert ViTConfig(patch_size=(16, 16)).patch_size == 16
    with pytest.raises(InputError, match=r"patch_size is \(8, 16\); patches are square here"):
        ViTConfig(patch_size=(8, 16))


# === Heads ===


@pytest.mark.parametrize("pooling", ["token", "max", "token_gap", "map"])
def test_the_head_alone_makes_the_logits_of_the_tokens(pooling):
    model = classifier(pooling=pooling)
    x = pictures()
    tokens = model.backbone(x)
    close(model.head(tokens), model(x))
    close(model.head(tokens, pre_logits=True), model.feature_model("pooled_output")(x))


def test_the_head_of_a_distilled_model():
    backbone = DeiTBackbone((16, 16, 3), 8, 1, 2, 16, 32)
    model = ViTImageClassifier(backbone, 3, pooling="distilled")
    close(model.head(backbone(pictures())), model(pictures()))


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


# === compile ===


def test_a_classifier_is_compiled_as_keras_hub_compiles_it():
    model = classifier()
    logs = model.fit(pictures(), np.array([0, 2]), verbose=0).history
    assert set(logs) == {"loss", "sparse_categorical_accuracy"}
    assert isinstance(model.optimizer, keras.optimizers.Adam)
    np.testing.assert_allclose(float(model.optimizer.learning_rate), 5e-5, rtol=1e-6)
    with pytest.raises(ValueError, match="You must call `compile"):
        classifier(compile=False).fit(pictures(), np.array([0, 2]))


@pytest.mark.parametrize("activation", [None, "softmax"])
def test_the_default_loss_knows_whether_it_gets_logits(activation):
    model = classifier(activation=activation)
    logits = to_numpy(model(pictures())).astype("float64")
    if activation is None:
        logits = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    wanted = -np.log(logits[[0, 1], [0, 2]]).mean()
    found = model.evaluate(pictures(), np.array([0, 2]), verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(found, wanted, atol=tolerance("first_loss"))


def test_a_sigmoid_is_trained_on_several_labels_at_once():
    model = classifier(activation="sigmoid")
    labels = np.array([[1, 0, 1], [0, 0, 1]], "float32")
    share = to_numpy(model(pictures())).astype("float64")
    wanted = -(labels * np.log(share) + (1 - labels) * np.log(1 - share)).mean()
    found = model.evaluate(pictures(), labels, verbose=0, return_dict=True)
    np.testing.assert_allclose(found["loss"], wanted, atol=tolerance("first_loss"))
    assert "binary_accuracy" in found


def test_no_default_loss_is_made_up():
    model = classifier(activation="tanh")
    with pytest.raises(InputError, match="no loss is known for the activation 'tanh'"):
        model.compile()
    for chosen in (model, classifier()):  # the second has metrics from its default
        chosen.compile(loss="mse")
        assert chosen.evaluate(pictures(), np.zeros((2, 3)), verbose=0) > 0


def test_an_untrained_classifier_is_saved_and_read_without_a_word(tmp_path):
    model = classifier()
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")  # where a warning is an error
    assert not again.optimizer.built
    close(again(pictures()), model(pictures()))
    again.fit(pictures(), np.array([0, 2]), verbose=0)


# === Names ===


def test_presets_are_listed_on_the_classes():
    assert ViTBackbone.presets["vit_base_patch16_224"]["hidden_dim"] == 768
    assert set(ViTImageClassifier.presets) == set(ViTBackbone.presets)
    assert set(ViTImageClassifierPreprocessor.presets) == set(ViTBackbone.presets)
    assert all("dinov2" in name for name in DINOV2Backbone.presets)
    assert all("siglip" in name for name in SigLIPVisionEncoder.presets)
    assert all("distilled" in name for name in DeiTBackbone.presets)
    assert "dinov2_small_patch14_518" in DINOV2Backbone.presets and SigLIPVisionEncoder.presets


def test_fields_are_attributes_and_pictures_may_have_a_name():
    backbone = ViTBackbone.from_preset("vit_debug")
    assert (backbone.hidden_dim, backbone.patch_size, backbone.num_layers) == (16, 8, 2)
    close(backbone({"images": pictures()}), backbone(pictures()))
    with pytest.raises(InputError, match="data_format is 'channels_first'"):
        ViTBackbone(data_format="channels_first")


# === How timm normalises ===


@pytest.mark.parametrize(
    "name, mean",
    [
        ("vit_base_patch16_siglip_224.webli", (0.5, 0.5, 0.5)),
        ("deit3_small_patch16_224", (0.485, 0.456, 0.406)),
        ("vit_base_patch16_clip_224.openai", (0.48145466, 0.4578275, 0.40821073)),
        ("vit_base_patch16_224", None),
        ("mine", None),
    ],
)
def test_a_bare_file_is_normalised_by_its_name_or_not_at_all(name, mean):
    found = weights_timm.statistics_of(name, {}, 3)
    assert (found and found[0]) == mean
    assert weights_timm.statistics_of(name, {}, 1) is None
    told = {"pretrained_cfg": {"mean": [0.1] * 3, "std": [0.2] * 3}}
    assert weights_timm.statistics_of(name, told, 3) == ((0.1,) * 3, (0.2,) * 3)


@pytest.mark.needs("timm")
def test_names_are_normalised_as_timm_normalises_them():
    timm = import_module("timm")
    known = 0
    for name in timm.list_pretrained():
        if name.startswith(("vit_", "deit")) and (found := weights_timm.statistics_of(name, {}, 3)):
            told = timm.get_pretrained_cfg(name)
            assert found == (tuple(told.mean), tuple(told.std)), name
            known += 1
        bare = name.partition(".")[0]
        if name.startswith(("vit_", "deit")) and (found := weights_timm.statistics_of(bare, {}, 3)):
            told = timm.get_pretrained_cfg(name)
            assert found == (tuple(told.mean), tuple(told.std)), name
    assert known > 60
