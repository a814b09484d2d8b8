"""LoRA adapters as GGUF files: with them, the base's file becomes that of the merged model."""

import json
import re

import numpy as np
import pytest

import command_line
from kmodels.models import (
    Gemma3ImageTextLM,
    GemmaCausalLM,
    Llama3CausalLM,
    Qwen3CausalLM,
    ViTImageClassifier,
)
from kmodels.tools.convert import convert
from kmodels.weights import read_safetensors, write_safetensors
from refusals import refused

pytestmark = pytest.mark.needs("gguf")

# Queries and keys of a Llama lie in another order in a file, Gemma 4 has heads of two widths, and
# llama.cpp takes some settings of the others for granted.
PRESETS = {
    "gemma": (GemmaCausalLM, {}, "all-linear"),
    "gemma2": (GemmaCausalLM, {"query_head_dim_normalize": True}, "all-linear"),
    "gemma3": (GemmaCausalLM, {"global_rope_scaling_factor": 8.0}, "all-linear"),
    "gemma4": (GemmaCausalLM, {}, r"block_\d+/.*"),
    "llama3": (Llama3CausalLM, {}, "all-linear"),
    "qwen3": (Qwen3CausalLM, {}, "all-linear"),
}
# Settings that llama.cpp's scale by alpha / rank expresses, and alpha in the file.
SETTINGS = {
    "usual": ({"rank": 4, "alpha": 6.0}, 6.0),
    "rslora": ({"rank": 4, "alpha": 6.0, "rslora": True}, 12.0),
}


def base(family, **changes):
    task, settings, targets = PRESETS[family]
    model = task.from_preset(f"{family}_debug", preprocessor=None, **settings, **changes)
    return model, targets


def train(model):
    for i, weight in enumerate(model.trainable_variables):
        weight.assign(np.random.default_rng(i).normal(size=weight.shape) / 3)


def content(path):
    import gguf

    reader = gguf.GGUFReader(path)
    settings = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {x.name: np.array(x.data) for x in reader.tensors}
    return settings, tensors, {x.name: x.tensor_type.name for x in reader.tensors}


def added(tensors, alpha):
    """The changes of the base's tensors, as llama.cpp computes them."""
    names = {name.removesuffix(".lora_a") for name in tensors if name.endswith(".lora_a")}
    assert {f"{name}.{part}" for name in names for part in ("lora_a", "lora_b")} == set(tensors)
    changes = {}
    for name in names:
        first, second = (tensors[f"{name}.{part}"].astype("float64") for part in PARTS)
        changes[name] = second @ first * (alpha / len(first))
    return changes


PARTS = ("lora_a", "lora_b")


@pytest.mark.parametrize("family", PRESETS)
@pytest.mark.parametrize("kind", SETTINGS)
def test_base_and_adapter_are_the_merged_model(tmp_path, family, kind):
    model, targets = base(family)
    _, before, _ = content(model.export_to_gguf(tmp_path / "base.gguf", "float32"))
    settings, alpha = SETTINGS[kind]
    model.backbone.enable_lora(**settings, targets=targets)
    train(model)
    path = model.export_adapter_to_gguf(tmp_path / "adapter.gguf")
    described, tensors, types = content(path)
    assert described["general.architecture"] == family.replace("llama3", "llama")
    assert (described["general.type"], described["adapter.type"]) == ("adapter", "lora")
    assert described["adapter.lora.alpha"] == alpha
    assert set(types.values()) == {"F32"}
    changes = added(tensors, alpha)
    model.merge_lora()
    _, after, _ = content(model.export_to_gguf(tmp_path / "merged.gguf", "float32"))
    linear = {x for x in before if before[x].ndim == 2 and x.startswith("blk.")}
    assert set(changes) == linear
    for name, array in before.items():
        if name not in changes:
            np.testing.assert_array_equal(after[name], array, err_msg=name)
            continue
        assert np.abs(changes[name]).max() > 0.1
        merged = (array + changes[name]).astype("float32")
        np.testing.assert_array_max_ulp(after[name], merged, maxulp=1)


def test_ranks_and_alphas_that_differ_between_layers(tmp_path):
    # By the patterns of PEFT's configuration.
    model, _ = base("qwen3")
    model.backbone.enable_lora(4, alpha=6.0, targets=("query", "down"))
    train(model)
    model.save_adapter(tmp_path / "it")
    config = json.loads((tmp_path / "it" / "adapter_config.json").read_text())
    config |= {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 3.0}}
    arrays = {name: x.read() for name, x in read_safetensors(tmp_path / "it").items()}
    cut = {name: x[:2] if "lora_A" in name else x[:, :2] for name, x in arrays.items()}
    arrays |= {name: x for name, x in cut.items() if "q_proj" in name}
    (tmp_path / "it" / "adapter_config.json").write_text(json.dumps(config))
    write_arrays(tmp_path / "it", arrays)
    again, _ = base("qwen3")
    again.load_adapter(tmp_path / "it")
    path = again.export_adapter_to_gguf(tmp_path / "adapter.gguf", "float16")
    described, tensors, types = content(path)
    assert described["adapter.lora.alpha"] == 6.0 and set(types.values()) == {"F16"}
    for name, change in added(tensors, 6.0).items():
        layer, down = int(name.split(".")[1]), "ffn_down" in name
        part = f"model.layers.{layer}.{'mlp.down' if down else 'self_attn.q'}_proj.lora"
        first, second = (arrays[f"base_model.model.{part}_{x}.weight"] for x in "AB")
        scale = (3.0 if down and layer == 1 else 6.0) / len(first)
        assert len(first) == (4 if down else 2)
        # Each factor is rounded to 11 bits.
        limit = 2.0**-10 * np.abs(second) @ np.abs(first) * scale
        assert (np.abs(change - second @ first * scale) <= limit + 1e-6).all()


def write_arrays(folder, arrays):
    from kmodels.weights import LazyArray

    def lazy(array):
        array = np.ascontiguousarray(array)
        return LazyArray(array.shape, array.dtype, lambda: array)

    tensors = {name: lazy(array) for name, array in arrays.items()}
    write_safetensors(folder / "adapter_model.safetensors", tensors, {"format": "pt"})


# === What llama.cpp's adapters lack ===

REFUSED = {
    "no adapters": (("qwen3", {}), None, "has no LoRA adapters; call enable_lora or load_adapter"),
    "DoRA": (("qwen3", {}), {"dora": True}, r"have no DoRA, and block_\d/attention/\w+ has; call"),
    "rows": (
        ("gemma3", {}),
        {"trainable_token_indices": [3]},
        "no place for the trained token_embedding",
    ),
    "modules": (
        ("gemma3", {}),
        {"modules_to_save": ["final_norm"]},
        "no place for the trained final_norm",
    ),
    "table": (
        ("qwen3", {}),
        {"targets": ["query", "token_embedding"]},
        "no place for the trained token_embedding; call merge_lora and export",
    ),
    "output layer": (
        ("qwen3", {}),
        {"targets": ["reverse_embeddings"]},
        "no place for the trained token_embedding/reverse_embeddings; call merge_lora and export",
    ),
    "outside the blocks": (
        ("gemma4", {}),
        {"targets": ["model_projection"]},
        "no place for the trained per_layer_embedding/model_projection; call merge_lora",
    ),
    "no file of the base": (
        ("qwen3", {"attention_bias": True}),
        {},
        "a GGUF file of Qwen 3 has no place for attention_bias",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_adapter_of_llama_cpp_lacks(tmp_path, name):
    (family, changes), settings, message = REFUSED[name]
    model, _ = base(family, **changes)
    if settings is not None:
        model.backbone.enable_lora(2, **settings)
    for _ in range(2):
        refused(message, model.export_adapter_to_gguf, tmp_path / "it.gguf")
        model.trainable = False  # which does not make them the base's
    assert not list(tmp_path.iterdir())


def test_a_norm_or_a_tower_that_is_trained_is_named(tmp_path):
    model, _ = base("qwen3")
    model.backbone.enable_lora(2)
    norm = next(x for x in model.weights if x.path == "final_norm/scale")
    norm.trainable = True
    refused("trained final_norm/scale; call", model.export_adapter_to_gguf, tmp_path / "it.gguf")
    images = Gemma3ImageTextLM.from_preset("gemma3_vision_debug", num_layers=1)
    images.backbone.enable_lora(2, targets="all-linear")
    message = r"no place for the trained vision_encoder/\S+ and \d+ more; call merge_lora"
    refused(message, images.export_adapter_to_gguf, tmp_path / "it.gguf")
    model, _ = base("qwen3")
    model.backbone.enable_lora(2)
    refused(r"ends in \.gguf", model.export_adapter_to_gguf, tmp_path / "it.bin")
    message = "dtype is 'q8_0'; adapters in GGUF files are written as float32 or float16"
    refused(message, model.export_adapter_to_gguf, tmp_path / "it.gguf", "q8_0")
    second = next(x for x in model.weights if x.path == "block_0/attention/query/lora_b")
    second.assign(np.full(second.shape, np.inf))
    message = r"blk\.0\.attn_q\.weight\.lora_b holds NaN or infinite values"
    refused(message, model.export_adapter_to_gguf, tmp_path / "it.gguf")
    assert not list(tmp_path.iterdir())


# === The command ===


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base, an adapter of it, and an adapter of a model with other sizes."""
    made = tmp_path_factory.mktemp("adapter")
    for name, changes in (("other", {"intermediate_dim": 96}), ("adapter", {})):
        model, targets = base("gemma3", **changes)
        model.save_to_preset(made / "base")
        model.backbone.enable_lora(3, targets=targets)
        train(model)
        model.save_adapter(made / name)
    model.export_adapter_to_gguf(made / "expected.gguf")
    return made


def test_the_command_writes_and_compares(folder, tmp_path, capsys):
    arguments = ["convert", folder / "adapter", tmp_path / "it.gguf", "--to", "gguf-lora"]
    # A link is replaced, and what it led to stays.
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "it.gguf").symlink_to(tmp_path / "victim")
    assert command_line.run(*arguments, "--base", folder / "base") == 0
    told = capsys.readouterr().out
    assert "it.gguf (gguf-lora, float32, " in told and told.count("\n") == 1
    assert "differs by" in told and "changes of weights up to" in told
    assert (tmp_path / "it.gguf").read_bytes() == (folder / "expected.gguf").read_bytes()
    assert not (tmp_path / "it.gguf").is_symlink()
    assert (tmp_path / "victim").read_text() == "mine"
    # A model in memory, and half precision.
    model = GemmaCausalLM.from_preset(folder / "base")
    model.load_adapter(folder / "adapter")
    assert convert(model, tmp_path / "it.gguf", "gguf-lora").difference == 0.0
    assert (tmp_path / "it.gguf").read_bytes() == (folder / "expected.gguf").read_bytes()
    half = convert(model, tmp_path / "it.gguf", "gguf-lora", dtype="float16")
    assert half.difference is not None and 0.0 < half.difference < half.largest / 100


def test_the_text_part_of_a_base(tmp_path):
    whole = Gemma3ImageTextLM.from_preset(
        "gemma3_vision_debug", num_layers=1, global_rope_scaling_factor=8.0
    )
    whole.export_to_transformers(tmp_path / "base")
    with pytest.warns(UserWarning, match="are left out"):
        text = GemmaCausalLM.from_preset(tmp_path / "base")
    text.backbone.enable_lora(2)
    train(text)
    text.save_adapter(tmp_path / "adapter")
    text.export_adapter_to_gguf(tmp_path / "expected.gguf")
    path, base = tmp_path / "it.gguf", tmp_path / "base"
    convert(tmp_path / "adapter", path, "gguf-lora", base=base, text_only=True)
    assert path.read_bytes() == (tmp_path / "expected.gguf").read_bytes()


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("adapter", [], "gguf-lora needs base: the model that the adapter was trained on"),
        ("other", ["--base", "base"], r"other does not fit the model: .*mlp.* the model needs"),
        ("base", ["--base", "base"], r"base holds no adapter_config\.json; give a directory"),
        ("adapter", ["--base", "vit"], "gguf-lora holds models of .*; this is a ViT|does not fit"),
        ("adapter", ["--base", "base", "--adapter", "adapter"], "leave adapter out"),
        ("adapter", ["--base", "base", "--dtype", "q4_k_m"], "gguf-lora is written as float32, fl"),
        ("base", ["--to", "gguf", "--base", "base"], "base is .*; only gguf-lora of an adapter's"),
        (
            "adapter",
            ["--base", "base", "--mmproj", "vit"],
            "mmproj is .*; only gguf has a separate",
        ),
    ],
)
def test_what_is_wrong_is_told_in_a_line(folder, tmp_path, capsys, source, options, message):
    if "vit" in options and not (folder / "vit").is_dir():
        ViTImageClassifier.from_preset("vit_debug", num_classes=2).save_to_preset(folder / "vit")
    paths = [folder / x if x in ("base", "adapter", "vit") else x for x in options]
    to = [] if "--to" in options else ["--to", "gguf-lora"]
    assert command_line.run("convert", folder / source, tmp_path / "it.gguf", *to, *paths) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert re.search(message, told), told
    assert not list(tmp_path.iterdir())
