"""What each part of DINOv3 and Perception Encoder changes, and places that move in training."""

import keras
import numpy as np
import pytest

from arrays import to_numpy
from family_table import row_of, run
from kmodels.layers.remat import rematerialize
from kmodels.models import ViTBackbone, ViTConfig, ViTImageClassifier
from kmodels.models.blocks.encoder_block import EncoderInfo
from kmodels.models.vit.layers import PatchCoordinates
from tolerances import tolerance

SHIFTED = {
    "image_shape": (16, 24, 3), "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 16,
    "mlp_dim": 24, "num_register_tokens": 2, "use_position_embedding": False, "rope_theta": 100.0,
}  # fmt: skip
IMAGES = np.random.default_rng(0).normal(size=(4, 16, 24, 3)).astype("float32")


def differ(found, expected, why=""):
    assert np.abs(found - expected).max() > 20 * tolerance("hidden"), why


def put(model, other):
    """Gives a model the weights of another where both have them."""
    held = {variable.path: variable for variable in other.variables}
    for variable in model.variables:
        if (old := held.get(variable.path)) is not None and old.shape == variable.shape:
            variable.assign(to_numpy(old.value))
    return model


def changed(row, **changes):
    """The model of a reference with another config, and its weights where both have them."""
    config = {**row.model.backbone.config.to_dict(), **changes}
    return put(ViTBackbone(**config), row.model.backbone)


# === What each part changes ===


PARTS = {
    "vit_recent/dinov3": [
        {"rope_theta": None, "pos_embed_rescale": None},
        {"rope_theta": 10.0},
        {"rope_type": "cat"},
        {"num_register_tokens": 2},
        {"layer_scale": None},
    ],
    "vit_recent/timm_rope_ape": [{"rope_type": "cat_ij"}, {"rope_theta": 1e4}],
    "vit_recent/timm_pe": [
        {"rope_theta": 100.0},
        {"rope_type": "dinov3"},
        {"rope_grid_offset": 0.0},
        {"ref_feat_shape": (8, 14)},
        {"ref_feat_shape": None},
        {"pooling_num_heads": 3},
        {"pool_include_prefix": False},
    ],
}


@pytest.mark.parametrize("case", PARTS)
def test_each_part_counts(references, case):
    row = row_of(case, references)
    for changes in PARTS[case]:
        model, patches = changed(row, **changes), slice(-64, None)
        if case != "vit_recent/timm_pe":
            found = run(model, row.expected["images"])[:, patches]
            differ(found, row.expected["final"][:, patches], changes)
        else:
            model = put(ViTImageClassifier(model, 0, pooling="map"), row.model)
            differ(run(model, row.expected["images"]), row.expected["pooled"], changes)


def test_class_token_and_registers_do_not_turn():
    config = ViTConfig(image_shape=(8, 12, 3), patch_size=4, num_register_tokens=2, rope_theta=9.0)
    found = to_numpy(PatchCoordinates(config)(np.zeros((1, 8, 12, 3), "float32")))
    assert found.shape == (9, 2) and np.all(found[:3] == 0)
    # Centers of 2 x 3 patches from -1 to 1, in circles.
    expected = [[y, x] for y in (-0.5, 0.5) for x in (-2 / 3, 0, 2 / 3)]
    np.testing.assert_allclose(found[3:], 2 * np.pi * np.array(expected), atol=1e-6)


# === In training ===


def _places(training, **moves):
    layer = PatchCoordinates(ViTConfig(**SHIFTED, **moves))
    images = np.zeros((2, 16, 24, 3), "float32")
    return [to_numpy(layer(images, training=training)) for _ in range(8)]


@pytest.mark.each_backend
def test_places_move_in_training_alone_and_class_token_never():
    for moves in ({"pos_embed_shift": 0.3}, {"pos_embed_jitter": 2.0}, {"pos_embed_rescale": 2.0}):
        still = _places(False, **moves)
        assert all(np.array_equal(x, still[0]) for x in still)
        moved = _places(True, **moves)
        assert np.all(np.stack(moved)[:, :3] == 0)
        assert len({x.tobytes() for x in moved}) == 8
        (name,) = moves
        for x in moved:
            if name == "pos_embed_shift":
                by = (x - still[0])[3:] / (2 * np.pi)
                assert np.ptp(by, axis=0).max() < 1e-5 and np.abs(by).max() <= 0.3
                assert abs(by[0, 0] - by[0, 1]) > 1e-4
                continue
            by = x[3:] / still[0][3:]
            assert np.ptp(by, axis=0).max() < 1e-5 and 0.5 <= by.min() <= by.max() <= 2.0
            assert (abs(by[0, 0] - by[0, 1]) > 1e-4) == (name == "pos_embed_jitter")
    assert np.array_equal(_places(True)[0], _places(False)[0])
    ones = {"pos_embed_shift": 0.0, "pos_embed_jitter": 1.0, "pos_embed_rescale": 1.0}
    np.testing.assert_allclose(_places(True, **ones)[0], _places(False)[0], atol=1e-6)


def test_places_are_not_rounded_to_half_precision():
    wide = ViTBackbone(**SHIFTED, name="wide", dtype="float32")
    half = ViTBackbone(**SHIFTED, name="half", dtype="mixed_bfloat16")
    half.set_weights(wide.get_weights())
    block, x = half.blocks[0], np.random.default_rng(1).normal(size=(1, 27, 16))
    x = keras.ops.convert_to_tensor(x, "bfloat16")
    assert half.coordinates is not None
    places = half.coordinates(np.zeros((1, 16, 24, 3), "float32"))
    assert keras.backend.standardize_dtype(places.dtype) == "float32"
    given = keras.ops.cast(keras.ops.cast(places, "bfloat16"), "float32")
    found, rounded = (to_numpy(block(x, info=EncoderInfo(coordinates=c))) for c in (places, given))
    assert not np.array_equal(found, rounded)


@pytest.mark.parametrize(
    "fields", [{"pos_embed_shift": 0.5, "pos_embed_jitter": 2.0}, {"token_merging": 2}]
)
def test_places_are_drawn_once_and_tokens_merge_alike_where_blocks_are_computed_again(fields):
    weights = []
    for remat in ("none", "block", "attention"):
        keras.utils.set_random_seed(3)
        model = ViTImageClassifier(ViTBackbone(**SHIFTED, **fields), 3, pooling="gap")
        rematerialize(model, remat)
        model.compile(keras.optimizers.SGD(0.1))
        before = [to_numpy(w.value).copy() for w in model.trainable_variables]
        losses = model.fit(IMAGES, np.array([0, 1, 2, 0]), verbose=0, epochs=2).history["loss"]
        assert losses[1] < losses[0]
        for weight, old in zip(model.trainable_variables, before, strict=True):
            assert (to_numpy(weight.value) != old).any(), weight.path
        weights.append([losses, *(to_numpy(w.value) for w in model.trainable_variables)])
    for plain, *others in zip(*weights, strict=True):
        for other in others:
            np.testing.assert_allclose(other, plain, atol=tolerance("remat"))
