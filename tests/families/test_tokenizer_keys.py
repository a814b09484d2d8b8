"""Settings of a tokenizer_config.json mean what they mean in transformers, or are named."""

import inspect
import json
import re
import shutil

import pytest

from kmodels.models import (
    CLIPTokenizer,
    GemmaTokenizer,
    Llama3Tokenizer,
    Qwen3CausalLMPreprocessor,
    Qwen3Tokenizer,
    SigLIPTokenizer,
)
from kmodels.text import settings as described
from refusals import refused

# A directory of the references, the class, files to leave out, and what tokenizer_class becomes.
TOKENIZERS = {
    "gemma": ("gemma3_processor/model", GemmaTokenizer, (), None),
    "qwen": ("qwen3/tokenizer", Qwen3Tokenizer, (), None),
    "qwen without tokenizer.json": (
        "qwen3/tokenizer", Qwen3Tokenizer, ("tokenizer.json",), "Qwen2Tokenizer",
    ),
    "llama": ("llama3/tokenizer", Llama3Tokenizer, (), None),
    "clip": ("clip/tokenizer", CLIPTokenizer, (), None),
    "clip without tokenizer.json": ("clip/tokenizer", CLIPTokenizer, ("tokenizer.json",), None),
    "siglip": ("two_towers/siglip/model", SigLIPTokenizer, (), None),
    "siglip2": ("two_towers/siglip2/model", SigLIPTokenizer, (), None),
}  # fmt: skip
CLEAN, SPLIT = "clean_up_tokenization_spaces", "split_special_tokens"
FOR_BPE = f"{CLEAN}_for_bpe_even_though_it_will_corrupt_output"
CAT = {"__type": "AddedToken", "content": "cat", "special": True, "lstrip": True}
SETTINGS = (
    {SPLIT: True}, {SPLIT: False},
    {CLEAN: True}, {CLEAN: True, FOR_BPE: True},
    {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True},
    {"add_prefix_space": False}, {"do_lower_case": True}, {"do_lower_case": False},
    {"legacy": False}, {"sp_model_kwargs": {}}, {"spaces_between_special_tokens": True},
    {"use_default_system_prompt": True}, {"errors": "strict"}, {"model_max_length": 3},
    {"additional_special_tokens": ["cat", "<new>"]},
    {"extra_special_tokens": ["<new>", {**CAT, "lstrip": False}]},
    {"extra_special_tokens": {"image_token": "cat"}}, {"image_token": "cat"},
    {"model_specific_special_tokens": {"image_token": "<new>"}},
    {"sep_token": "cat"}, {"pad_token": "cat"}, {"mask_token": "<new>"},
    {"added_tokens_decoder": {"3": CAT}}, {"truncation_side": "right"},
    {"padding_side": "right"},
)  # fmt: skip
# Of SigLIP's own vocabulary nothing but its own tokens is cut out of a text.
NAMED_IN_SIGLIP = (
    {"pad_token": "cat"}, {"additional_special_tokens": ["cat"]},
    {"extra_special_tokens": ["cat"]}, {"sep_token": "cat"},
    {"mask_token": "cat"}, {"image_token": "cat"}, {"added_tokens_decoder": {"3": CAT}},
    {"model_specific_special_tokens": {"image_token": "cat"}},
)  # fmt: skip
NAMED = (
    {"truncation_side": "left"}, {"fix_mistral_regex": True}, {"add_prefix_space": True},
    {"sp_model_kwargs": {"enable_sampling": True}}, {"add_dummy_suffix": True},
)  # fmt: skip
TEXTS = ("Hello a Cat , it 's the image . ", " a photo of\nthe cat!", "")
MARKED = ("A Cat <bos> cat<|im_end|> <eos>  x</s> <|endoftext|>. Do n't!", "<unk><new>b cat")


def _folder(references, tmp_path, name, more):
    source, kind, left_out, tokenizer_class = TOKENIZERS[name]
    for file in (references / source).iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in left_out:
            shutil.copy(file, tmp_path)
    written = json.loads((tmp_path / described.CONFIG).read_text())
    if tokenizer_class:
        written["tokenizer_class"] = tokenizer_class
    (tmp_path / described.CONFIG).write_text(json.dumps({**written, **more}))
    return kind.from_file(tmp_path)


@pytest.mark.needs("transformers", "sentencepiece")
@pytest.mark.parametrize("more", SETTINGS, ids=lambda more: "-".join(more))
@pytest.mark.parametrize("name", TOKENIZERS)
def test_settings_mean_what_they_mean_in_transformers(references, tmp_path, caplog, name, more):
    from transformers import AutoTokenizer

    ours = _folder(references, tmp_path, name, more)
    plain = name == "siglip"
    if plain and ("cat" in str(more) or "<new>" in str(more) or more == {SPLIT: True}):
        return
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS if plain else (*TEXTS, *MARKED):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.tokenize(text) == ids
        assert type(ours).from_config(ours.get_config()).tokenize(text) == ids
        assert ours.encode(text) == theirs.encode(text)
        if not plain:
            assert ours.decode(ids) == theirs.decode(ids)
    assert "which kmodels does not" not in caplog.text


@pytest.mark.needs("transformers")
@pytest.mark.parametrize(
    ("name", "more"),
    [("qwen", {}), ("llama", {"tokenizer_class": "GPT2Tokenizer"})],
)
def test_a_file_without_a_post_processor_puts_nothing_around(references, tmp_path, name, more):
    from transformers import AutoTokenizer

    _folder(references, tmp_path, name, more)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": None}))
    ours = TOKENIZERS[name][1].from_file(tmp_path)
    expected = AutoTokenizer.from_pretrained(tmp_path).encode("a cat")
    assert ours.encode("a cat") == expected
    ours.save(tmp_path / "saved")
    assert type(ours).from_file(tmp_path / "saved").encode("a cat") == expected


SPECIAL = {
    "pad_token": "cat", "sep_token": {**CAT, "content": "<new>", "lstrip": True},
    "extra_special_tokens": ["the"],
}  # fmt: skip


@pytest.mark.needs("transformers", "sentencepiece")
@pytest.mark.parametrize("more", [{}, {"added_tokens_decoder": {}}, {"pad_token": "a"}], ids=str)
@pytest.mark.parametrize("name", ["gemma", "qwen", "qwen without tokenizer.json", "llama", "clip"])
def test_names_of_tokens_in_a_file_of_their_own(references, tmp_path, caplog, name, more):
    from transformers import AutoTokenizer

    (tmp_path / described.NAMES).write_text(json.dumps(SPECIAL))
    ours = _folder(references, tmp_path, name, more)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.pad_token == "cat") == ("added_tokens_decoder" not in more)
    if theirs.pad_token is not None:
        assert (ours.pad_token, ours.pad_token_id) == (theirs.pad_token, theirs.pad_token_id)
    for text in (*TEXTS, *MARKED, "a the<new>  cat"):
        assert ours.encode(text) == theirs.encode(text)
        assert type(ours).from_config(ours.get_config()).encode(text) == theirs.encode(text)
    assert "which kmodels does not" not in caplog.text


@pytest.mark.needs("transformers", "sentencepiece")
@pytest.mark.parametrize("more", [{}, {"add_bos_token": False}], ids=str)
@pytest.mark.parametrize("name", ["qwen", "qwen without tokenizer.json"])
def test_a_start_token_for_chats_is_not_put_before_texts(references, tmp_path, name, more):
    from transformers import AutoTokenizer

    tokenizer = _folder(references, tmp_path, name, {"bos_token": "<|im_start|>", **more})
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    row = Qwen3CausalLMPreprocessor(tokenizer, sequence_length=12).generate_preprocess("the cat")
    ids = theirs.encode("the cat")
    assert row["token_ids"][: len(ids)].tolist() == ids == tokenizer.encode("the cat")
    # Its name stays known to chat templates.
    assert tokenizer.settings["bos_token"] == theirs.bos_token == "<|im_start|>"


def test_a_strange_file_of_names_is_told_in_a_line(references, tmp_path, caplog):
    (tmp_path / described.NAMES).write_text('{"padding": "x"}')
    _folder(references, tmp_path, "qwen", {})
    assert "special_tokens_map.json sets padding, which kmodels does not know" in caplog.text
    (tmp_path / described.NAMES).write_text('{"pad_token": 3}')
    refused("tokens_map.json: pad_token is 3; give a text or an object", _folder, references,
            tmp_path, "qwen", {})  # fmt: skip


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *[(name, more) for name in TOKENIZERS for more in NAMED],
        ("siglip", {SPLIT: True}),
        *[(name, {"padding_side": "left"}) for name in ("clip", "siglip", "siglip2")],
    ],
)
def test_what_is_not_followed_is_named(references, tmp_path, caplog, name, more):
    _folder(references, tmp_path, name, more)
    assert caplog.text.count("which kmodels does not") == 1
    assert f"tokenizer_config.json sets {next(iter(more))}" in caplog.text


@pytest.mark.parametrize("more", NAMED_IN_SIGLIP, ids=lambda more: next(iter(more)))
def test_tokens_that_siglips_own_vocabulary_does_not_cut_out(references, tmp_path, caplog, more):
    _folder(references, tmp_path, "siglip", more)
    assert "tokenizer_config.json names the tokens cat, which are not cut out" in caplog.text


@pytest.mark.needs("transformers")
def test_every_setting_of_a_tokenizer_in_transformers_is_known():
    import transformers
    from transformers import (
        tokenization_python,
        tokenization_utils_base,
        tokenization_utils_sentencepiece,
        tokenization_utils_tokenizers,
    )

    classes = [tokenization_utils_base.PreTrainedTokenizerBase]
    classes += [tokenization_utils_tokenizers.TokenizersBackend]
    classes += [tokenization_utils_sentencepiece.SentencePieceBackend]
    classes += [tokenization_python.PreTrainedTokenizer]
    own = ("GemmaTokenizer", "Qwen2Tokenizer", "CLIPTokenizer", "SiglipTokenizer")
    classes += [getattr(transformers, name) for name in (*own, "Siglip2Tokenizer")]
    names = set(classes[0].SPECIAL_TOKENS_ATTRIBUTES)
    for kind in classes:
        names |= set(inspect.signature(kind.__init__).parameters)
        source = inspect.getsource(kind.__init__)
        names |= set(re.findall(r'kwargs\.(?:pop|get|setdefault)\(\s*"(\w+)"', source))
    # Objects and contents that no file says.
    names -= {"self", "args", "kwargs", "tokenizer_object", "gguf_file", "post_processor"}
    names -= {"vocab", "merges", "unk_id", "tokenizer", "tokenizer_truncation"}
    names -= {"tokenizer_padding", "_json_truncation", "_json_padding", "_spm_precompiled_charsmap"}
    assert not names - described.READ - described.IDLE - described.IDLE_AT.keys()
    assert not described.READ & described.IDLE
