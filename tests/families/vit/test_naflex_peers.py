"""Rows of patches in transformers and timm: what they make of our files, and we of theirs."""

from importlib import import_module

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels.core.errors import InputError
from kmodels.models import (
    NaFlexViTBackbone,
    NaFlexViTImageClassifier,
    NaFlexViTImageClassifierPreprocessor,
    SigLIPNaFlexVisionEncoder,
    ViTBackbone,
)
from tolerances import tolerance

SIZES = {"patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 40}
SIGLIP = {"approximate_gelu": True, "position_interpolation": "bilinear_antialias"}
GRIDS = np.array([(2, 7), (5, 3), (1, 2), (4, 4), (5, 5)])
LENGTH = 26


def near(found, wanted, what="hidden"):
    np.testing.assert_allclose(to_numpy(found), to_numpy(wanted), rtol=0, atol=tolerance(what))


def drawn(model, seed=2):
    """The model with weights of which each matters."""
    rng = np.random.default_rng(seed)
    model.set_weights([rng.normal(0.1, 0.3, x.shape).astype("float32") for x in model.weights])
    return model


def patches():
    """Images of several grids in a row each, with something in the padding."""
    rng = np.random.default_rng(3)
    places = np.arange(LENGTH) < GRIDS.prod(-1, keepdims=True)
    values = rng.normal(size=(len(GRIDS), LENGTH, 48)).astype("float32")
    return {
        "pixel_values": values,
        "pixel_attention_mask": places.astype("int32"),
        "spatial_shapes": GRIDS,
    }


# === transformers ===


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
    tower = drawn(SigLIPNaFlexVisionEncoder(4, 16, 2, 2, 40, image_shape=(20, 20, 3)))
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
    backbone = drawn(NaFlexViTBackbone((20, 20, 3), **SIZES, **SIGLIP))
    backbone.export_to_transformers(tmp_path / "backbone")
    theirs = transformers.Siglip2VisionModel.from_pretrained(tmp_path / "backbone").eval()
    found = said(torch, theirs, given).last_hidden_state.numpy()
    near(to_numpy(backbone(given))[seen], found[seen])


@pytest.mark.needs("transformers")
def test_transformers_loads_a_classifier_with_its_processor(torch, transformers, tmp_path):
    preprocessor = NaFlexViTImageClassifierPreprocessor(4, LENGTH)
    backbone = NaFlexViTBackbone((20, 20, 3), **SIZES, **SIGLIP)
    model = drawn(NaFlexViTImageClassifier(backbone, 3, preprocessor))
    model.export_to_transformers(tmp_path / "model")
    theirs = transformers.Siglip2ForImageClassification.from_pretrained(tmp_path / "model").eval()
    processor = transformers.Siglip2ImageProcessorPil.from_pretrained(tmp_path / "model")
    rng = np.random.default_rng(4)
    pictures = [rng.integers(0, 256, (*size, 3), "uint8") for size in ((21, 37), (50, 9), (16, 16))]
    given = processor(pictures, return_tensors="np")
    for name, x in model.preprocessor(pictures).items():
        np.testing.assert_array_equal(given[name], x)
    near(model.predict(pictures, verbose=0), said(torch, theirs, given).logits, "logits")


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
    near(model.predict(given, verbose=0), wanted, "logits")
    assert model.preprocessor.patch_size == 4 and model.preprocessor.mean == (0.5, 0.5, 0.5)
    if changes["num_classes"] == 0:
        file = (tmp_path / "model" / "model.safetensors").rename(
            tmp_path / "naflexvit_base_patch4_siglip.v2_webli.safetensors"
        )
        alone = NaFlexViTBackbone.from_preset(file, num_heads=3)
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
    with pytest.raises(InputError, match="tokens in front of the patches"):
        NaFlexViTBackbone.from_preset(tmp_path / "model")


@pytest.mark.needs("timm")
def test_what_timm_has_more_of_is_refused(tmp_path):
    for i, (changes, message) in enumerate(
        (
            ({"pos_embed_ar_preserving": True}, "pos_embed_ar_preserving=True has no counterpart"),
            ({"rope_type": "axial"}, "rope_type='axial' has no counterpart"),
            ({"pos_embed": "factorized"}, "pos_embed='factorized' has no counterpart"),
            ({"act_layer": "silu"}, "act_layer is 'silu'; known: gelu, gelu_tanh, quick_gelu"),
        )
    ):
        timm_model(tmp_path / str(i), num_classes=0, **changes)
        with pytest.raises(InputError, match=message):
            NaFlexViTBackbone.from_preset(tmp_path / str(i) / "model")
    timm_model(tmp_path / "par", num_classes=0)
    source = tmp_path / "par" / "model" / "model.safetensors"
    for name, message in (
        ("naflexvit_base_patch16_par_gap", "keeps the aspect ratio of its positions"),
        ("naflexvit_base_patch16_parfac_gap", "keeps the aspect ratio of its positions"),
    ):
        with pytest.raises(InputError, match=message):
            NaFlexViTBackbone.from_preset(
                source.rename(tmp_path / f"{name}.safetensors"), num_heads=3
            )
        source = tmp_path / f"{name}.safetensors"
    assert keras.backend.backend() == "torch"
