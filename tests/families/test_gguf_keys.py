"""Every setting of a GGUF file that the gguf package can name is read, idle, refused or named."""

from functools import partial
from importlib import import_module

import numpy as np
import pytest

from kmodels.core.errors import InputError
from kmodels.models import GemmaCausalLM, Llama3CausalLM, Qwen3CausalLM
from kmodels.models.blocks.gguf import reading
from kmodels.models.gemma import gguf as gemma
from kmodels.models.gemma_vision import gemma3_files
from kmodels.models.llama3 import FILES as LLAMA
from kmodels.models.qwen3 import FILES as QWEN3
from kmodels.text import Tokenizer
from kmodels.text.gguf import IDLE
from refusals import refused

pytestmark = pytest.mark.needs("gguf")

ARCHITECTURES = ("gemma", "gemma2", "gemma3", "gemma4", "llama", "qwen3")
TASKS = {"llama": Llama3CausalLM, "qwen3": Qwen3CausalLM}
FORMATS = {"llama": LLAMA.gguf, "qwen3": QWEN3.gguf}
TEXTS = ("rope.scaling.type", "general.type", "projector_type", "chat_template")
NAMED = {"{id}": "0", "{name}": "tools", "{dense}": "dense"}
# Texts and kinds of the tokens of a small vocabulary.
MARKS = [("<pad>", 3), ("<eos>", 3), ("<bos>", 3), ("<unk>", 2), ("\u2581", 1), ("a", 1)]


def keys_of_the_package():
    """Names of all settings in the package, with {arch} for an architecture."""

    def walk(owner):
        for name, value in vars(owner).items():
            if isinstance(value, type):
                yield from walk(value)
            elif isinstance(value, str) and not name.startswith("_"):
                yield value

    return sorted(set(walk(import_module("gguf.constants").Keys)))


def content(path):
    reader = import_module("gguf").GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if "GGUF." not in name}
    return fields, {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


def write(path, base, more):
    """Copies a file with more settings."""
    gguf = import_module("gguf")
    fields, tensors = base
    kinds = {bool: "bool", str: "string", int: "uint32", float: "float32", list: "array"}
    writer = gguf.GGUFWriter(path, fields["general.architecture"].contents())
    values = {name: field.contents() for name, field in fields.items()} | more
    for name, value in values.items():
        if name != "general.architecture":
            getattr(writer, f"add_{kinds[type(value)]}")(name, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def outcome(open_it, caplog):
    """What a file gives, its refusal, or the text of its warning."""
    caplog.clear()
    try:
        found = open_it()
    except InputError as error:
        return error
    return caplog.text or found


def others(prefix, base, idle):
    """Settings of a prefix that are neither in a file nor idle, with a value."""
    for key in keys_of_the_package():
        for placeholder, text in NAMED.items():
            name = key.replace(placeholder, text)
        name = name.replace("{arch}", prefix)
        bare = name.removeprefix(f"{prefix}.")
        if name not in base and not {key, name, bare} & set(idle):
            yield name, "strange" if name.endswith(TEXTS) else 7


def elsewhere(name, prefix):
    """Returns True for settings of another file, and those that the vocabulary's reader names."""
    of_clip = name.startswith("clip.") and prefix != "clip"
    return of_clip or name.startswith("tokenizer.") or name == "general.architecture"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name in ARCHITECTURES:
        task, preset = TASKS.get(name, GemmaCausalLM), name.replace("llama", "llama3")
        model = task.from_preset(f"{preset}_debug", preprocessor=None)
        model.export_to_gguf(folder / f"{name}.gguf", "float32")
    return folder


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_setting_of_a_model_is_ignored_in_silence(files, tmp_path, caplog, name):
    base = content(files / f"{name}.gguf")
    opens = FORMATS.get(name, gemma.FORMAT).open_checkpoint

    def open_it(path):
        found = opens(path, {}, {}, True)
        return found.backbone, found.task

    usual = outcome(lambda: open_it(files / f"{name}.gguf"), caplog)
    assert isinstance(usual, tuple)
    asked = dict(others(name, base[0], reading.NOTES | reading.IDLE))
    asked = {key: value for key, value in asked.items() if not elsewhere(key, name)}
    assert len(asked) > 100
    for key, value in asked.items():
        path = write(tmp_path / "it.gguf", base, {key: value})
        found = outcome(partial(open_it, path), caplog)
        assert found != usual, f"{key} is ignored"
        assert not isinstance(found, str) or key in found or "asks for" in found


IDLE_VALUES = {**reading.IDLE_AT, "general.name": ("a",), "notes.of.others": (1,)}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_notes_and_settings_at_idle_values_are_not_named(files, tmp_path, caplog, name):
    base = content(files / f"{name}.gguf")
    more = {
        key if key.startswith(("general.", "notes.")) else f"{name}.{key}": values[0]
        for key, values in IDLE_VALUES.items()
    }
    more |= {f"{name}.rope.scaling.yarn_beta_fast": 32.0, "split.count": 1}
    path = write(tmp_path / "it.gguf", base, {**more, **{f"{name}.pooling_type": 0}})
    FORMATS.get(name, gemma.FORMAT).open_checkpoint(path, {}, {}, True)
    assert not caplog.text


def test_no_setting_of_a_vocabulary_is_ignored_in_silence(tmp_path, caplog):
    gguf = import_module("gguf")

    def written(more):
        writer = gguf.GGUFWriter(tmp_path / "it.gguf", "gemma3")
        writer.add_tokenizer_model("llama")
        writer.add_token_list([text for text, _ in MARKS])
        writer.add_token_scores([0.0] * len(MARKS))
        writer.add_token_types([kind for _, kind in MARKS])
        for key, value in more.items():
            kinds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
            kinds[type(value)](key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        found = Tokenizer.from_file(tmp_path / "it.gguf")
        return found.to_dict()

    usual = outcome(lambda: written({}), caplog)
    values = {"eot_token_id": 5, "eom_token_id": 5, "padding_token_id": 0, "eos_token_id": 0}
    values |= {"add_bos_token": False, "add_eos_token": True}
    asked = [key for key in keys_of_the_package() if key.startswith("tokenizer.")]
    asked = [key for key in asked if key not in IDLE and "chat_template" not in key]
    asked = {key: values.get(key.rpartition(".")[2], 1) for key in asked}
    for name in ("model", "tokens"):
        del asked[f"tokenizer.ggml.{name}"]
    assert len(asked) > 6
    for key, value in {**asked, "tokenizer.ggml.add_mask_token": True}.items():
        found = outcome(partial(written, {key: value}), caplog)
        assert found != usual, f"{key} is ignored"
        assert not isinstance(found, str) or key in found
    assert written({"tokenizer.ggml.add_sep_token": False}) == usual


def test_the_end_token_is_added_where_a_file_says_so(tmp_path):
    writer = import_module("gguf").GGUFWriter(tmp_path / "it.gguf", "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in MARKS])
    writer.add_token_scores([0.0] * len(MARKS))
    writer.add_token_types([kind for _, kind in MARKS])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_add_eos_token(True)
    writer.add_add_space_prefix(False)
    named = [{"name": "default", "template": "a"}, {"name": "tools", "template": "b"}]
    writer.add_chat_template(named)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Tokenizer.from_file(tmp_path / "it.gguf")
    assert tokenizer.encode("a") == [2, 5, 1]
    assert tokenizer.chat_template == {"default": "a", "tools": "b"}


def test_sampling_that_a_file_proposes(files, tmp_path, caplog):
    base = content(files / "qwen3.gguf")
    more = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    model = Qwen3CausalLM.from_preset(write(tmp_path / "it.gguf", base, more))
    assert model.generation_config == {"do_sample": True, "temperature": 0.6, "top_k": 20}
    assert "it.gguf asks for do_sample=True, temperature=0.6, top_k=20, which gen" in caplog.text
    path = write(tmp_path / "greedy.gguf", base, {"general.sampling.temp": 0.0})
    assert Qwen3CausalLM.from_preset(path).generation_config["do_sample"] is False


def test_a_cap_of_the_logits_of_gemma_3(files, tmp_path):
    capped = GemmaCausalLM.from_preset("gemma3_debug", preprocessor=None, final_logit_soft_cap=20.0)
    path = capped.export_to_gguf(tmp_path / "it.gguf", "float32")
    assert GemmaCausalLM.from_preset(path).backbone.config.final_logit_soft_cap == 20.0
    plain = GemmaCausalLM.from_preset(files / "gemma3.gguf")
    assert plain.backbone.config.final_logit_soft_cap is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"split.count": 3}, "is one of the 3 files of a model; make one of them"),
        ({"general.type": "adapter"}, "holds 'adapter', and the model reads 'model'"),
        ({"qwen3.rope.dimension_count": 4}, "rope.dimension_count=4, and its heads are 8 wide"),
        ({"qwen3.attention.value_length": 4}, "value_length=4, and its heads are 8 wide"),
        ({"qwen3.rope.scaling.attn_factor": 2.0}, "attn_factor is 2.0; only 1.0 is read"),
    ],
)
def test_what_would_be_another_model_is_refused(files, tmp_path, more, message):
    path = write(tmp_path / "it.gguf", content(files / "qwen3.gguf"), more)
    refused(message, Qwen3CausalLM.from_preset, path)


def test_no_setting_of_a_projector_is_ignored_in_silence(tmp_path, caplog):
    from kmodels.models import Gemma3ImageTextLM

    model = Gemma3ImageTextLM.from_preset("gemma3_vision_debug", preprocessor=None)
    path = tmp_path / "mmproj.gguf"
    gemma3_files.write_mmproj(model, path, "float32")
    base, width = content(path), model.backbone.config.decoder.hidden_dim

    def open_it(path):
        found = gemma3_files.open_mmproj(path, width, True)
        return found.fields, list(found.mean), list(found.std)

    usual = outcome(lambda: open_it(path), caplog)
    assert isinstance(usual, tuple)
    asked = dict(others("clip", base[0], reading.NOTES))
    asked = {key: value for key, value in asked.items() if key.startswith("clip.")}
    for key, value in asked.items():
        changed = write(tmp_path / "it.gguf", base, {key: value})
        found = outcome(partial(open_it, changed), caplog)
        assert found != usual, f"{key} is ignored"
        assert not isinstance(found, str) or key in found
    assert len(asked) > 30
