"""A Gemma 3 with its vision encoder as two GGUF files: what they hold, and read again."""

import shutil
from dataclasses import replace
from importlib import import_module

import keras
import numpy as np
import pytest

from arrays import assert_equal, to_numpy
from kmodels.core.errors import InputError
from kmodels.models import (
    Gemma3ImageConverter,
    Gemma3ImageTextBackbone,
    Gemma3ImageTextLM,
    Gemma3ImageTextLMPreprocessor,
    GemmaBackbone,
    GemmaCausalLM,
    GemmaCausalLMPreprocessor,
    GemmaTokenizer,
)
from kmodels.text import demo
from kmodels.text.training import train_tokenizer
from kmodels.tools import cli
from kmodels.tools.convert import convert
from kmodels.weights import read_safetensors
from refusals import refused
from tolerances import tolerance

pytestmark = pytest.mark.needs("gguf")
TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "q8_0": "F16"}
MARKS = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]


def tokenizer():
    core = train_tokenizer(demo.texts(), 400).core
    core.add_special_tokens(MARKS)
    return GemmaTokenizer(core)


@pytest.fixture(scope="module")
def model():
    """One with norms that are not trivial, a preprocessor, and a mean that is not the usual one."""
    words = tokenizer()
    preprocessor = Gemma3ImageTextLMPreprocessor(
        words,
        Gemma3ImageConverter((16, 16), scale=1 / (255 * 0.25), offset=-1.5),
        num_vision_tokens_per_image=4,
        sequence_length=48,
    )
    made = Gemma3ImageTextLM.from_preset(
        "gemma3_vision_debug",
        preprocessor=preprocessor,
        vocabulary_size=words.vocabulary_size(),
        image_token_id=preprocessor.image_token_id,
        max_sequence_length=64,
    )
    for number, weight in enumerate(made.weights):
        if weight.path.endswith(("scale", "bias")):
            weight.assign(np.random.default_rng(number).normal(size=weight.shape) / 4)
    return made


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    """A folder for each dtype, with the file of the text and that of the vision encoder."""
    folder = tmp_path_factory.mktemp("files")
    for dtype in TYPES:
        (folder / dtype).mkdir()
        text, beside = folder / dtype / "model.gguf", folder / dtype / "mmproj-model.gguf"
        assert model.export_to_gguf(text, dtype, mmproj=beside) == text
    return folder


def content(path):
    reader = import_module("gguf").GGUFReader(path)
    settings = {name: field.contents() for name, field in reader.fields.items()}
    return settings, {tensor.name: tensor for tensor in reader.tensors}


def inputs(model):
    draw = np.random.default_rng(0)
    ids = draw.integers(3, 380, (2, 14)).astype("int32")
    ids[:, 2:6] = model.preprocessor.image_token_id
    images = draw.normal(size=(2, 1, 16, 16, 3)).astype("float32")
    return {"token_ids": ids, "padding_mask": np.ones_like(ids), "images": images}


def test_the_text_is_that_of_a_text_model_bit_for_bit(model, files, tmp_path):
    text = GemmaCausalLM(
        GemmaBackbone(**vars(model.backbone.config.decoder)),
        GemmaCausalLMPreprocessor(model.preprocessor.tokenizer),
    )
    held = {weight.path: to_numpy(weight) for weight in model.weights}
    for weight in text.weights:
        weight.assign(held[weight.path])
    for dtype in TYPES:
        written = text.export_to_gguf(tmp_path / "text.gguf", dtype).read_bytes()
        assert (files / dtype / "model.gguf").read_bytes() == written
        alone = model.export_to_gguf(tmp_path / "alone.gguf", dtype, text_only=True)
        assert alone.read_bytes() == written


def test_settings_are_those_of_llama_cpps_converter(files):
    settings, _ = content(files / "float16" / "mmproj-model.gguf")
    found = {name: x for name, x in settings.items() if name.startswith(("clip", "general"))}
    assert found == {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "general.file_type": 1,
        "clip.has_vision_encoder": True,
        "clip.projector_type": "gemma3",
        "clip.use_gelu": True,
        "clip.vision.image_mean": [0.375] * 3,
        "clip.vision.image_std": [0.25] * 3,
        "clip.vision.projection_dim": 32,
        "clip.vision.image_size": 16,
        "clip.vision.patch_size": 4,
        "clip.vision.embedding_length": 24,
        "clip.vision.feed_forward_length": 40,
        "clip.vision.block_count": 2,
        "clip.vision.attention.head_count": 2,
        "clip.vision.attention.layer_norm_epsilon": np.float32(1e-6),
        "clip.vision.projector.scale_factor": 2,
    }


def test_a_pool_of_four_is_not_said_as_it_is_llama_cpps(tmp_path):
    encoder = {"image_size": 16, "patch_size": 4, "pool_size": 4, "num_layers": 1}
    encoder |= {"num_heads": 2, "hidden_dim": 8, "intermediate_dim": 12}
    made = Gemma3ImageTextLM.from_preset(
        "gemma3_vision_debug", preprocessor=None, vision_encoder=encoder
    )
    made.export_to_gguf(tmp_path / "text.gguf", mmproj=tmp_path / "mmproj.gguf")
    assert "clip.vision.projector.scale_factor" not in content(tmp_path / "mmproj.gguf")[0]
    assert content(tmp_path / "mmproj.gguf")[0]["clip.vision.image_mean"] == [0.5] * 3
    again = Gemma3ImageTextLM.from_preset(tmp_path / "text.gguf")
    assert again.backbone.config.vision_encoder["pool_size"] == 4 and again.preprocessor is None


@pytest.mark.parametrize("dtype", TYPES)
def test_types_of_tensors(files, dtype):
    _, tensors = content(files / dtype / "mmproj-model.gguf")
    found = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    # Rows of 24 and 40 numbers make no blocks of 32, so that q8_0 is half precision.
    assert found.pop("mm.input_projection.weight") == "F16"
    for name, kind in found.items():
        embeds = name.startswith(("v.patch_embd", "v.position_embd"))
        vector = name.endswith(".bias") or ".ln" in name or "norm" in name or "post_ln" in name
        assert kind == ("F32" if embeds or vector else TYPES[dtype]), name


def test_tensors_are_those_of_a_file_of_hugging_face(model, files, tmp_path):
    """Layouts are PyTorch's, and the norm in front of the projector has its 1."""
    _, tensors = content(files / "float32" / "mmproj-model.gguf")
    model.export_to_transformers(tmp_path / "out")
    theirs = read_safetensors(tmp_path / "out")
    names = import_module("gguf").get_tensor_name_map(import_module("gguf").MODEL_ARCH.MMPROJ, 2)
    compared = 0
    for name, tensor in theirs.items():
        if not name.startswith(("vision_tower.", "multi_modal_projector.")):
            continue
        known = names.get_name(name.replace("_weight", ".weight"), (".weight", ".bias"))
        value = tensor.read() + (1 if "soft_emb_norm" in name else 0)
        found = tensors.pop(known).data.reshape(value.shape)
        if "input_projection" in known:
            value = value.astype("float16")
        np.testing.assert_array_equal(found, value, err_msg=known)
        compared += 1
    assert compared == 39 and not tensors


@pytest.mark.parametrize("dtype", TYPES)
def test_what_was_written_is_read_again(model, files, dtype):
    again = Gemma3ImageTextLM.from_preset(files / dtype / "model.gguf")
    usual = {"layer_norm_epsilon": 1e-6}
    assert again.backbone.config == replace(
        model.backbone.config, vision_encoder={**model.backbone.config.vision_encoder, **usual}
    )
    steps = {"float32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8, "q8_0": 5e-3}
    for ours, theirs in zip(again.weights, model.weights, strict=True):
        held = to_numpy(theirs)
        exact = dtype == "float32" and not ours.path.endswith("input_projection/kernel")
        near = 2.4e-7 + (0 if exact else 1.01 * steps[dtype] * np.abs(held).max())
        assert np.abs(to_numpy(ours) - held).max() <= near, ours.path
    assert again.preprocessor.image_converter.mean == pytest.approx([0.375] * 3)
    assert again.preprocessor.image_converter.std == pytest.approx([0.25] * 3)
    assert again.preprocessor.num_vision_tokens_per_image == 4
    ids = again.preprocessor.tokenizer.encode("the <start_of_image> cat")
    assert ids == model.preprocessor.tokenizer.encode("the <start_of_image> cat")
    if dtype == "float32":
        kernel = "vision_encoder/input_projection/kernel"
        same = Gemma3ImageTextLM(
            Gemma3ImageTextBackbone(**model.backbone.config.to_dict()), preprocessor=None
        )
        for mine, held in zip(same.weights, model.weights, strict=True):
            value = to_numpy(held)
            mine.assign(value.astype("float16") if mine.path == kernel else value)
        x = inputs(model)
        found, wanted = (to_numpy(one(x)) for one in (again, same))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance("logits"))
        assert np.abs(to_numpy(again({**x, "images": 0 * x["images"]})) - found).max() > 0.01


def test_whoever_names_the_text_model_needs_no_projector(files, tmp_path):
    shutil.copy(files / "float16" / "model.gguf", tmp_path)
    assert GemmaCausalLM.from_preset(tmp_path / "model.gguf").backbone.count_params() > 0
    with pytest.raises(InputError, match=r"nothing called mmproj\*.gguf lies beside it; put the"):
        Gemma3ImageTextLM.from_preset(tmp_path / "model.gguf")
    for number in range(2):
        shutil.copy(files / "float16" / "mmproj-model.gguf", tmp_path / f"mmproj{number}.gguf")
    with pytest.raises(InputError, match=r"and mmproj0\.gguf, mmproj1\.gguf called"):
        Gemma3ImageTextLM.from_preset(tmp_path / "model.gguf")


def rewritten(source, path, settings=None, swap=False):
    """Copies a projector, with other settings, or with the names of older files."""
    gguf = import_module("gguf")
    held, tensors = content(source)
    held |= settings or {}
    writer = gguf.GGUFWriter(path, held["general.architecture"])
    for name, value in held.items():
        if name.startswith("clip.") and value is not None:
            kind = {bool: "bool", str: "string", int: "uint32", list: "array"}
            getattr(writer, f"add_{kind.get(type(value), 'float32')}")(name, value)
    for name, tensor in tensors.items():
        if swap and ".ffn_" in name:
            name = name.replace("up", "x").replace("down", "up").replace("x", "down")
        writer.add_tensor(name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_older_files_swap_the_names_of_the_mlp(files, tmp_path):
    shutil.copy(files / "float32" / "model.gguf", tmp_path)
    source = files / "float32" / "mmproj-model.gguf"
    rewritten(source, tmp_path / "mmproj.gguf", swap=True)
    found, wanted = (
        Gemma3ImageTextLM.from_preset(folder / "model.gguf")
        for folder in (tmp_path, files / "float32")
    )
    assert_equal(found.weights, wanted.weights)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip.projector_type": "mlp"}, "holds 'clip' with the projector 'mlp'; the model reads"),
        ({"clip.vision.projection_dim": 48}, "is of a text 48 wide, and the model beside it is 32"),
        ({"clip.vision.block_count": None}, "the projector lacks clip.vision.block_count"),
        ({"clip.use_gelu": False}, "the projector has clip.use_gelu=False"),
        ({"general.architecture": "llama"}, "holds 'llama' with the projector 'gemma3'"),
    ],
)
def test_other_projectors_are_named(files, tmp_path, settings, message):
    shutil.copy(files / "float32" / "model.gguf", tmp_path)
    rewritten(files / "float32" / "mmproj-model.gguf", tmp_path / "mmproj.gguf", settings)
    refused(message, Gemma3ImageTextLM.from_preset, tmp_path / "model.gguf")


def test_what_is_to_become_of_the_encoder_is_asked(model, tmp_path):
    text, beside = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    for given in ({}, {"text_only": True, "mmproj": beside}):
        with pytest.raises(InputError, match="give mmproj=FILE for the vision encoder, or text_on"):
            model.export_to_gguf(text, **given)
    refused("where the text goes; give another name", model.export_to_gguf, text, mmproj=text)
    with pytest.raises(InputError, match=r"mmproj.bin must be a GGUF file"):
        model.export_to_gguf(text, mmproj=tmp_path / "mmproj.bin")
    refused("dtype is 'int4'", model.export_to_gguf, text, "int4", mmproj=beside)
    with pytest.raises(InputError, match="GemmaCausalLM has no vision encoder; leave mmproj out"):
        GemmaCausalLM.from_preset("gemma3_debug").export_to_gguf(text, mmproj=beside)
    assert not list(tmp_path.iterdir())


def test_what_llama_cpp_would_take_for_something_else_is_refused(model, tmp_path):
    square = {**model.backbone.config.vision_encoder, "intermediate_dim": 24}
    other = Gemma3ImageTextLM.from_preset(
        "gemma3_vision_debug", preprocessor=None, vision_encoder=square
    )
    with pytest.raises(
        InputError, match="gemma3 has no place for intermediate_dim=24, which is hi"
    ):
        other.export_to_gguf(tmp_path / "model.gguf", mmproj=tmp_path / "mmproj.gguf")
    assert not list(tmp_path.iterdir())


# === kmodels convert ===


@pytest.fixture
def directory(model, tmp_path):
    model.export_to_transformers(tmp_path / "hf")
    return tmp_path / "hf"


def test_convert_writes_both_files_or_asks(directory, files, tmp_path, capsys):
    text, beside = tmp_path / "model.gguf", tmp_path / "mmproj-model.gguf"
    arguments = ["convert", str(directory), str(text), "--to", "gguf", "--dtype", "float16"]
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    told = capsys.readouterr().err
    assert end.value.code == 2 and "give mmproj=FILE" in told and "text_only=True" in told
    assert not text.exists()
    with pytest.raises(SystemExit) as end:
        cli.main([*arguments, "--mmproj", str(beside)])
    assert end.value.code == 0
    for file in (text, beside):
        assert file.read_bytes() == (files / "float16" / file.name).read_bytes()
    beside.unlink()
    with pytest.warns(UserWarning, match="takes only text"):
        convert(directory, text, "gguf", text_only=True)
    assert text.read_bytes() == (files / "float16" / text.name).read_bytes()
    assert not beside.exists()


def test_convert_of_other_formats(model, directory, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="only gguf has a separate file for the vision encoder"):
        convert(directory, tmp_path / "out", "hf", mmproj=tmp_path / "mmproj.gguf")
    name = {"jax": "stablehlo", "torch": "torch-export", "tensorflow": "savedmodel"}[
        keras.backend.backend()
    ]
    suffix = {"stablehlo": ".stablehlo", "torch-export": ".pt2"}.get(name, "")
    with pytest.raises(InputError, match="takes texts and images; write hf, keras-hub or gguf"):
        convert(model, tmp_path / f"graph{suffix}", name)


@pytest.mark.across
def test_peers_give_what_the_model_gives(model, tmp_path, monkeypatch):
    from functools import partial
    from importlib.util import find_spec

    found = partial(filter, lambda name: name == "llama_cpp" or find_spec(name) is None)
    monkeypatch.setattr("kmodels.tools.convert.missing", lambda names: [*found(names)])
    beside = {"mmproj": tmp_path / "mmproj.gguf"}
    for dtype in TYPES:
        held = convert(model, tmp_path / "model.gguf", "gguf", dtype=dtype, **beside)
        assert held.runtime.startswith("transformers") and held.difference is not None
        assert held.difference <= tolerance("logits")
