"""MAE's pretraining: transformers' numbers, its files, what is hidden, what is trained."""

import json
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest

from arrays import assert_equal, read_npz, to_numpy
from family_table import row_of
from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.models import DINOV3Backbone, ViTBackbone, ViTImageClassifier, ViTMAEForPreTraining
from kmodels.models.vit.mae import draw_sines, sines
from kmodels.training import TrainStep
from kmodels.weights import read_safetensors
from refusals import refused
from tolerances import tolerance

SMALL: Any = {
    "image_shape": (16, 16, 3), "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 16,
    "mlp_dim": 24,
}  # fmt: skip
DECODER: Any = {
    "decoder_hidden_size": 8, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 12,
}  # fmt: skip


IMAGES = np.random.default_rng(1).normal(size=(8, 16, 16, 3)).astype("float32")


def make(seed=3, sizes=SMALL, **more):
    keras.utils.set_random_seed(0)
    return ViTMAEForPreTraining(ViTBackbone(**sizes), **DECODER, seed=seed, **more)


@pytest.mark.parametrize("case", ["pixels", "normalised"])
def test_files_of_transformers_and_ours(references, tmp_path, case):
    row = row_of(f"vit_mae/{case}", references)
    row.model.export_to_transformers(tmp_path / "out")
    folders = (row.path, tmp_path / "out")
    described = [json.loads((folder / "config.json").read_text()) for folder in folders]
    for name in ("architectures", "model_type", "mask_ratio", "norm_pix_loss", *DECODER):
        assert described[0][name] == described[1][name], name
    # Our own files, and the encoder out of them: nobody has to say where it begins.
    row.model.save_to_preset(tmp_path / "own")
    again = ViTMAEForPreTraining.from_preset(tmp_path / "own")
    assert again.settings == row.model.settings
    assert_equal(again.weights, row.model.weights)
    classifier = ViTImageClassifier.from_preset(tmp_path / "own", num_classes=3)
    table = classifier.backbone.get_layer("tokens").position_embedding
    assert any(v is table for v in classifier.trainable_variables)
    count = sum(name.startswith("decoder.") for name in read_safetensors(row.path))
    with pytest.warns(UserWarning, match=rf"decoder\.\*, {count} tensors of MAE's pretraining"):
        backbone = ViTBackbone.from_preset(row.path)
    assert_equal(classifier.backbone.weights, backbone.weights)


def test_a_file_without_a_decoder_gets_a_new_one(tmp_path):
    backbone = ViTBackbone(**SMALL)
    backbone.save_to_preset(tmp_path / "encoder")
    mae = ViTMAEForPreTraining.from_preset(tmp_path / "encoder", **DECODER, fixed_positions=False)
    assert_equal(mae.backbone.weights, backbone.weights)
    mae.save_to_preset(tmp_path / "mae")
    # Another decoder over the same encoder is new as well.
    wide = ViTMAEForPreTraining.from_preset(tmp_path / "mae", decoder_hidden_size=12)
    assert wide.decoder.config.hidden_dim == 12 and wide.settings["fixed_positions"] is False
    refused("has no head; give num_classes", ViTImageClassifier.from_preset, tmp_path / "mae")


def test_positions_are_those_of_the_published_weights(references):
    table = read_npz(references / "vit_mae" / "positions.npz")["table"]
    np.testing.assert_allclose(sines((3, 5), 24, 1), table, rtol=0, atol=1e-6)
    mae = make(sizes={**SMALL, "image_shape": (12, 20, 3), "num_register_tokens": 2})
    table = to_numpy(mae.backbone.get_layer("tokens").position_embedding.value)[0]
    np.testing.assert_array_equal(table, sines((3, 5), 16, 1))
    table = to_numpy(mae.decoder.position_embedding.value)[0]
    np.testing.assert_array_equal(table, sines((3, 5), 8, 3))
    # A variable without a value, as in a model that waits for its weights, begins with it too.
    with keras_internals.without_values() as body:
        variable = keras.Variable("zeros", shape=(1, 16, 24), dtype="float32")
    keras_internals.begin_with(variable, partial(draw_sines, (3, 5), 1))
    keras_internals.draw_values(body)
    np.testing.assert_array_equal(to_numpy(variable.value)[0], sines((3, 5), 24, 1))
    keras_internals.begin_with(variable, keras.initializers.Ones())
    assert np.all(to_numpy(variable.value) == 1)


def test_training_moves_all_but_the_fixed_positions_and_draws_its_masks():
    images, mae = IMAGES, make(norm_pix_loss=True)
    assert len(mae.trainable_variables) + len(mae.non_trainable_variables) == len(mae.variables)
    assert len(mae.trainable_weights) + len(mae.non_trainable_weights) == len(mae.weights)
    assert len(mae.trainable_weights) == len(mae.weights) - 2
    step = TrainStep(mae, mae.loss_fn)
    step.compile(keras.optimizers.SGD(0.1))
    before = [to_numpy(w.value) for w in mae.weights]
    first = step.evaluate(images, verbose=0)
    # Outside of training the masks are the same for all: nothing is drawn.
    assert step.evaluate(images, verbose=0) == first
    losses = step.fit(images, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    fixed = {id(mae.fixed), id(mae.decoder.position_embedding)}
    for weight, old in zip(mae.weights, before, strict=True):
        if not weight.path.endswith("key/bias"):  # softmax does not see it
            assert (id(weight) in fixed) != (to_numpy(weight.value) != old).any(), weight.path
    # The same seed draws the same masks, another one others.
    one, same, other = (to_numpy(make(seed).draw_noise(4)) for seed in (3, 3, 4))
    assert np.array_equal(one, same) and not np.array_equal(same, other)
    again = make(norm_pix_loss=True)
    noise = to_numpy(again.draw_noise(8))
    expected = float(to_numpy(again.pretraining_loss(images, noise)))
    assert abs(losses[0] - expected) < tolerance("losses")
    # Keras' own fit is the same steps, with the loss of the model and images alone.
    plain = make(norm_pix_loss=True)
    plain.compile(keras.optimizers.SGD(0.1))
    assert abs(plain.evaluate(images, verbose=0) - first) < tolerance("losses")
    found = plain.fit(images, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    np.testing.assert_allclose(found, losses, rtol=0, atol=tolerance("losses"))
    for weight, other in zip(plain.weights, mae.weights, strict=True):
        np.testing.assert_allclose(to_numpy(weight.value), to_numpy(other.value), atol=1e-5)
    assert plain.predict(images, verbose=0).shape == (8, 16, 48)
    weights = np.array([2.0] * 4 + [0.0] * 4, "float32")
    half = float(to_numpy(again.pretraining_loss(images[:4], noise[:4])))
    found = again.pretraining_loss(images, noise, sample_weight=weights)
    assert abs(float(to_numpy(found)) - half) < tolerance("losses")
    # In the backbone itself the positions are weights as all others.
    assert any(v is mae.fixed for v in mae.backbone.trainable_variables)
    assert make(fixed_positions=False).fixed is None


def test_the_loss_is_that_of_hidden_pixels_in_float64():
    images, mae = IMAGES[:3], make(mask_ratio=0.6, norm_pix_loss=True)
    assert mae.num_seen == 6
    noise = np.random.default_rng(2).random((3, 16)).astype("float32")
    found = np.asarray(to_numpy(mae(images, noise=noise)), "float64")
    wanted = []
    for image, prediction, drawn in zip(images.astype("float64"), found, noise, strict=True):
        for patch in np.argsort(drawn)[6:]:
            y, x = divmod(int(patch), 4)
            pixels = image[4 * y : 4 * y + 4, 4 * x : 4 * x + 4].ravel()
            pixels = (pixels - pixels.mean()) / np.sqrt(pixels.var(ddof=1) + 1e-6)
            wanted.append(((prediction[patch] - pixels) ** 2).mean())
    loss = float(to_numpy(mae.pretraining_loss(images, noise)))
    assert abs(loss - np.mean(wanted)) < tolerance("logits_across")
    # Of pixels that are hidden the encoder knows nothing, of seen ones it does.
    mae.norm_pix_loss = False
    for place, changes in ((np.argsort(noise[0])[-1], False), (np.argsort(noise[0])[0], True)):
        y, x = divmod(int(place), 4)
        other = images.copy()
        other[0, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4] += 1
        moved = np.abs(to_numpy(mae(other, noise=noise)) - found).max()
        assert (moved > 1e-3) == changes
    assert np.array_equal(to_numpy(mae.unpatchify(mae.patchify(images))), images)


def test_without_noise_all_images_hide_the_same_patches():
    images, mae = IMAGES[:2], make(sizes={**SMALL, "use_class_token": False})
    hidden = to_numpy(mae.hidden())
    assert hidden.shape == (1, 16) and hidden.sum() == 12
    noise = np.repeat(mae.masking.usual_order.astype("float32"), 2, axis=0)
    found, wanted = to_numpy(mae(images)), to_numpy(mae(images, noise=noise))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    np.testing.assert_allclose(mae.predict(images, verbose=0), found, rtol=0, atol=1e-5)


def test_what_cannot_be_is_refused(tmp_path):
    for sizes, settings, message in (
        ({}, {"mask_ratio": 1.0}, r"mask_ratio is 1\.0 of 16 patches; give 0 or more"),
        ({}, {"mask_ratio": 0.95}, "leave at least one to be seen"),
        ({"patch_drop_rate": 0.5}, {}, "leave patch_drop_rate and token_merging at 0"),
    ):
        refused(message, make, sizes={**SMALL, **sizes}, **settings)
    with pytest.raises(InputError, match="MAE does not support rotary position embeddings"):
        ViTMAEForPreTraining(DINOV3Backbone(**SMALL), **DECODER)
    with pytest.raises(InputError, match="decoder_hidden_size is 0; give at least 1"):
        ViTMAEForPreTraining(ViTBackbone(**SMALL), decoder_hidden_size=0)
    refused("metrics compare with labels; leave", make().compile, "sgd", metrics=["mse"])
    with pytest.raises(InputError, match=r"mask_ratio is 0\.0, which hides none of 16 patches"):
        make(mask_ratio=0.0).pretraining_loss(IMAGES[:1])
    refused("a width of 6 has no fixed positions; give a multiple of 4", sines, (2, 2), 6)
    for sizes, message in (
        ({"image_shape": (16, 8, 3)}, "images that are not square"),
        ({"num_register_tokens": 2}, "register tokens"),
    ):
        refused(message, make(sizes={**SMALL, **sizes}).export_to_transformers, tmp_path / "out")
