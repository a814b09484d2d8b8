"""Images of any aspect ratio as rows of patches, beside transformers' SigLIP 2 and timm."""

from importlib import import_module
from typing import get_args

import keras
import numpy as np
import pytest

from arrays import read_npz, to_numpy
from family_table import row_of
from kmodels.core.errors import InputError
from kmodels.data.images.naflex import grid_of, patches_of
from kmodels.models import (
    ImageTextPreprocessor,
    ImageTextSimilarity,
    NaFlexViTBackbone,
    NaFlexViTImageClassifier,
    NaFlexViTImageClassifierPreprocessor,
    SigLIPBackbone,
    SigLIPNaFlexVisionEncoder,
    SigLIPVisionEncoder,
    ViTBackbone,
)
from kmodels.models.vit.naflex.layers import resize_weights
from kmodels.weights import read_safetensors
from kmodels.weights.positions import Method, resize_matrix
from public_models import random
from refusals import refused
from tolerances import tolerance

LIMIT = tolerance("logits")
SIZES = ("24", "60")
SIGLIP = {"approximate_gelu": True, "position_interpolation": "bilinear_antialias"}
SMALL = {"patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
GRIDS = [(2, 7), (5, 3), (1, 2), (4, 4)]


@pytest.fixture
def case(references):
    return row_of("naflex", references)


def near(found, expected, limit=LIMIT):
    np.testing.assert_allclose(to_numpy(found), to_numpy(expected), rtol=0, atol=limit)


# === Beside transformers ===


@pytest.mark.parametrize("size", SIZES)
def test_grids_and_masks_decide_which_patches_are_seen(case, size):
    given, embeds = case.patches(size), case.expected[f"{size}_embeds"]
    tower = case.model.backbone.vision_encoder
    # The mask follows from the grids, and grids of the same number of patches differ.
    without = {name: x for name, x in given.items() if name != "pixel_attention_mask"}
    near(tower.predict(without, verbose=0), embeds)
    turned = {**given, "spatial_shapes": given["spatial_shapes"][:, ::-1]}
    assert np.abs(tower.predict(turned, verbose=0) - embeds).max() > 100 * LIMIT
    mask, values = (given[name].copy() for name in ("pixel_attention_mask", "pixel_values"))
    mask[:, 3] = 0
    found = tower.predict({**given, "pixel_attention_mask": mask}, verbose=0)
    values[:, 3] = 9.0
    changed = {**given, "pixel_attention_mask": mask, "pixel_values": values}
    near(tower.predict(changed, verbose=0), found, 1e-6)
    assert np.abs(found - embeds).max() > 100 * LIMIT


def test_directories_both_ways(case, tmp_path):
    case.model.export_to_transformers(tmp_path / "out")
    count = sum(int(np.prod(x.shape)) for x in read_safetensors(case.path).values())
    assert count == case.model.backbone.count_params()
    again = ImageTextSimilarity.from_preset(tmp_path / "out")
    assert again.backbone.naflex
    prepared = {"images": case.pictures, "text": ["a", "b", "c", "d"]}
    case.model.save_to_preset(tmp_path / "own")
    own = ImageTextSimilarity.from_preset(tmp_path / "own")
    for other in (again, own, None):
        made = ImageTextPreprocessor.from_preset(case.path) if other is None else other.preprocessor
        for name, x in case.model.preprocessor(prepared)[0].items():
            np.testing.assert_array_equal(made(prepared)[0][name], x)
    given = {**case.patches("24"), "token_ids": case.expected["token_ids"].astype("int32")}
    np.testing.assert_array_equal(to_numpy(own(given)), to_numpy(case.model(given)))
    source = case.path.parent / "classes"
    classes = NaFlexViTImageClassifier.from_preset(source)
    assert (classes.pooling, classes.num_classes) == ("gap", 3)
    classes.export_to_transformers(tmp_path / "classes")
    written = read_safetensors(tmp_path / "classes")
    for name, x in read_safetensors(source).items():
        # transformers keeps an attention pooling that its classifier does not call.
        if not name.startswith("vision_model.head."):
            np.testing.assert_array_equal(written[name].read(), x.read())


def test_square_images_of_one_size_from_the_same_directory(case, tmp_path):
    """A checkpoint of a fixed size is read without a change, and written as one."""
    square = SigLIPBackbone.from_preset(case.path, naflex=False)
    assert type(square.vision_encoder) is SigLIPVisionEncoder
    assert isinstance(ViTBackbone.from_preset(case.path), ViTBackbone)
    fixed = ViTBackbone((12, 20, 3), **SMALL, use_class_token=False)
    fixed.save_to_preset(tmp_path / "fixed")
    free = NaFlexViTBackbone.from_preset(tmp_path / "fixed")
    assert [w.path for w in free.weights] == [w.path for w in fixed.weights]
    for rows, columns, tower, whole in (
        (5, 5, case.model.backbone.vision_encoder, square.get_vision_embeddings),
        (3, 5, free, fixed),
    ):
        shape = (2, 4 * rows, 4 * columns, 3)
        images = np.random.default_rng(1).normal(size=shape).astype("float32")
        given = {"pixel_values": np.stack([patches_of(x, 4) for x in images])}
        given["spatial_shapes"] = np.array([[rows, columns]] * 2)
        near(tower(given), whole(images), 1e-6)


# === The processor ===


def test_patches_are_the_processors(case):
    made = NaFlexViTImageClassifierPreprocessor.from_preset(case.path)
    assert made.max_num_patches == 24 and made.patch_size == 4
    for size in SIZES:
        made = NaFlexViTImageClassifierPreprocessor(4, int(size))
        for name, x in case.patches(size).items():
            np.testing.assert_array_equal(made(case.pictures)[name], x)
    alone, labels = made(case.pictures[0], np.array(3))
    assert alone["pixel_values"].shape == (60, 48) and labels == 3
    again = NaFlexViTImageClassifierPreprocessor.from_config(made.get_config())
    np.testing.assert_array_equal(
        again(case.pictures[:1])["pixel_values"][0], alone["pixel_values"]
    )


def test_grids_are_transformers(references):
    held = read_npz(references / "naflex" / "grids.npz")
    for (height, width), budget, grid in zip(
        held["sides"], held["budgets"], held["grids"], strict=True
    ):
        found = grid_of(int(height), int(width), 16, int(budget))
        # transformers gives more patches than it was asked for where one side is too long for it.
        assert found == tuple(grid) or np.prod(grid) > budget
        assert np.prod(found) <= budget
    assert grid_of(30, 50, 16, 256, enlarge=False) == (2, 4)
    assert grid_of(300, 500, 16, 256, enlarge=False) == grid_of(300, 500, 16, 256)
    refused("max_num_patches is 0", grid_of, 3, 3, 16, 0)


@pytest.mark.parametrize("method", get_args(Method))
def test_positions_are_resized_as_with_numpy(method):
    for old, new in ((5, 9), (5, 2), (5, 5), (16, 3), (4, 1)):
        place = np.arange(new, dtype="float32")
        found = resize_weights(
            keras.ops.convert_to_tensor(place),
            keras.ops.convert_to_tensor(np.full(new, new, "float32")),
            old,
            method,
        )
        near(found, resize_matrix(old, new, method), 2e-6)


# === Rows with several images ===


@pytest.fixture(scope="module")
def packed():
    """A row of four images, and padding behind them."""
    values = np.random.default_rng(2).normal(size=(1, 50, 48)).astype("float32")
    return {"pixel_values": values, "spatial_shapes": np.array([[*GRIDS, (0, 0)]])}


def alone_of(packed):
    """The same images, each in a row of its own of 20 patches."""
    values, at = np.zeros((4, 20, 48), "float32"), 0
    for i, (rows, columns) in enumerate(GRIDS):
        count = rows * columns
        values[i, :count] = packed["pixel_values"][0, at : at + count]
        at += count
    return {"pixel_values": values, "spatial_shapes": np.array(GRIDS)}


@pytest.mark.each_time("gap", on=("jax", "tensorflow"))
@pytest.mark.each_backend
@pytest.mark.parametrize("pooling", ["gap", "map"])
def test_an_image_in_a_row_gives_what_it_gives_alone(packed, pooling, backend):
    keras.utils.set_random_seed(1)
    backbone = NaFlexViTBackbone((20, 20, 3), **SMALL, position_interpolation="bicubic_antialias")
    model = random(NaFlexViTImageClassifier(backbone, 3, pooling=pooling), 3)
    one = alone_of(packed)
    rows = {**one, "spatial_shapes": one["spatial_shapes"][:, None]}
    found, alone = (model.predict(x, verbose=0) for x in (packed, rows))
    assert found.shape == (1, 5, 3) and alone.shape == (4, 1, 3)
    near(found[0, :4], alone[:, 0])
    near(model.predict(one, verbose=0), alone[:, 0], 1e-6)
    if backend == "tensorflow":
        import tensorflow as tf

        compiled = tf.function(model, reduce_retracing=True, autograph=False)
        compiled(rows)
        refused("with and without an axis for the images of a row", compiled, one)
    # Another image, and what stands in the padding, change nothing of the first.
    other = {**packed, "pixel_values": packed["pixel_values"].copy()}
    other["pixel_values"][0, 14:] = 5.0
    changed = model.predict(other, verbose=0)
    near(changed[0, 0], found[0, 0], 1e-6)
    assert np.abs(changed[0, 1:4] - found[0, 1:4]).max() > 100 * LIMIT


def test_one_step_on_a_row_is_one_step_on_its_images(packed):
    """Losses and gradients agree: places without an image count nothing."""
    backbone = NaFlexViTBackbone((20, 20, 3), **SMALL)
    model = NaFlexViTImageClassifier(backbone, 3)
    weights = model.get_weights()
    kept = []
    for given, labels, weight in (
        (packed, np.array([[0, 1, 2, 1, 0]]), np.array([[1.25, 1.25, 1.25, 1.25, 0.0]])),
        (alone_of(packed), np.array([0, 1, 2, 1]), None),
    ):
        model.set_weights(weights)
        model.compile(keras.optimizers.SGD(0.1), weighted_metrics=["accuracy"], loss=LOSS)
        loss = model.train_on_batch(given, labels, sample_weight=weight)
        kept.append((loss, model.get_weights()))
    np.testing.assert_allclose(kept[0][0][0], kept[1][0][0], rtol=0, atol=tolerance("losses"))
    for one, other in zip(kept[0][1], kept[1][1], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance("losses"))


# === Peers read what is written, and are read ===


PEER_GRIDS = np.array([*GRIDS, (5, 5)])
LENGTH = 26


def patches():
    """Images of several grids in a row each, with something in the padding."""
    rng = np.random.default_rng(3)
    places = np.arange(LENGTH) < PEER_GRIDS.prod(-1, keepdims=True)
    values = rng.normal(size=(len(PEER_GRIDS), LENGTH, 48)).astype("float32")
    return {
        "pixel_values": values,
        "pixel_attention_mask": places.astype("int32"),
        "spatial_shapes": PEER_GRIDS,
    }


@pytest.fixture
def torch():
    return import_module("torch")


@pytest.fixture
def transformers():
    import_module("torchvision_cpu").define_torchvision_operators()
    return import_module("transformers")


def said(torch, model, given):
    with torch.no_grad():
        return model(**{name: torch.from_numpy(np.asarray(x)) for name, x in given.items()})


@pytest.mark.needs("transformers")
def test_transformers_loads_a_tower(torch, transformers, tmp_path):
    given = patches()
    tower = random(SigLIPNaFlexVisionEncoder(4, 16, 2, 2, 40, image_shape=(20, 20, 3)))
    tower.export_to_transformers(tmp_path / "tower")
    theirs, info = transformers.Siglip2VisionModel.from_pretrained(
        tmp_path / "tower", output_loading_info=True
    )
    assert not any(info.values()), info
    found = said(torch, theirs.eval(), given)
    near(tower.predict(given, verbose=0), found.pooler_output)
    tokens, seen = tower.intermediates(given)["final_norm"], given["pixel_attention_mask"] > 0
    near(to_numpy(tokens)[seen], found.last_hidden_state.numpy()[seen])
    # A backbone has no pooling, and is read without one.
    backbone = random(NaFlexViTBackbone((20, 20, 3), **SMALL, **SIGLIP))
    backbone.export_to_transformers(tmp_path / "backbone")
    theirs = transformers.Siglip2VisionModel.from_pretrained(tmp_path / "backbone").eval()
    found = said(torch, theirs, given).last_hidden_state.numpy()
    near(to_numpy(backbone(given))[seen], found[seen])


@pytest.mark.needs("transformers")
def test_transformers_loads_a_classifier_with_its_processor(torch, transformers, tmp_path):
    preprocessor = NaFlexViTImageClassifierPreprocessor(4, LENGTH)
    backbone = NaFlexViTBackbone((20, 20, 3), **SMALL, **SIGLIP)
    model = random(NaFlexViTImageClassifier(backbone, 3, preprocessor))
    model.export_to_transformers(tmp_path / "model")
    theirs = transformers.Siglip2ForImageClassification.from_pretrained(tmp_path / "model").eval()
    processor = transformers.Siglip2ImageProcessorPil.from_pretrained(tmp_path / "model")
    rng = np.random.default_rng(4)
    pictures = [rng.integers(0, 256, (*size, 3), "uint8") for size in ((21, 37), (50, 9), (16, 16))]
    given = processor(pictures, return_tensors="np")
    for name, x in model.preprocessor(pictures).items():
        np.testing.assert_array_equal(given[name], x)
    near(model.predict(pictures, verbose=0), said(torch, theirs, given).logits)
    # A processor that does not resize takes images of whole patches that fit into a row.
    processor.do_resize = False
    processor.save_pretrained(tmp_path / "model")
    made = NaFlexViTImageClassifierPreprocessor.from_preset(tmp_path / "model")
    pictures = [rng.integers(0, 256, (*size, 3), "uint8") for size in ((16, 20), (8, 4))]
    given = processor(pictures, return_tensors="np")
    for name, x in made(pictures).items():
        np.testing.assert_array_equal(given[name], x)
    assert not np.array_equal(preprocessor(pictures)["spatial_shapes"], given["spatial_shapes"])
    # And it is written as it was read.
    model.preprocessor = made
    model.export_to_transformers(tmp_path / "again")
    written = transformers.Siglip2ImageProcessorPil.from_pretrained(tmp_path / "again")
    assert not written.do_resize
    for name, x in written(pictures, return_tensors="np").items():
        np.testing.assert_array_equal(given[name], x)
    again = NaFlexViTImageClassifier.from_preset(tmp_path / "again").preprocessor
    assert again.to_dict() == made.to_dict()


# === timm ===


def timm_model(tmp_path, architecture="naflexvit_base_patch16_siglip", seed=5, **changes):
    torch, timm = import_module("torch"), import_module("timm")
    sizes = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "mlp_ratio": 2.0}
    arguments = {**sizes, "pos_embed_grid_size": (5, 6), **changes}
    model = timm.create_model(architecture, **arguments)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_((weight.ndim == 1) * 0.5 + 0.3 * noise)
    timm.models.save_for_hf(
        model, tmp_path / "model", safe_serialization=True, model_args=arguments
    )
    return model.eval()


def timm_given(torch, given):
    """The same rows as timm takes them: with the place of each patch."""
    columns = given["spatial_shapes"][:, 1:]
    index = np.arange(LENGTH)[None]
    places = np.stack([index // columns, index % columns], -1)
    places *= given["pixel_attention_mask"][..., None]
    return {
        "patches": torch.from_numpy(given["pixel_values"]),
        "patch_coord": torch.from_numpy(places),
        "patch_valid": torch.from_numpy(given["pixel_attention_mask"] > 0),
    }


@pytest.mark.needs("timm")
@pytest.mark.parametrize(
    "changes",
    [
        {"num_classes": 0},
        {"num_classes": 3, "act_layer": "gelu", "pos_embed_interp_mode": "bicubic"},
        {"num_classes": 3, "global_pool": "avg", "init_values": 0.1, "qkv_bias": False},
    ],
)
def test_features_of_timm(torch, tmp_path, changes):
    theirs, given = timm_model(tmp_path, **changes), patches()
    rows = timm_given(torch, given)
    with torch.no_grad():
        features = theirs.forward_features(**rows)["patches"].numpy()
        wanted = theirs(rows).numpy()
    backbone = NaFlexViTBackbone.from_preset(tmp_path / "model")
    assert backbone.config.image_shape == (20, 24, 3)
    seen = given["pixel_attention_mask"] > 0
    near(to_numpy(backbone(given))[seen], features[seen])
    model = NaFlexViTImageClassifier.from_preset(
        tmp_path / "model", num_classes=changes["num_classes"]
    )
    near(model.predict(given, verbose=0), wanted)
    assert model.preprocessor.patch_size == 4 and model.preprocessor.mean == (0.5, 0.5, 0.5)
    if changes["num_classes"] == 0:
        file = (tmp_path / "model" / "model.safetensors").rename(
            tmp_path / "naflexvit_base_patch4_siglip.v2_webli.safetensors"
        )
        told = {"num_heads": 3, "layer_norm_epsilon": 1e-6, "approximate_gelu": True}
        alone = NaFlexViTBackbone.from_preset(file, **told)
        near(alone(given), backbone(given))


@pytest.mark.needs("timm")
def test_registers_of_timm_are_for_images_of_one_size(torch, tmp_path):
    """The model of one size has them; rows of patches do not."""
    theirs = timm_model(
        tmp_path, "naflexvit_base_patch16_gap", num_classes=3, reg_tokens=2, init_values=0.1
    )
    images = np.random.default_rng(6).normal(size=(2, 20, 24, 3)).astype("float32")
    with torch.no_grad():
        wanted = theirs.forward_features(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()))
    near(ViTBackbone.from_preset(tmp_path / "model")(images), wanted.numpy())
    refused("tokens in front of the patches", NaFlexViTBackbone.from_preset, tmp_path / "model")


# === What is refused ===


TIMM = [
    ({"pos_embed_ar_preserving": True}, "pos_embed_ar_preserving=True has no counterpart"),
    ({"rope_type": "axial"}, "rope_type='axial' has no counterpart"),
    ({"pos_embed": "factorized"}, "pos_embed='factorized' has no counterpart"),
    ({"act_layer": "silu"}, "act_layer is 'silu'; known: gelu, gelu_tanh, quick_gelu"),
]


@pytest.mark.needs("timm")
def test_what_timm_has_more_of_is_refused(tmp_path):
    for i, (changes, message) in enumerate(TIMM):
        timm_model(tmp_path / str(i), num_classes=0, **changes)
        refused(message, NaFlexViTBackbone.from_preset, tmp_path / str(i) / "model")
    timm_model(tmp_path / "par", num_classes=0)
    source = tmp_path / "par" / "model" / "model.safetensors"
    for name in ("naflexvit_base_patch16_par_gap", "naflexvit_base_patch16_parfac_gap"):
        source = source.rename(tmp_path / f"{name}.safetensors")
        with pytest.raises(InputError, match="has positions that keep the aspect ratio"):
            NaFlexViTBackbone.from_preset(source, num_heads=3)


def test_what_cannot_be_is_said(tmp_path):
    def backbone_of(**more):
        return NaFlexViTBackbone((8, 8, 3), **SMALL, **more)

    with pytest.raises(InputError, match="tokens in front of the patches, which images of several"):
        backbone_of(use_class_token=True)
    with pytest.raises(InputError, match="a rotary embedding, no table of positions"):
        backbone_of(rope_theta=100.0, use_position_embedding=False)
    with pytest.raises(InputError, match="pooling is 'token'; rows of patches are pooled by gap"):
        NaFlexViTImageClassifier(backbone_of(), 3, pooling="token")
    with pytest.raises(InputError, match="ViTBackbone is given; give a NaFlexViTBackbone"):
        NaFlexViTImageClassifier(ViTBackbone((8, 8, 3), **SMALL, use_class_token=False), 3)
    values, grids = np.zeros((1, 4, 48), "float32"), np.array([[2, 2]])
    for given, message in (
        (values, "got ndarray; give a dictionary with pixel_values"),
        (
            {"pixel_values": values, "spatial_shapes": grids, "images": values},
            "got images; it takes pixel_values, spatial_shapes",
        ),
        (
            {"pixel_values": values, "spatial_shapes": np.ones((1, 3), int)},
            r"spatial_shapes has shape \(1, 3\); give \(B, 2\)",
        ),
    ):
        refused(message, backbone_of(), given)
    for pictures, message in (
        ([np.zeros((4, 4))], "an image has shape"),
        ([], "there are no images"),
    ):
        refused(message, NaFlexViTImageClassifierPreprocessor(), pictures)
    with pytest.raises(InputError, match="give one number per channel"):
        NaFlexViTImageClassifierPreprocessor(std=(0.5, 0.5, 0.0))
    two_towers = SigLIPBackbone(**SigLIPBackbone.presets["siglip_debug"], naflex=True)
    with pytest.raises(InputError, match="the model got no images; give pixel_values and spatial"):
        two_towers({"token_ids": np.ones((2, 4), "int32")})
