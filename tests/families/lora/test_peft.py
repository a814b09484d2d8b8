"""Adapters to and from PEFT's files, and files of `save_lora_weights` that do not fit."""

import json
import re
import shutil

import h5py
import keras
import numpy as np
import pytest

from arrays import read_npz
from kmodels import InputError, lora
from kmodels.layers.changes import adapters
from kmodels.lora import adapter_files, modules
from kmodels.models import GemmaCausalLM, ViTBackbone, ViTImageClassifier
from kmodels.weights import read_safetensors
from refusals import refused
from tolerances import tolerance

CASES = {
    "vit_plain": ("query", "value"),
    "vit_rslora": ("mlp/up", "attention/output"),
    "vit_dora": ("query", "key", "value", "attention/output", "up", "down"),
    "vit_head": ("query",),
    "gemma_plain": ("query", "value"),
    "gemma_dora": ("gate", "key"),
    "gemma_rows": ("query",),
    "gemma_table": ("query",),
}
NARROW = ("vit_rslora", "gemma_dora")


def numpy(x):
    return np.asarray(keras.ops.convert_to_numpy(x), "float32")


def base(case, references):
    family = case.split("_")[0]
    cls = {"vit": ViTImageClassifier, "gemma": GemmaCausalLM}[family]
    dtype = "mixed_bfloat16" if case in NARROW else "float32"
    return cls.from_preset(references / "lora" / family, preprocessor=None, dtype=dtype)


def logits(model, inputs):
    if inputs.dtype == np.int32:
        inputs = {"token_ids": inputs, "padding_mask": np.ones_like(inputs)}
    return numpy(model(inputs, training=False))


@pytest.mark.parametrize("case", CASES)
def test_a_file_of_peft_gives_its_logits(case, references, tmp_path):
    folder = references / "lora" / case
    expected = read_npz(folder / "expected.npz")
    model = base(case, references)
    plain = logits(model, expected["inputs"])
    assert np.abs(plain - expected["logits"]).max() > 0.01
    model.load_adapter(folder / "adapter")
    found = logits(model, expected["inputs"])
    # Of the narrow ones in their place: closer to it than to what the base alone gives.
    limit = tolerance("logits", "bfloat16" if case in NARROW else "float32")
    limit *= max(1, np.abs(expected["logits"]).max())
    assert np.abs(plain - expected["logits"]).max() > 2 * limit
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=limit)
    wanted = {path for path in adapters(model) for t in CASES[case] if path.endswith(f"/{t}")}
    assert set(adapters(model)) == wanted and len(wanted) == 2 * len(CASES[case])
    # What is written here are the same tensors under the same names.
    if case == "vit_head":
        head = [v for v in model.trainable_weights if "logits" in v.path]
        assert len(head) == 2
    elif case.startswith("vit"):
        model.get_layer("logits").trainable = False
    model.save_adapter(tmp_path / "adapter")
    ours, theirs = (
        read_safetensors(f / "adapter_model.safetensors")
        for f in (tmp_path / "adapter", folder / "adapter")
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        expected = np.asarray(tensor.read(), "float32")
        if "trainable_tokens" in name:  # written here in the order of the ids
            config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
            expected = expected[np.argsort(config["trainable_token_indices"])]
        np.testing.assert_array_equal(ours[name].read(), expected)


def tiny(layers=2, mlp_dim=24, **settings):
    """A backbone, with adapters if there are settings of them."""
    sizes = {"num_layers": layers, "hidden_dim": 16, "mlp_dim": mlp_dim}
    model = ViTBackbone(image_shape=(8, 8, 1), patch_size=4, num_heads=2, **sizes)
    if settings:
        model.enable_lora(**{"rank": 2, **settings})
    return model


def test_names_follow_the_family_and_a_bare_backbone_has_no_prefix(tmp_path):
    backbone = tiny()
    backbone.enable_lora(2, targets=r"block_0/attention/(query|output)")
    backbone.save_adapter(tmp_path / "bare")
    names = set(read_safetensors(tmp_path / "bare" / "adapter_model.safetensors"))
    stem = "base_model.model.layers.0.attention"
    assert names == {
        f"{stem}.{name}.lora_{x}.weight" for name in ("q_proj", "o_proj") for x in "AB"
    }
    config = json.loads((tmp_path / "bare" / "adapter_config.json").read_text())
    # The names alone would mean block 1 as well.
    assert config["target_modules"] == ["layers.0.attention.o_proj", "layers.0.attention.q_proj"]
    # Adapters of a backbone fit a task over it.
    task = ViTImageClassifier(tiny(), num_classes=3)
    task.load_adapter(tmp_path / "bare")
    assert set(adapters(task)) == {"block_0/attention/query", "block_0/attention/output"}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter that fits `tiny`, which tests copy."""
    backbone = tiny()
    backbone.enable_lora(2)
    return backbone.save_adapter(tmp_path_factory.mktemp("written") / "adapter")


@pytest.fixture(scope="module")
def plain():
    """A model that takes no adapter in."""
    return tiny()


def test_layers_that_transformers_has_no_name_for_are_refused(tmp_path):
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
    tower = ViTBackbone(image_shape=(8, 8, 1), patch_size=4, use_class_token=False, **sizes)
    model = ViTImageClassifier(tower, num_classes=0, pooling="map")
    lora.enable(model, lora.LoraSettings(2, targets=("key", "mlp/up")))
    with pytest.raises(InputError, match="has no name for pooling/attention/key, so that PEFT"):
        model.save_adapter(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_ranks_and_alphas_of_single_layers_survive(tmp_path):
    first = tiny()
    settings = {"rank": 2, "alpha": 3.0, "targets": ("query",)}
    others = {"rank": 3, "alpha": 4.5, "targets": ("query",)}
    lora.restore(first, {"block_0/attention/query": settings, "block_1/attention/query": others})
    for adapter in adapters(first).values():
        adapter.b.assign(np.ones(adapter.b.shape, "float32"))
    config = json.loads((first.save_adapter(tmp_path / "a") / "adapter_config.json").read_text())
    assert sorted(config["rank_pattern"].values()) in ([2], [3])
    assert len(config["alpha_pattern"]) == 1
    again = tiny()
    again.load_adapter(tmp_path / "a")
    for path, adapter in adapters(first).items():
        assert adapters(again)[path].settings.scaling == adapter.settings.scaling
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 1)).astype("float32")
    first.set_weights(again.get_weights())
    np.testing.assert_array_equal(numpy(again(images)), numpy(first(images)))


ABSENT = "absent"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA", "bias": "some"}, "unsupported kind: peft_type='LOHA', bias='some'"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights='pissa_niter_4', which changes the base too",
        ),
        ({"init_lora_weights": "OLoRA"}, "init_lora_weights='OLoRA', which changes the base too"),
        (
            {"use_new_kind": True, "new_number": 3, "new_list": [], "new_flag": False},
            "unsupported kind: use_new_kind=True, new_number=3$",
        ),
        (
            {"layer_replication": [[0, 1]], "fan_in_fan_out": True},
            r"fan_in_fan_out=True, layer_replication=\[\[0, 1\]\]$",
        ),
        (
            {"alpha_pattern": {"q_proj": "many"}},
            "alpha_pattern: q_proj is 'many'; give a whole number or a number",
        ),
        ({"trainable_token_indices": [1, 2]}, "is damaged: settings"),
        (
            {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
            "is damaged: settings",
        ),
        ({"r": ABSENT}, "has no r and lora_alpha"),
    ],
)
def test_files_that_mean_something_else_are_refused(adapter, plain, tmp_path, change, message):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= change
    config = {name: value for name, value in config.items() if value != ABSENT}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    refused(message, plain.load_adapter, folder)
    assert not adapters(plain)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, None),
        ({"exclude_modules": "q_proj", "layers_to_transform": [0, 1, 2]}, None),
        ({"exclude_modules": ["q_proj"]}, "layers.0.attention.q_proj"),
        ({"exclude_modules": r".*\.0\..*"}, "layers.0.attention."),
        ({"layers_to_transform": 1}, "layers.0.attention."),
    ],
)
def test_modules_that_settings_leave_out_are_named(adapter, tmp_path, caplog, change, named):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | change))
    tiny().load_adapter(folder)
    assert ("which its settings leave out" in caplog.text) == (named is not None)
    assert named is None or f"holds adapters of {named}" in caplog.text


def test_a_directory_without_one_of_its_files_is_refused(adapter, plain, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        (folder / file).unlink()
        refused(f"holds no {file}", plain.load_adapter, folder)
        assert not adapters(plain)


# === Files of `save_lora_weights` ===


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("lora") / "two_layers.lora.h5"
    tiny(targets=("query", "up")).save_lora_weights(path)
    return path


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"layers": 1}, "block_1/attention/query is not a linear layer here"),
        ({"layers": 2, "mlp_dim": 8}, "block_0/mlp/up has other sizes there"),
        ({"layers": 2, "targets": "all-linear"}, "attention/key has an adapter only here"),
        ({"layers": 2, "targets": ("query",)}, "block_0/mlp/up has an adapter only there"),
        (
            {"layers": 2, "targets": ("query", "up"), "rank": 3},
            "rank 3 here and 2 there, and the r",
        ),
        (
            {"layers": 2, "targets": ("query", "up"), "rslora": True},
            "block_0/attention/query was enabled there with {'rank': 2, ",
        ),
    ],
)
def test_a_file_of_another_model_is_refused(file, model, message):
    model = tiny(**model)
    trained = len(model.trainable_weights)
    refused(message, model.load_lora_weights, file)
    assert len(model.trainable_weights) == trained


def test_a_file_of_keras_hub_is_told_where_it_is_read(tmp_path):
    with h5py.File(tmp_path / "hub.lora.h5", "w") as written:
        written.create_group("lora/0")
    with pytest.raises(InputError, match=r"numbers layers; read it with kmodels\.interop"):
        tiny().load_lora_weights(tmp_path / "hub.lora.h5")


# === Patterns ===

SLOW = ["(a+)+!", "(a|a)*!", "(.*.*)*!", "((a?){30}a{30})*!", "(?:(?:[a-z/_0-9]|.)+)+!"]


@pytest.mark.once
@pytest.mark.parametrize("pattern", SLOW)
@pytest.mark.parametrize("place", ["targets", "rank_pattern", "alpha_pattern"])
def test_a_pattern_that_backtracks_for_ever_is_refused(
    place, pattern, adapter, tmp_path, monkeypatch
):
    monkeypatch.setattr(modules, "SECONDS", 0.3)
    names = ["a" * 60]  # which would take years
    message = re.escape(f"the pattern {pattern!r} takes more than")
    if place == "targets":
        refused(message, modules.meant, names, pattern)
        return
    config = json.loads((adapter / "adapter_config.json").read_text()) | {place: {pattern: 3}}
    refused(message, adapter_files.settings(config, tmp_path).of, names)


@pytest.mark.once
def test_patterns_with_groups_mean_what_they_mean():
    names = ["block_0/mlp/up", "block_1/mlp/down", "block_10/attention/query"]
    found = modules.matching(r"block_(0|1)/(mlp|attention)/.*", names)
    assert found == {"block_0/mlp/up", "block_1/mlp/down"}
    refused(r"'a\(' is not a pattern: missing", modules.matching, "a(", names)
