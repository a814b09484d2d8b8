"""from_preset, save_to_preset and what goes wrong with them."""

import json
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from arrays import to_numpy
from kmodels import presets, registry
from kmodels.core.errors import InputError
from kmodels.models import (
    GemmaCausalLM,
    ViTBackbone,
    ViTImageClassifier,
    ViTImageClassifierPreprocessor,
)
from kmodels.weights import deferred, native
from kmodels.weights.engine import variables
from kmodels.weights.gather import values
from refusals import refused


def _bits(model):
    return {path: values(x).tobytes() for path, x in variables(model).items()}


def _images(shape=(16, 16, 3)):
    return np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")


@pytest.fixture(scope="module")
def model():
    preprocessor = ViTImageClassifierPreprocessor((16, 16), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    return ViTImageClassifier.from_preset(
        "vit_debug", num_classes=5, preprocessor=preprocessor, dropout_rate=0.1, dropout=0.2
    )


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    return model.save_to_preset(tmp_path_factory.mktemp("saved") / "preset")


def test_names_give_architectures_and_overrides_change_them(model):
    assert model.preprocessor.mean == (0.1, 0.2, 0.3)
    assert model.backbone.config.dropout_rate == 0.1
    assert model.settings["dropout"] == 0.2
    assert model.num_classes == 5
    assert ViTImageClassifier.from_preset("vit_debug").num_classes == 1000
    assert ViTImageClassifier.from_preset("vit_micro_patch2_8", num_classes=2).pooling == "gap"
    named = ViTBackbone.from_preset("vit_debug", name="mine", dtype="mixed_bfloat16")
    assert (named.name, named.dtype_policy.name) == ("mine", "mixed_bfloat16")


def test_all_names_are_listed():
    of_families = [presets.list_presets(name) for name in registry.FAMILIES]
    # Two families may share a name, which a class tells apart.
    assert sorted({name for names in of_families for name in names}) == presets.list_presets()
    assert "vit_base_patch16_224" in presets.list_presets()
    assert [family.name for family in registry.families()] == list(registry.FAMILIES)


@pytest.mark.each_backend
def test_a_saved_model_comes_back_bit_for_bit(model, saved):
    again = ViTImageClassifier.from_preset(saved)
    assert _bits(again) == _bits(model)
    assert again.backbone.config == model.backbone.config
    assert again.settings == model.settings
    assert again.preprocessor.to_dict() == model.preprocessor.to_dict()
    assert sorted(file.name for file in saved.iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]


def test_parts_of_a_saved_model(model, saved):
    backbone = ViTBackbone.from_preset(saved)
    whole = _bits(model)
    assert _bits(backbone) == {path: whole[path] for path in _bits(backbone)}
    new = ViTImageClassifier.from_preset(saved, load_weights=False)
    assert _bits(new) != whole
    head = ViTImageClassifier.from_preset(saved, num_classes=7, preprocessor=None)
    assert head.preprocessor is None
    assert head(_images()).shape == (2, 7)
    pooled = ViTImageClassifier.from_preset(saved, pooling="map")
    found = _bits(pooled)
    assert found["logits/kernel"] == whole["logits/kernel"]
    assert "pooling/probe" in found


CHANGES = {
    "adapters": lambda model: model.enable_lora(2),
    "DoRA": lambda model: model.enable_lora(2, dora=True, targets=("query", "down")),
    "rows": lambda model: model.enable_lora(2, trainable_token_indices=[5, 2]),
    "copies": lambda model: model.enable_lora(2, modules_to_save=["final_norm"]),
    "int8": lambda model: model.quantize("int8"),
    "int4": lambda model: model.quantize("int4"),
    "nf4": lambda model: model.quantize("nf4"),
    "fp4, blocks": lambda model: model.quantize("fp4", block=32, double=False),
    "int8 with adapters": lambda model: (model.quantize("int8"), model.enable_lora(2)),
    "another vocabulary": lambda model: model.backbone.resize_token_embeddings(400),
    "frozen block": lambda model: setattr(model.backbone.blocks[0], "trainable", False),
}


@pytest.mark.each_time("nf4", "int8 with adapters", "copies", "rows", on=("jax", "tensorflow"))
@pytest.mark.each_backend
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_random_weights_of_a_changed_model_have_its_variables(change, tmp_path):
    model = GemmaCausalLM.from_preset("gemma3_debug")
    change(model)
    model.save_to_preset(tmp_path / "changed")
    random = GemmaCausalLM.from_preset(tmp_path / "changed", load_weights=False)
    for one, other in zip(random.weights, model.weights, strict=True):
        assert (one.path, one.shape, one.dtype) == (other.path, other.shape, other.dtype)
        assert one.trainable == other.trainable
    logits = to_numpy(random(np.arange(1, 9)[None]))
    assert 0.5 < logits.std() < 2.0, "a kernel is empty"


def test_quantized_kernels_that_wait_for_a_plan_are_refused(tmp_path):
    model = GemmaCausalLM.from_preset("gemma3_debug")
    model.quantize("int8")
    model.save_to_preset(tmp_path / "q")
    deferred.switch(True)
    try:
        message = "q is quantized, and random weights are drawn after the model is sharded"
        refused(message, GemmaCausalLM.from_preset, tmp_path / "q", load_weights=False)
    finally:
        deferred.switch(False)


def test_a_saved_backbone_needs_num_classes(tmp_path):
    backbone = ViTBackbone.from_preset("vit_debug")
    backbone.save_to_preset(tmp_path / "b")
    assert _bits(ViTBackbone.from_preset(tmp_path / "b")) == _bits(backbone)
    refused("b has no head; give num_classes", ViTImageClassifier.from_preset, tmp_path / "b")
    assert ViTImageClassifier.from_preset(tmp_path / "b", num_classes=3).num_classes == 3


@pytest.mark.each_backend
def test_another_image_size_moves_positions_and_preprocessor(model, saved):
    wide = ViTImageClassifier.from_preset(saved, image_shape=(24, 40, 3))
    assert wide.preprocessor.image_size == (24, 40)
    assert wide(_images((24, 40, 3))).shape == (2, 5)
    table = to_numpy(variables(wide)["tokens/position_embedding"])
    old = to_numpy(variables(model)["tokens/position_embedding"])
    np.testing.assert_array_equal(table[:, 0], old[:, 0])
    assert table.shape == (1, 16, 16)


def test_a_wrong_size_lists_what_does_not_fit(saved):
    with pytest.raises(InputError, match=r"preset does not fit the model: 16 variables without"):
        ViTImageClassifier.from_preset(saved, num_layers=3)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "manifest.json"])
def test_any_flipped_bit_is_found(saved, tmp_path, name):
    folder = shutil.copytree(saved, tmp_path / "copy")
    file = folder / name
    content = file.read_bytes()
    rng = np.random.default_rng(len(content))
    for _ in range(40):
        place, bit = int(rng.integers(len(content))), int(rng.integers(8))
        # A manifest's layout may change as long as it says the same.
        damaged = bytearray(content)
        damaged[place] ^= 1 << bit
        if name == "manifest.json" and _same_json(content, bytes(damaged)):
            continue
        file.write_bytes(damaged)
        with pytest.raises(InputError):
            native.verify_manifest(folder, (native.CONFIG, native.WEIGHTS))
    file.write_bytes(content)
    native.verify_manifest(folder, (native.CONFIG, native.WEIGHTS))
    file.unlink()
    refused(f"{name}", ViTBackbone.from_preset, folder)


def _same_json(left: bytes, right: bytes) -> bool:
    try:
        return json.loads(left) == json.loads(right)
    except ValueError:
        return False


def test_damage_is_described(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "copy")
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    refused(r"the content of model\.safetensors was changed; copy", ViTBackbone.from_preset, folder)
    weights.write_bytes(content[:-4])
    refused(r"model\.safetensors has \d+ bytes, not \d+", ViTBackbone.from_preset, folder)
    (folder / "manifest.json").write_text('{"files": {}}')
    refused(r"manifest\.json lists no files", ViTBackbone.from_preset, folder)
    (folder / "manifest.json").unlink()
    refused(r"copy lacks manifest\.json, so its files cannot be", ViTBackbone.from_preset, folder)


def test_files_of_a_later_version_or_another_family(saved, tmp_path):
    for change, message in (
        ({"kmodels": {"format": 2}}, "has format 2; this version reads format 1"),
        ({"family": "gemma"}, "holds a model of the family 'gemma', not 'vit'"),
    ):
        (tmp_path / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
        description = json.loads((saved / "config.json").read_text()) | change
        (tmp_path / "config.json").write_text(json.dumps(description))
        native.write_manifest(tmp_path)
        refused(message, ViTBackbone.from_preset, tmp_path)


def test_saving_never_replaces_what_is_not_ours(model, tmp_path):
    folder = tmp_path / "mine"
    model.save_to_preset(folder)
    model.save_to_preset(folder)
    (folder / "thesis.txt").write_text("x")
    refused(r"mine also holds thesis\.txt, which would be lost", model.save_to_preset, folder)
    refused(r"mine also holds manifest\.json, thesis\.txt", model.export_to_transformers, folder)
    refused(r"thesis\.txt is a file; give a directory", model.save_to_preset, folder / "thesis.txt")


def test_unknown_names_suggest_near_ones(tmp_path):
    with pytest.raises(
        InputError, match=r"'vit_smal_patch16_224' is neither a preset .* vit_small_patch16"
    ):
        ViTBackbone.from_preset("vit_smal_patch16_224")
    refused("there is no file or directory no/such", ViTBackbone.from_preset, "no/such")
    with pytest.raises(InputError, match="has no setting 'num_clases'; did you mean num_classes"):
        ViTImageClassifier.from_preset("vit_debug", num_clases=3)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    refused("is not a vit model but bert; give a directory with", ViTBackbone.from_preset, tmp_path)


def test_the_network_is_asked_only_by_name_and_needs_its_package(saved, monkeypatch):
    for scheme, module, package in (
        ("hf", "huggingface_hub", "huggingface-hub"),
        ("kaggle", "kagglehub", "kagglehub"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(InputError, match=f"{scheme}://a/b needs the package {package}: pip"):
            ViTBackbone.from_preset(f"{scheme}://a/b")
    asked = []
    download = lambda name: asked.append(name) or str(saved)  # noqa: E731
    fake = types.SimpleNamespace(snapshot_download=download, model_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    monkeypatch.setitem(sys.modules, "kagglehub", fake)
    for name in ("hf://a/b", Path("hf://a/b"), "HF://a/b", "kaggle://a/b", Path("kaggle://a/b")):
        ViTBackbone.from_preset(name)
    assert asked == ["a/b"] * 5


def test_errors_of_a_hub_are_one_line(monkeypatch):
    asked = []

    def download(name):
        asked.append(name)
        raise RuntimeError(f"no {name}\nhere")

    fake = types.SimpleNamespace(snapshot_download=download, model_download=download)
    for scheme, module in (("hf", "huggingface_hub"), ("kaggle", "kagglehub")):
        monkeypatch.setitem(sys.modules, module, fake)
        line = f"cannot read {scheme}://a/b: RuntimeError: no a/b here; check the address"
        for call in (ViTBackbone.from_preset, presets.causal_lm_of):
            refused(line, call, f"{scheme}://a/b")
    assert len(asked) == 4  # once for each call, not for each family


STRANGE = {
    "of Python": (5, "a preset is a name, a path or an address, not a int"),
    "none": (None, "not a NoneType"),
    "bytes": (b"vit_debug", "not a bytes"),
    "another's home": ("~nobody-of-this-name/x", "there is no such user; give the whole path"),
    "long": ("a" * 300, "a... is longer than a path can be"),
    "deep": ("a/" * 3000, "is longer than a path can be"),
    "a name on the hub": (
        "google/vit-base",
        "directory google/vit-base; .*, give hf://google/vit-",
    ),
    "a path": ("../vit/base", "there is no file or directory ../vit/base$"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_presets_that_nothing_can_be(name):
    preset, line = STRANGE[name]
    refused(line, ViTBackbone.from_preset, preset)


def test_a_preset_of_keras_hub_names_its_reader(tmp_path):
    described = {"class_name": "ViTBackbone", "registered_name": "keras_hub>ViTBackbone"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    refused(
        "keras-hub .keras_hub>ViTBackbone.; read it with kmodels.interop.keras_hub.from_hub",
        ViTBackbone.from_preset,
        tmp_path,
    )
