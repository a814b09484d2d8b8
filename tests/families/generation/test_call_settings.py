"""Settings of one call of `generate` and `chat`: sampling, stop strings, and what is refused."""

import keras
import numpy as np
import pytest

from chat_cases import GEMMA2, QWEN3, TOOL, said
from kmodels.generation import BeamSampler, ContrastiveSampler, Sampler, generate
from kmodels.generation.generation_config import sampler_of
from kmodels.generation.stop import Stop, Streamer, ended
from kmodels.models import GemmaCausalLM, GemmaCausalLMPreprocessor
from kmodels.text import demo
from kmodels.text.training import train_tokenizer
from refusals import refused

CHAT = said(("user", "Say hello."))
FREE = {"max_new_tokens": 24, "stop_token_ids": None}


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    tokenizer = train_tokenizer(demo.texts(), 500)
    tokenizer.chat_template = GEMMA2
    preprocessor = GemmaCausalLMPreprocessor(tokenizer, sequence_length=64)
    return GemmaCausalLM.from_preset("gemma3_debug", vocabulary_size=500, preprocessor=preprocessor)


@pytest.fixture
def compiled(model):
    yield model
    model.generation_config = {}
    model.use_sampler("greedy")


def streamed(model, call, prompt, **settings):
    pieces = {}

    def stream(row, piece):
        pieces[row] = pieces.get(row, "") + piece

    found = call(prompt, stream=stream, **settings)
    texts = [found] if isinstance(found, str) else found
    assert [pieces.get(row, "") for row in range(len(texts))] == texts
    return found


@pytest.mark.each_time("drafts0", on=("jax", "tensorflow"))
@pytest.mark.each_backend
@pytest.mark.parametrize("drafts", [{}, {"prompt_lookup_num_tokens": 3}])
def test_a_stop_string_ends_a_text_wherever_its_tokens_begin(model, drafts):
    whole = model.chat(CHAT, temperature=2.0, seed=1, **FREE)
    for start, size in ((2, 1), (1, 3), (3, 2)):
        stop = whole[start : start + size]
        settings = {"temperature": 2.0, "seed": 1, **FREE, **drafts}
        found = streamed(model, model.chat, CHAT, stop=stop, **settings)
        assert found == whole[: whole.index(stop)]
        assert model.chat(CHAT, stop=["\x00", stop], **settings) == found
    # The prompt stays where it is part of the result, and does not end the text.
    text = model.generate("Say hello.", temperature=2.0, seed=1, **FREE)
    new = model.generate("Say hello.", temperature=2.0, seed=1, strip_prompt=True, **FREE)
    stop = new[2:4]
    found = model.generate("Say hello.", temperature=2.0, seed=1, stop=stop, **FREE)
    assert found == text[: len(text) - len(new) + new.index(stop)]


class Letters:
    """A tokenizer whose tokens are given texts; bytes that make no character are U+FFFD."""

    special_token_ids = (0,)
    core = None

    def __init__(self, *texts):
        self.texts = [text.encode() if isinstance(text, str) else text for text in texts]

    def detokenize(self, ids):
        return b"".join(self.texts[i] for i in ids if i).decode(errors="replace")


@pytest.mark.parametrize(
    ("texts", "stop", "shown", "used"),
    [
        (["ab", "cd", "ef"], ["bc"], ["a"], 2),
        (["ab", "cd", "ef"], ["cx"], ["ab", "cd", "ef"], 3),
        (["a\n", "\n", "b"], ["\n\n"], ["a"], 2),
        (["x", "aa", "b", "z"], ["aab", "b"], ["x"], 3),
        (["a", b"\xc3", b"\xa9", "b"], ["\u00e9"], ["a"], 3),
        (["a", b"\xc3", b"\xa9", "b"], ["b"], ["a", "\u00e9"], 4),
        (["a", b"\xc3"], ["b"], ["a", "\ufffd"], 2),
        (["a", "b"], ["bc"], ["a", "b"], 2),
    ],
)
def test_nothing_of_a_stop_string_is_streamed(texts, stop, shown, used):
    tokenizer, pieces = Letters("", *texts), []
    stop = Stop([], stop, tokenizer)
    streamer = Streamer(lambda _, piece: pieces.append(piece), 1, stop, tokenizer)
    tokens = []
    for token in range(1, len(texts) + 1):
        tokens.append(token)
        streamer(0, token)
        if ended(stop, tokens):
            break
    streamer.finish()
    assert pieces == shown and len(tokens) == used
    assert stop.without(tokenizer.detokenize(tokens), tokens) == "".join(shown)


def test_settings_of_a_call_are_those_of_a_sampler(compiled):
    given = {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 3}
    given["repetition_penalty"] = 1.2
    compiled.use_sampler(Sampler(**given))
    wanted = compiled.chat(CHAT, **FREE)
    compiled.use_sampler("greedy")
    greedy = compiled.chat(CHAT, **FREE)
    assert compiled.chat(CHAT, **given, **FREE) == wanted != greedy
    assert compiled.generate(CHAT, strip_prompt=True, **given, **FREE) == wanted
    assert compiled.chat(CHAT, **FREE) == greedy  # for one call alone
    # A data set of prompts draws on, and does not begin again with each batch.
    both = compiled.generate(iter([["Say"], ["Say"]]), temperature=9.0, seed=3, **FREE)
    assert both[0] != both[1]
    # Without a seed the draws of a seeded sampler go on.
    compiled.use_sampler(Sampler(seed=3))
    assert compiled.chat(CHAT, temperature=9.0, **FREE) != compiled.chat(
        CHAT, temperature=9.0, **FREE
    )
    assert Sampler(temperature=0.0).changed(top_k=5).temperature == 1.0
    assert Sampler(temperature=0.0).changed(seed=5).greedy


def test_what_a_call_does_not_follow_is_one_line(compiled):
    chat = compiled.chat
    refused("takes no max_tokens; did you mean max_new_tokens", chat, CHAT, max_tokens=2)
    refused("takes no enable_thinking", chat, CHAT, enable_thinking=False)
    refused("takes no tools", chat, CHAT, tools=[TOOL])
    refused("temperature is 'hot'; give a finite number", chat, CHAT, temperature="hot")
    refused("temperature is -1", chat, CHAT, temperature=-1)
    refused(r"temperature is array\(.*; give a finite", chat, CHAT, temperature=np.ones(2))
    refused("temperature is 0 .greedy.", chat, CHAT, temperature=0, top_k=3)
    refused("seed is -1; give at least 0", chat, CHAT, seed=-1)
    refused("stop is 3; give a string", chat, CHAT, stop=3)
    refused("stop is ''; give a string", chat, CHAT, stop="")
    refused("stream is True; give a function", chat, CHAT, stream=True)
    refused("stream is True; give a function", compiled.generate, "Say", stream=True)
    bare = GemmaCausalLM(compiled.backbone)
    ids = np.array([[2, 3]])
    refused("has no tokenizer", bare.generate, ids, 4, stop_token_ids=None, stop="a")
    for sampler in (BeamSampler(2), ContrastiveSampler()):
        compiled.use_sampler(sampler)
        refused(f"{type(sampler).__name__} does not support temp", chat, CHAT, temperature=0.5)
        refused("stream is not supported", chat, CHAT, stream=print)
    misspelled = compiled.preprocessor.tokenizer.apply_chat_template
    refused("did you mean add_generation_prompt", misspelled, CHAT, add_generation_promt=True)
    refused(
        "did you mean enable_thinking", misspelled, CHAT, chat_template=QWEN3, enable_thinkin=False
    )


BEYOND = "KV cache of 1 text of 1,000,000,0.. tokens takes .* of memory are free"


def test_a_cache_beyond_the_memory_is_refused_before_it_is_made(compiled, monkeypatch):
    refused(BEYOND, compiled.generate, "Say", 10**9)
    refused(BEYOND, compiled.chat, CHAT, max_new_tokens=10**9)
    with monkeypatch.context() as patch:
        patch.setattr(generate, "available_bytes", lambda: None)
        assert compiled.generate("Say", 4)
    compiled.use_sampler(ContrastiveSampler())
    refused("KV cache of 1 text of 1,000,000,000 tokens", compiled.generate, "Say", 10**9)
    # Drafts are no longer than the text may become.
    compiled.use_sampler("greedy")
    short = {"max_new_tokens": 3, "stop_token_ids": None}
    whole = compiled.chat(CHAT, **short)
    for drafts in (
        {"prompt_lookup_num_tokens": 10**9},
        {"assistant": compiled, "num_assistant_tokens": 10**9},
    ):
        assert compiled.chat(CHAT, **drafts, **short) == whole


def test_a_text_beyond_the_context_is_named(compiled, caplog):
    free = {"max_new_tokens": 2, "stop_token_ids": None}
    compiled.generate("Say", **free)
    assert not caplog.text
    short = GemmaCausalLM.from_preset(
        "gemma3_debug",
        vocabulary_size=500,
        max_sequence_length=8,
        preprocessor=compiled.preprocessor,
    )
    short.generate("Say hello to all of them.", **free)
    assert "and the model was made for up to 8; answers become worse" in caplog.text


@pytest.mark.parametrize("drafts", [{}, {"prompt_lookup_num_tokens": 3}])
def test_new_tokens_follow_the_whole_prompt(model, drafts):
    """Not what the preprocessor's sequence_length leaves of it."""
    text = "Say hello. " * 40
    prompt = model.preprocessor.generate_preprocess(text, sequence_length=1024)
    ids = prompt["token_ids"][prompt["padding_mask"] == 1]
    assert len(ids) > 64
    raw = model.generate(ids, max_new_tokens=4, stop_token_ids=None, **drafts)["token_ids"]
    settings = {"max_new_tokens": 4, "stop_token_ids": None, "strip_prompt": True, **drafts}
    new = model.preprocessor.tokenizer.detokenize(raw[len(ids) :])
    assert model.generate(text, **settings) == new
    assert model.generate([text, "Say"], **settings)[0] == new


def test_numbers_of_numpy_are_numbers(compiled):
    ids, settings = np.array([[2, 3]]), {"stop_token_ids": None}
    whole = compiled.generate(ids, 6, **settings)["token_ids"].tolist()
    four = np.int32(4)
    for given in ({"max_length": four + 2}, {"max_new_tokens": four}):
        for more in ({}, {"prompt_lookup_num_tokens": four}):
            found = compiled.generate(ids, **given, **more, **settings)
            assert found["token_ids"].tolist() == whole


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"token_ids": [[2, 3]], "padding_mask": [[1]]}, r"padding_mask \(1, 1\)"),
        ({"token_ids": [[2, 3], [4]]}, "token_ids and padding_mask are not arrays: "),
        ({"token_ids": [[2, 3]], "padding_mask": [[1, 1]] * 2}, r"padding_mask \(2, 2\)"),
        (np.array(3), r"token_ids has shape \(\)"),
        (np.array([[[2, 3]]]), r"token_ids has shape \(1, 1, 2\)"),
        ({"token_ids": [[2]], "attention_mask": [[1]]}, "did you mean padding_mask"),
        ({"token_ids": [[2]], "positions": [[4]]}, "generate takes no positions"),
        ({"token_ids": [[2]], "images": [[4]]}, "generate takes no images"),
    ],
)
def test_inputs_that_generate_does_not_read(model, inputs, message):
    refused(message, model.generate, inputs, 4)


@pytest.mark.parametrize("sampler", [BeamSampler(2), ContrastiveSampler(k=2)])
def test_beams_and_contrastive_search_stop_at_strings(compiled, sampler):
    compiled.use_sampler(sampler)
    whole = compiled.chat(CHAT, **FREE)
    stop = whole[2:4]
    found = compiled.chat(CHAT, stop=stop, **FREE)
    assert stop not in found and len(found) < len(whole)


def test_a_batch_without_prompts_gives_nothing(model):
    assert model.generate([]) == [] == model.generate({"prompts": []})
    assert model.generate(np.array([], "str")) == [] == model.generate(iter([]))
    found = model.generate(np.zeros((0, 3), "int32"), stop_token_ids=None)
    assert found["token_ids"].shape == (0, 3)


def test_stop_strings_of_the_file_end_texts(compiled):
    settings = {"temperature": 2.0, "seed": 1, "max_new_tokens": 24}
    whole = compiled.chat(CHAT, stop=(), **settings)
    compiled.generation_config = {"stop_strings": [whole[3:5]]}
    cut = whole[: whole.index(whole[3:5])]
    assert compiled.chat(CHAT, **settings) == cut
    assert compiled.generate(CHAT, strip_prompt=True, **settings) == cut
    assert compiled.chat(CHAT, stop=(), **settings) == whole
    compiled.generation_config = {"stop_strings": 3}
    refused("stop_strings is 3; give a string", compiled.chat, CHAT, **settings)


def test_a_special_token_among_stop_strings_is_its_id(model):
    tokenizer = model.preprocessor.tokenizer
    stop = Stop([], ["<end_of_turn>", "a"], tokenizer)
    assert set(stop) == {tokenizer.token_to_id("<end_of_turn>")} and stop.strings == ("a",)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, Sampler(temperature=0.0)),
        ({"do_sample": None, "top_k": None}, Sampler(temperature=0.0)),
        (
            {"do_sample": True, "temperature": None, "top_k": None, "top_p": None, "min_p": None},
            Sampler(1.0, top_k=50, top_p=1.0),
        ),
        ({"do_sample": True, "top_k": 0, "min_p": 0.0}, Sampler(1.0, top_p=1.0, min_p=0.0)),
        ({"repetition_penalty": None}, Sampler(temperature=0.0)),
        ({"suppress_tokens": [], "min_length": 0, "guidance_scale": None}, Sampler(0.0)),
    ],
)
def test_null_and_idle_settings_of_the_file_are_defaults(settings, wanted):
    assert sampler_of(settings) == wanted


@pytest.mark.parametrize(
    "settings",
    [{"min_new_tokens": 3}, {"suppress_tokens": [3]}, {"guidance_scale": 2.0}, {"top_h": 0.4}],
)
def test_settings_of_the_file_without_a_counterpart_are_named(settings):
    (name,) = settings
    refused(f"asks for {name}=", sampler_of, settings)


def test_a_smallest_share_of_zero_keeps_all():
    logits = keras.ops.convert_to_tensor(np.random.default_rng(0).normal(size=(4, 9)), "float32")
    draws = keras.ops.convert_to_tensor([0.1, 0.4, 0.7, 0.99], "float32")
    one, other = (Sampler(min_p=p).choose(logits, None, draws) for p in (None, 0.0))
    np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, (one, other)))
