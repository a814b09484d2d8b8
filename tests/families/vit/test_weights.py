"""The ViT's tables: there and back bit for bit, what is refused, and exports that others load."""

import json

import numpy as np
import pytest

from arrays import to_numpy
from kmodels.core.errors import InputError
from kmodels.models import ViTBackbone, ViTConfig, ViTImageClassifier
from kmodels.models.vit.weights import augreg, huggingface
from kmodels.models.vit.weights import timm as weights_timm
from kmodels.weights import LazyArray, export, load, read_safetensors, write_safetensors
from kmodels.weights.engine import variables
from kmodels.weights.gather import values
from tolerances import tolerance

SIZES = {
    "image_shape": (16, 24, 3),
    "patch_size": 8,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 16,
    "mlp_dim": 32,
}


def _filled(model, seed=0):
    """The model with numbers everywhere, also where first weights are zeros or ones."""
    rng = np.random.default_rng(seed)
    for variable in model.weights:
        scale = 0.3 if len(variable.shape) == 2 else 1.0
        variable.assign(rng.normal(size=tuple(variable.shape)).astype("float32") * scale)
    return model


def _bits(model):
    return {path: values(x).tobytes() for path, x in variables(model).items()}


def _model(**changes):
    task = {key: changes.pop(key) for key in ("pooling", "intermediate_dim") if key in changes}
    return _filled(ViTImageClassifier(ViTBackbone(**{**SIZES, **changes}), 5, **task))


EVERYTHING = {
    "num_register_tokens": 3,
    "position_over_prefix": False,
    "layer_scale": 0.1,
    "qk_norm": True,
    "pre_norm": True,
    "pooling": "map",
}
TABLES = {
    "huggingface": (huggingface.rules, {"intermediate_dim": 16}),
    "timm": (weights_timm.rules, EVERYTHING),
    "augreg": (
        lambda config: augreg.rules(config, "params/", "pos_embedding", True),
        {"pooling": "map", "intermediate_dim": 8},
    ),
}


@pytest.mark.parametrize("table", TABLES)
def test_each_table_goes_there_and_back_bit_for_bit(table):
    rules, variant = TABLES[table]
    model = _model(**variant)
    before = _bits(model)
    tensors = {k: _kept(x) for k, x in export(model, rules(model.backbone.config)).items()}
    _filled(model, seed=1)
    assert _bits(model) != before
    load(model, tensors, rules(model.backbone.config))
    assert _bits(model) == before


def _kept(tensor):
    array = tensor.read().copy()
    return LazyArray(array.shape, array.dtype, lambda: array)


# === Exports ===


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"use_mha_bias": False, "use_mlp_bias": False, "use_patch_bias": False},
        {"position_over_prefix": False, "approximate_gelu": True, "layer_norm_epsilon": 1e-3},
    ],
    ids=["plain", "no_bias", "variant"],
)
def test_an_export_reads_back_with_equal_logits(tmp_path, variant):
    model = _model(**variant)
    model.export_to_transformers(tmp_path / "out")
    with pytest.warns(UserWarning, match="does not say how its images are normalised"):
        again = ViTImageClassifier.from_preset(tmp_path / "out")
    assert again.preprocessor is None
    images = np.random.default_rng(0).normal(size=(2, 16, 24, 3)).astype("float32")
    np.testing.assert_allclose(
        to_numpy(again(images)), to_numpy(model(images)), atol=tolerance("logits"), rtol=0
    )
    form = json.loads((tmp_path / "out" / "config.json").read_text())
    assert form["image_size"] == [16, 24]
    assert form["dtype"] == "float32"


def test_an_export_keeps_how_pictures_are_prepared(tmp_path):
    model = ViTImageClassifier.from_preset("vit_debug", num_classes=2)
    preprocessor = ViTImageClassifier.preprocessor_class(
        (16, 16), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic"
    )
    model.preprocessor = preprocessor
    model.export_to_transformers(tmp_path / "out")
    again = ViTImageClassifier.from_preset(tmp_path / "out")
    assert again.preprocessor.to_dict() == preprocessor.to_dict()


def test_an_image_processor_is_read_that_a_processor_of_several_parts_holds(tmp_path):
    folder = _huggingface(tmp_path)
    held = {"image_processor": {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}}
    (folder / "processor_config.json").write_text(json.dumps(held))
    assert ViTImageClassifier.from_preset(folder).preprocessor.mean == (0.1, 0.2, 0.3)


def test_what_transformers_lacks_is_listed_at_once(tmp_path):
    model = _model(**EVERYTHING)
    with pytest.raises(
        InputError,
        match=r"no counterpart for register tokens, layer_scale, qk_norm, pre_norm, pooling='map'",
    ):
        model.export_to_transformers(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# === What is refused ===


def _huggingface(tmp_path, **changes):
    model = _model()
    model.export_to_transformers(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return tmp_path / "hf"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; the model supports gelu, gelu_new"),
        ({"patch_size": [8, 4]}, r"patches of \(8, 4\) pixels; only square ones are supported"),
        ({"num_hidden_layers": 1}, "16 tensors without a variable: vit.encoder.layer.1"),
        ({"num_hidden_layers": 3}, "16 variables without a tensor: block_2/attention_norm/scale"),
    ],
)
def test_huggingface_settings_that_do_not_fit(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        ViTImageClassifier.from_preset(_huggingface(tmp_path, **changes), preprocessor=None)


def test_a_pooler_that_is_not_tanh_is_refused(tmp_path):
    folder = _huggingface(tmp_path, pooler_act="relu")
    tensors = {k: _kept(x) for k, x in read_safetensors(folder).items()}
    zeros = np.zeros((16, 16), "float32")
    tensors["vit.pooler.dense.weight"] = LazyArray(zeros.shape, zeros.dtype, lambda: zeros)
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(InputError, match="pooler_act is 'relu'; only tanh is supported"):
        ViTImageClassifier.from_preset(folder)


def _timm(folder, description=None, drop=(), **changes):
    model = _model(**changes)
    folder.mkdir(exist_ok=True)
    tensors = export(model, weights_timm.rules(model.backbone.config))
    tensors = {name: x for name, x in tensors.items() if name not in drop}
    write_safetensors(folder / "model.safetensors", tensors)
    arguments = {"num_heads": 2, "img_size": [16, 24]}
    described = {"architecture": "vit_tiny_patch16_224", "model_args": arguments}
    if description is not None:
        described["model_args"] |= description
    (folder / "config.json").write_text(json.dumps(described))
    return folder


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"act_layer": "relu"}, "act_layer is 'relu'; known: gelu, gelu_tanh, quick_gelu"),
        (
            {"global_pool": "catavgmax"},
            "global_pool is 'catavgmax'; known: token, avg, max, avgmax",
        ),
        ({"pool_include_prefix": True}, "pool_include_prefix=True has no counterpart"),
        ({"num_heads": None}, "does not say how many heads a width of 16 has; give num_heads"),
    ],
)
def test_timm_settings_that_do_not_fit(tmp_path, description, message):
    with pytest.raises(InputError, match=message):
        ViTImageClassifier.from_preset(_timm(tmp_path / "timm", description))


def test_timm_files_that_are_no_vit(tmp_path):
    folder = _timm(tmp_path / "timm", drop=("pos_embed",))
    with pytest.raises(InputError, match="is not a timm ViT: it lacks pos_embed"):
        ViTImageClassifier.from_preset(folder)
    with pytest.raises(InputError, match="is not a timm ViT: it lacks pos_embed"):
        ViTImageClassifier.from_preset(folder / "model.safetensors")


def test_a_bare_timm_file_tells_all_but_the_heads(tmp_path):
    _timm(tmp_path / "timm", image_shape=(24, 24, 3))
    file = (tmp_path / "timm" / "model.safetensors").rename(tmp_path / "vit.safetensors")
    with pytest.warns(UserWarning, match="vit.safetensors does not say how its images are norm"):
        model = ViTImageClassifier.from_preset(file, num_heads=2)
    assert model.preprocessor is None
    assert _bits(model) == _bits(_model(image_shape=(24, 24, 3)))
    named = file.rename(tmp_path / "vit_mine_patch8_siglip_24.safetensors")
    found = ViTImageClassifier.from_preset(named, num_heads=2).preprocessor
    assert (found.mean, found.std) == ((0.5,) * 3, (0.5,) * 3)
    file = named.rename(file)
    with pytest.raises(InputError, match="width of 16 has; give num_heads"):
        ViTImageClassifier.from_preset(file)


def test_positions_over_registers_are_refused(tmp_path):
    folder = _timm(tmp_path / "timm", num_register_tokens=2)
    with pytest.raises(InputError, match="the positions cover the registers"):
        ViTImageClassifier.from_preset(folder)


def test_the_heads_of_known_timm_architectures():
    heads = {
        ("vit_small_patch16_224", 384): 6,
        ("vit_base_patch16_gap_224", 768): 16,
        ("vit_so400m_patch14_siglip_224", 1152): 16,
        ("vit_giantopt_patch16_siglip_256", 1536): 16,
        ("vit_huge_patch14_224", 1280): 16,
    }
    for (name, width), number in heads.items():
        assert weights_timm.heads(None, name, width) == number


def test_npz_files_that_are_no_vit(tmp_path):
    file = tmp_path / "x.npz"
    kernel = np.zeros((8, 8, 3, 16), "float32")
    for arrays, message in (
        ({"a": np.zeros(2)}, "is not a ViT of vision_transformer or big_vision"),
        ({"embedding/kernel": kernel}, "only learned position embeddings are supported"),
        (
            {"embedding/kernel": kernel, "pos_embedding": np.zeros((1, 4, 16))},
            "is not a known ViT: it lacks Transformer/encoderblock_0/Multi",
        ),
    ):
        np.savez(file, **arrays)
        with pytest.raises(InputError, match=message):
            ViTImageClassifier.from_preset(file)


# === With the other packages ===


def _nchw(images):
    import torch

    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


@pytest.mark.across
@pytest.mark.filterwarnings("default")  # of the other packages
@pytest.mark.parametrize("variant", [{}, {"use_mha_bias": False, "approximate_gelu": True}])
def test_transformers_loads_an_export_with_equal_logits(tmp_path, variant):
    from torchvision_cpu import define_torchvision_operators

    define_torchvision_operators()
    import torch
    import transformers

    model = _model(**variant)
    model.export_to_transformers(tmp_path / "out")
    images = np.random.default_rng(0).normal(size=(2, 16, 24, 3)).astype("float32")
    theirs, told = transformers.ViTForImageClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits = theirs(_nchw(images)).logits.numpy()
    np.testing.assert_allclose(logits, to_numpy(model(images)), atol=tolerance("logits"), rtol=0)
    theirs.save_pretrained(tmp_path / "again")
    if not variant:
        again = ViTImageClassifier.from_preset(tmp_path / "again", preprocessor=None)
        assert _bits(again) == _bits(model)


@pytest.mark.across
@pytest.mark.filterwarnings("default")  # of the other packages
def test_timm_takes_our_tensors_and_gives_them_back(tmp_path):
    from torchvision_cpu import define_torchvision_operators

    define_torchvision_operators()
    import safetensors.torch
    import timm
    import torch

    model = _model(num_register_tokens=3, position_over_prefix=False, layer_scale=0.1)
    config: ViTConfig = model.backbone.config
    write_safetensors(tmp_path / "x.safetensors", export(model, weights_timm.rules(config)))
    theirs = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=(16, 24),
        patch_size=8,
        embed_dim=16,
        depth=2,
        num_heads=2,
        mlp_ratio=2,
        num_classes=5,
        reg_tokens=3,
        no_embed_class=True,
        init_values=1.0,
    ).eval()
    theirs.load_state_dict(safetensors.torch.load_file(tmp_path / "x.safetensors"))
    images = np.random.default_rng(0).normal(size=(2, 16, 24, 3)).astype("float32")
    with torch.no_grad():
        logits = theirs(_nchw(images)).numpy()
    np.testing.assert_allclose(logits, to_numpy(model(images)), atol=tolerance("logits"), rtol=0)
    timm.models.save_for_hf(theirs, tmp_path / "timm", safe_serialization=True)
    assert _bits(ViTImageClassifier.from_preset(tmp_path / "timm")) == _bits(model)
