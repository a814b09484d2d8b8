"""`kmodels convert`: each format from each backend, in the runtime that it is for."""

import json
import re
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import command_line
from kmodels.core.errors import InputError
from kmodels.models import (
    CLIPTextModelWithProjection,
    CLIPVisionEncoder,
    Gemma3ImageTextLM,
    Gemma4ImageTextLM,
    GemmaBackbone,
    GemmaCausalLM,
    GemmaCausalLMPreprocessor,
    GemmaTextEmbedder,
    ImageTextSimilarity,
    Llama3CausalLM,
    Qwen3CausalLM,
    SigLIPTextEncoder,
    ViTBackbone,
    ViTImageClassifier,
    ViTMAEForPreTraining,
    ViTObjectDetector,
)
from kmodels.text import demo
from kmodels.text.training import train_tokenizer
from kmodels.tools import convert as converting
from kmodels.tools.convert import FORMATS, Differs, convert, table
from refusals import refused
from tolerances import tolerance

BACKEND = keras.backend.backend()
DOCS = Path(__file__).resolve().parents[3] / "docs" / "convert.md"
TRACED = [name for name, form in FORMATS.items() if form.traced]
# Tracing takes seconds: each format from each backend that writes it, with every family once.
CASES = {
    "jax": {
        "savedmodel": ["vit"],
        "stablehlo": ["vit", "gemma", "llama3", "qwen3", "clip", "embed"],
    },
    "torch": {
        "onnx": ["gemma", "llama3", "qwen3", "clip", "embed"],
        "openvino": ["vit", "llama3", "qwen3", "clip", "embed"],
        "torch-export": ["vit", "gemma", "llama3", "qwen3", "clip", "embed"],
    },
    "tensorflow": {
        "onnx": ["vit"],
        "savedmodel": ["gemma", "llama3", "qwen3", "clip", "embed"],
        "litert": ["vit", "gemma", "llama3", "qwen3", "clip", "embed"],
        "openvino": ["gemma"],
    },
}


def vit():
    return ViTImageClassifier(ViTBackbone.from_preset("vit_debug", num_layers=1), 7)


CAPS = {
    **{"attention_logit_soft_cap": 2.0, "final_logit_soft_cap": 2.0},
    "query_head_dim_normalize": True,
}
# A model of each family, one block each; caps and windows that bite, and an image's token that no
# text of the samples holds.
MAKE = {
    "vit": vit,
    "gemma": lambda: GemmaCausalLM.from_preset("gemma2_debug", num_layers=1, **CAPS),
    "gemma_vision": lambda: Gemma3ImageTextLM.from_preset("gemma3_vision_debug", num_layers=1),
    "gemma4_vision": lambda: Gemma4ImageTextLM.from_preset(
        "gemma4_unified_debug", num_layers=2, image_token_id=320
    ),
    "llama3": lambda: Llama3CausalLM.from_preset("llama3_debug", num_layers=1),
    "qwen3": lambda: Qwen3CausalLM.from_preset("qwen3_debug", num_layers=1),
    "clip": lambda: CLIPTextModelWithProjection.from_preset("clip_text_debug", num_layers=1),
    "embed": lambda: GemmaTextEmbedder.from_preset("embedding_gemma_debug", num_layers=1),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Callable[[str], Path]:
    """Returns a function that gives the directory of a model and writes it on first use."""
    folder = tmp_path_factory.mktemp("sources")

    @cache
    def source(name: str) -> Path:
        keras.utils.set_random_seed(0)
        MAKE[name]().save_to_preset(folder / name)
        return folder / name

    return source


def destination_of(folder: Path, name: str) -> Path:
    return folder / f"model{FORMATS[name].suffix}"


# === Each format ===


def test_a_part_of_a_source_is_named(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(converting, "_ask", lambda *given: (None, "not asked"))
    sizes: Any = {f"decoder_{name}": 4 for name in ("hidden_size", "intermediate_size")}
    sizes |= {f"decoder_num_{name}": 1 for name in ("hidden_layers", "attention_heads")}
    mae = ViTMAEForPreTraining(ViTBackbone.from_preset("vit_debug", num_layers=1), **sizes)
    mae.save_to_preset(tmp_path / "ours")
    mae.export_to_transformers(tmp_path / "theirs")
    both = ImageTextSimilarity.from_preset("clip_debug", preprocessor=None)
    both.export_to_transformers(tmp_path / "both")
    for name, warns, whole in (
        ("theirs", True, "ViTMAEForPreTraining"),
        ("both", False, "CLIPModel"),
    ):
        with pytest.warns(UserWarning, match="are left out") if warns else nullcontext():
            found = convert(tmp_path / name, tmp_path / "out", "hf")
        assert "it has only the " in found.line() and found.line().endswith(f" of a {whole}")
    # What a directory has none of is not named.
    for source in (sources("vit"), mae.backbone, tmp_path / "ours"):
        assert "it has only" not in convert(source, tmp_path / "out", "hf").line()
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["architectures"] == ["ViTMAEForPreTraining"]


def test_every_cell_of_the_table_has_a_test():
    for backend, cases in CASES.items():
        assert set(cases) == {name for name in TRACED if backend in FORMATS[name].backends}
    for name in TRACED:
        tried = {family for cases in CASES.values() for family in cases.get(name, ())}
        # An embedder is of Gemma's family, and what it has behind the blocks is its own.
        assert tried - {"embed"} == set(FORMATS[name].families())


@pytest.mark.each_time(
    "onnx-vit", "litert-vit", "savedmodel-vit", "torch-export-vit", "stablehlo-vit"
)
@pytest.mark.across("jax", "torch", "tensorflow")
@pytest.mark.filterwarnings("default")  # of the exporters
@pytest.mark.parametrize(
    ("name", "family"),
    [
        # Other families of a format wait for make test-all.
        pytest.param(name, family, marks=[pytest.mark.nightly] * (number > 0))
        for name, families in CASES[BACKEND].items()
        for number, family in enumerate(families)
    ],
)
def test_a_graph_gives_what_the_model_gives(name, family, sources, tmp_path):
    length = None if family == "vit" else 16
    found = convert(sources(family), destination_of(tmp_path, name), name, sequence_length=length)
    assert found.runtime.startswith(FORMATS[name].runtime.name)
    assert found.difference is not None and found.difference <= tolerance("logits")
    assert found.largest > 0.1 and found.path.exists() and found.bytes > 10_000


@pytest.mark.nightly
@pytest.mark.across("jax", "torch", "tensorflow")
@pytest.mark.filterwarnings("default")  # of the exporters
def test_all_outputs_of_a_model_are_compared(tmp_path, monkeypatch):
    name = {"jax": "stablehlo", "torch": "onnx", "tensorflow": "litert"}[BACKEND]
    keras.utils.set_random_seed(0)
    backbone = ViTBackbone.from_preset("vit_debug", num_layers=1)
    settings: Any = {"num_queries": 3, "num_decoder_layers": 1}
    settings |= {"decoder_dim": 8, "num_decoder_heads": 2}
    ViTObjectDetector(backbone, 2, **settings).save_to_preset(tmp_path / "model")
    found = convert(tmp_path / "model", destination_of(tmp_path, name), name)
    assert found.difference is not None and found.difference <= tolerance("logits")
    compared = []
    monkeypatch.setattr(
        converting, "_distance", lambda left, right: compared.append((left, right)) or 0.0
    )
    convert(tmp_path / "model", destination_of(tmp_path, name), name)
    # Boxes and logits of two samples, from the runtime and from the model.
    assert [x.shape[1:] for side in compared[-1] for x in side] == [(3, 4), (3, 3)] * 4


@pytest.mark.across
@pytest.mark.filterwarnings("default")  # of the peers
@pytest.mark.parametrize(
    ("name", "family"),
    [
        (name, family)
        for name, form in FORMATS.items()
        for family in form.families()
        if not form.traced and not name.startswith("gguf")
    ],
)
def test_a_peer_gives_what_the_model_gives(name, family, sources, tmp_path):
    for dtype in FORMATS[name].dtypes[:2]:
        found = convert(sources(family), destination_of(tmp_path, name), name, dtype=dtype)
        assert found.runtime.startswith(FORMATS[name].runtime.name) and found.rounding is None
        assert found.difference is not None and found.difference <= tolerance("logits")


@pytest.mark.across
def test_transformers_and_the_modules_of_an_embedder(tmp_path):
    dense = [{"units": 40, "activation": "tanh"}, {"units": 24, "use_bias": False}]
    model = GemmaTextEmbedder.from_preset("embedding_gemma_debug", dense=dense, normalize=False)
    model.save_to_preset(tmp_path / "model")
    found = convert(tmp_path / "model", tmp_path / "out", "hf")
    assert found.difference is not None and found.difference <= tolerance("logits")
    assert (tmp_path / "out" / "modules.json").is_file()


@pytest.fixture
def without_llama_cpp(monkeypatch):
    found = partial(filter, lambda name: name == "llama_cpp" or find_spec(name) is None)
    monkeypatch.setattr("kmodels.tools.convert.missing", lambda names: [*found(names)])


@pytest.mark.across
@pytest.mark.parametrize(
    "preset", [*[f"gemma{n}_debug" for n in ("", 2, 3, 4)], "llama3_debug", "qwen3_debug"]
)
def test_transformers_gives_what_a_gguf_holds(preset, tmp_path, without_llama_cpp):
    scale = {"query_head_dim_normalize": True} if preset == "gemma2_debug" else {}
    others = {"llama3_debug": Llama3CausalLM, "qwen3_debug": Qwen3CausalLM}
    model = others.get(preset, GemmaCausalLM).from_preset(preset, **scale)
    for weight in model.weights:  # so that no norm is without effect
        weight.assign(weight + np.random.default_rng(0).normal(size=weight.shape, scale=0.02))
    # How numbers are rounded is the same for each family.
    dtypes = FORMATS["gguf"].dtypes if preset == "gemma3_debug" else ("float32", "q8_0")
    for dtype in dtypes:
        found = convert(model, tmp_path / "model.gguf", "gguf", dtype=dtype)
        assert found.runtime.startswith("transformers ") and found.difference is not None
        assert found.difference <= tolerance("logits")
        assert (found.rounding is None) == (dtype == "float32")


TOWER = {"image_shape": (16, 16, 3), "patch_size": 8, "num_layers": 1, "num_heads": 2}
TOWER |= {"hidden_dim": 16, "mlp_dim": 32}
PARTS = {
    "vision": lambda: CLIPVisionEncoder.from_preset("clip_base_patch32_224", **TOWER),
    "text": lambda: SigLIPTextEncoder.from_preset("siglip_text_debug", num_layers=1),
    "mae": lambda: ViTMAEForPreTraining.from_preset(
        "vit_debug",
        **dict.fromkeys(("decoder_hidden_size", "decoder_intermediate_size"), 8),
        **dict.fromkeys(("decoder_num_hidden_layers", "decoder_num_attention_heads"), 1),
    ),
}


@pytest.mark.across
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", PARTS)
def test_towers_and_models_that_draw_are_compared(name, tmp_path):
    found: Any = convert(PARTS[name](), tmp_path / "out", "hf")
    assert found.runtime.startswith("transformers ")
    assert found.difference <= tolerance("logits")


@pytest.mark.across("torch")
@pytest.mark.filterwarnings("default")
# ONNX is written from a graph of torch.export, so each model needs one of them each time.
@pytest.mark.each_time("mae-torch-export", "merging-onnx")
@pytest.mark.parametrize("to", ["onnx", "torch-export"])
@pytest.mark.parametrize("name", ["mae", "merging"])
def test_models_that_sort_their_tokens_are_graphs(name, to, tmp_path):
    merging = {**TOWER, "image_shape": (32, 32, 3), "token_merging": 2}
    model = ViTBackbone(**merging) if name == "merging" else PARTS[name]()
    found: Any = convert(model, tmp_path / f"out{FORMATS[to].suffix}", to)
    assert found.difference <= tolerance("logits")


def test_a_runtime_that_fails_is_named_in_a_line(sources, tmp_path, monkeypatch):
    def fail(*given):
        raise RuntimeError("first") from ValueError("\x1b[96mthe cause\x1b[0m\nmore")

    runtime = replace(FORMATS["npz"].runtime, packages=(), name="peer")
    monkeypatch.setitem(FORMATS, "npz", replace(FORMATS["npz"], runtime=runtime))
    real = converting.importlib.import_module
    stand_in = types.SimpleNamespace(run_timm_npz=fail)
    monkeypatch.setattr(
        converting.importlib,
        "import_module",
        lambda name, *of: stand_in if name.endswith("graphs_torch") else real(name, *of),
    )
    message = r"peer cannot run the written file, which was not kept \(the cause\); try another"
    refused(message, convert, sources("vit"), tmp_path / "out.npz", "npz")
    assert not list(tmp_path.iterdir())


@pytest.mark.across
def test_a_gguf_of_other_weights_is_not_kept(tmp_path, monkeypatch, without_llama_cpp):
    model, other = (GemmaCausalLM.from_preset("gemma_debug") for _ in range(2))
    other.set_weights(model.get_weights())
    norm = other.backbone.layers[-1].scale
    norm.assign(norm + 0.1)
    monkeypatch.setattr(model, "export_to_gguf", other.export_to_gguf)
    with pytest.raises(Differs, match=r"transformers .* differs by .*model\.gguf was not written"):
        convert(model, tmp_path / "model.gguf", "gguf", dtype="float32")
    assert not list(tmp_path.iterdir())


@pytest.mark.needs("gguf")
@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is built from source")
def test_llama_cpp_gives_what_the_model_gives(sources, tmp_path):
    for dtype in FORMATS["gguf"].dtypes:
        found = convert(sources("gemma"), tmp_path / "model.gguf", "gguf", dtype=dtype)
        assert found.difference is not None
        if dtype == "float32":
            assert found.difference <= tolerance("llama_cpp") and found.rounding is None
        else:
            assert found.rounding is not None and 0 < found.rounding < found.largest / 10
            assert found.difference < found.largest / 10


@pytest.mark.needs("gguf")
@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is built from source")
def test_llama_cpp_cuts_text_as_the_tokenizer_does(tmp_path):
    llama_cpp = import_module("llama_cpp")
    tokenizer = train_tokenizer(demo.texts(), 500)
    model = GemmaCausalLM(
        GemmaBackbone.from_preset("gemma_debug", vocabulary_size=500),
        GemmaCausalLMPreprocessor(tokenizer),
    )
    model.export_to_gguf(tmp_path / "model.gguf")
    theirs = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    for text in (*demo.texts(), "<start_of_turn>user\nhät 貓  12\n\n<end_of_turn>"):
        found = theirs.tokenize(text.encode(), add_bos=False, special=True)
        assert found == tokenizer.tokenize(text)
    assert theirs.tokenize(b"a")[0] == tokenizer.start_token_id
    theirs.close()


@pytest.mark.each_backend
@pytest.mark.parametrize("name", [name for name in TRACED if BACKEND not in FORMATS[name].backends])
def test_what_a_backend_cannot_write_names_one_that_can(name, sources, tmp_path):
    able = " and ".join(FORMATS[name].backends)
    with pytest.raises(InputError, match=f"{name} can be written from {able}, not from {BACKEND}:"):
        convert(sources("vit"), destination_of(tmp_path, name), name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("onnx", "try torch or tensorflow|try torch|try tensorflow"),
        ("stablehlo", "try another format|try jax"),
    ],
)
def test_what_an_exporter_cannot_do_is_told_in_a_line(name, advice, sources, tmp_path, monkeypatch):
    def fail(model, spec, path):
        path.write_bytes(b"half")
        raise RuntimeError("no rule for erfc\nand much more")

    graphs = types.SimpleNamespace(WRITERS={name: fail}, KEEPS={})
    monkeypatch.setattr(converting, "backend_module", lambda stem, seam: graphs)
    monkeypatch.setattr("kmodels.tools.convert.ExportFormat.check_backend", lambda form: None)
    told = rf"{name} could not be written from {BACKEND} \(no rule for erfc\); "
    refused(f"{told}({advice})$", convert, sources("vit"), destination_of(tmp_path, name), name)
    assert not list(tmp_path.iterdir())


def test_the_table_in_the_docs_is_that_of_the_formats():
    assert table() in DOCS.read_text()


# === A merged Gemma ===


@pytest.mark.needs("gguf")
def test_adapters_are_merged_on_the_way(sources, tmp_path, monkeypatch):
    # That transformers reads such files is `test_transformers_gives_what_a_gguf_holds`.
    monkeypatch.setattr("kmodels.tools.convert.missing", lambda names: [*names])
    model = GemmaCausalLM.from_preset(sources("gemma"))
    model.backbone.enable_lora(2)
    for weight in model.trainable_variables:
        weight.assign(np.random.default_rng(0).normal(size=weight.shape) / 3)
    model.save_adapter(tmp_path / "adapter")
    model.save_to_preset(tmp_path / "model")
    with pytest.raises(InputError, match="has LoRA adapters; call merge_lora first"):
        convert(model, tmp_path / "out.gguf", "gguf")
    model.merge_lora()
    convert(model, tmp_path / "merged.gguf", "gguf")
    merged = (tmp_path / "merged.gguf").read_bytes()
    convert(tmp_path / "model", tmp_path / "own.gguf", "gguf")
    convert(sources("gemma"), tmp_path / "beside.gguf", "gguf", adapter=tmp_path / "adapter")
    assert (tmp_path / "own.gguf").read_bytes() == merged
    assert (tmp_path / "beside.gguf").read_bytes() == merged
    convert(sources("gemma"), tmp_path / "without.gguf", "gguf")
    assert (tmp_path / "without.gguf").read_bytes() != merged
    model.export_to_transformers(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "again.gguf", "gguf")
    assert (tmp_path / "again.gguf").read_bytes() == merged


# === Without the runtime, and damage ===


def test_a_runtime_that_is_missing_is_named(sources, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("kmodels.tools.convert.missing", lambda names: [*names])
    monkeypatch.setattr("kmodels.tools.convert.ExportFormat.check_backend", lambda form: None)
    arguments = ["convert", sources("vit"), tmp_path / "model.npz", "--to", "npz"]
    assert command_line.run(*arguments) == 0
    told = capsys.readouterr().out
    assert re.search(r"model\.npz \(npz, float32, .*written, not compared: timm, torch is", told)
    assert "pip install timm" in told and told.count("\n") == 1
    assert ViTImageClassifier.from_preset(tmp_path / "model.npz").num_classes == 7


@pytest.mark.parametrize("error", [ImportError, RuntimeError, AttributeError, OSError])
def test_a_runtime_that_cannot_be_imported_is_no_reason_to_lose_the_file(
    sources, tmp_path, monkeypatch, error
):
    def broken(name):
        raise error("no such operator")

    monkeypatch.setattr("kmodels.tools.convert.missing", lambda names: [])
    model = ViTImageClassifier.from_preset(sources("vit"))
    monkeypatch.setattr(converting.importlib, "import_module", broken)
    found = convert(model, tmp_path / "model.npz", "npz")
    assert found.advice == "timm cannot be imported (no such operator)"
    assert found.difference is None and "not compared" in found.line() and found.path.is_file()


def _wrong(form, path, samples, model):
    return [np.full((len(sample), 7), 9.0, "float32") for sample in samples], ""


def test_what_differs_is_not_kept(sources, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("kmodels.tools.convert.missing", lambda names: [])
    monkeypatch.setattr(converting, "_version", lambda module: "1.0")
    monkeypatch.setattr(converting, "_ask", _wrong)
    (tmp_path / "model.npz").write_bytes(b"before")
    with pytest.raises(Differs, match=r"timm 1\.0 differs by .* was not written"):
        convert(sources("vit"), tmp_path / "model.npz", "npz")
    arguments = ["convert", sources("vit"), tmp_path / "model.npz", "--to", "npz"]
    assert command_line.run(*arguments) == 1 and "differs by" in capsys.readouterr().err
    assert (tmp_path / "model.npz").read_bytes() == b"before"
    with pytest.raises(Differs):
        convert(sources("vit"), tmp_path / "model", "timm")
    assert [path.name for path in tmp_path.iterdir()] == ["model.npz"]


@pytest.mark.parametrize(
    ("source", "destination", "options", "message"),
    [
        (
            "vit",
            "model.npz",
            ["--to", "npy"],
            "'npy' is not a format; choose one of hf, .*mean npz",
        ),
        ("vit", "model.bin", ["--to", "npz"], r"model\.bin does not end in \.npz; give"),
        ("vit", "folder.npz", ["--to", "npz"], "is a directory; npz is a file"),
        ("vit", "folder.npz", ["--to", "hf"], "also holds mine.txt, which would be lost"),
        (
            "vit",
            "model.gguf",
            ["--to", "gguf"],
            "gguf holds models of gemma, gemma_vision, gemma4_vision, llama3, qwen3; this is a ViT",
        ),
        ("gemma", "model", ["--to", "timm"], "timm holds models of vit; this is a GemmaCausalLM"),
        ("vit", "out", ["--to", "timm", "--dtype", "q8_0"], "timm is written as float32, bfloat16"),
        ("vit_debug", "out", ["--to", "timm"], "vit_debug is an architecture without weights"),
        ("nothing", "out", ["--to", "timm"], "'nothing' is neither a preset nor a directory"),
        ("vit", "out", ["--to", "hf", "--sequence-length", "1"], "sequence_length is 1; give at"),
        ("vit", "out", ["--to", "hf", "--sequence-length", "9"], "no effect on a ViTImageClass"),
        ("vit", "out", ["--to", "hf", "--text-only"], "a ViTImageClassifier is written whole"),
        ("gemma_vision", "out", ["--to", "hf", "--text-only"], "Gemma3ImageTextLM is written who"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(
    source, destination, options, message, sources, tmp_path, capsys
):
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "folder.npz" / "mine.txt").write_text("mine")
    where = sources(source) if source in MAKE else source
    assert command_line.run("convert", where, tmp_path / destination, *options) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert re.search(message, told), told
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder.npz", "mine.txt"]


def test_a_source_is_not_its_own_destination(sources, tmp_path):
    model = ViTImageClassifier.from_preset(sources("vit"))
    model.export_to_timm(tmp_path / "model")
    with pytest.raises(InputError, match="is an input, which would be lost"):
        convert(tmp_path / "model", tmp_path / "model", "timm")
    with pytest.raises(InputError, match="adapter needs a source that is a path"):
        convert(model, tmp_path / "out", "timm", adapter=tmp_path)
    with pytest.raises(InputError, match="is float32; give dtype='float32', or load it with"):
        convert(model, tmp_path / "out", "timm", dtype="bfloat16")
    mixed, half = (
        ViTImageClassifier.from_preset(sources("vit"), dtype=dtype)
        for dtype in ("mixed_bfloat16", "bfloat16")
    )
    with pytest.raises(InputError, match=r"computes in bfloat16 \(mixed_bfloat16\), so outputs"):
        convert(mixed, tmp_path / "out", "timm")
    with pytest.raises(InputError, match="the model is bfloat16; load it with dtype='float32'"):
        convert(half, tmp_path / "out.npz", "npz")
    both = ImageTextSimilarity.from_preset("clip_debug", preprocessor=None)
    with pytest.raises(InputError, match=r"one tower, and ImageTextSimilarity has two; use its"):
        convert(both, tmp_path / "out", "hf")


@pytest.mark.across
@pytest.mark.filterwarnings("default")
def test_models_without_a_head_and_large_ones(sources, references, tmp_path, monkeypatch):
    backbone = ViTImageClassifier.from_preset(sources("vit")).backbone
    backbone.save_to_preset(tmp_path / "backbone")
    for name in ("hf", "timm"):
        found = convert(tmp_path / "backbone", tmp_path / name, name)
        assert found.difference is not None and found.difference <= tolerance("hidden")
    # keras-hub's DINOv2 takes its images in a dictionary.
    source = references / "vit_kinds" / "dinov2_model" / "model"
    found = convert(source, tmp_path / "hub", "keras-hub")
    assert found.difference is not None and found.difference <= tolerance("hidden")
    monkeypatch.setattr(converting, "MOST_BYTES", 1000)
    with pytest.raises(InputError, match="onnx is limited to 1000 B, and the model has"):
        convert(tmp_path / "backbone", tmp_path / "model.onnx", "onnx")
    opened = converting._open(sources("gemma"), "float32", None, whole=False)
    assert isinstance(opened.backbone, GemmaBackbone)
