"""Drafts of an assistant or of n-grams: the tokens are those without them, in fewer passes."""

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels.generation import BeamSampler, ContrastiveSampler, DraftCounts, Sampler
from kmodels.generation.drafts import AssistantDrafter, LookupDrafter, drafter_of
from kmodels.models import (
    GemmaBackbone,
    GemmaCausalLM,
    GemmaCausalLMPreprocessor,
    Qwen3Backbone,
    Qwen3CausalLM,
)
from kmodels.models.gemma.presets import PRESETS
from kmodels.models.qwen3 import PRESETS as QWEN
from kmodels.text import demo
from kmodels.text.training import train_tokenizer
from refusals import refused
from tolerances import TOLERANCES

# Past two windows of 8, and longer than the rings of the blocks that have one.
LENGTH = 46
# Longer than the window, shorter, one token.
LENGTHS = (19, 3, 1)


def made(preset="gemma2_debug", seed=11, dtype="float32", **fields):
    keras.utils.set_random_seed(seed)
    model = GemmaCausalLM(GemmaBackbone(**{**PRESETS[preset], **fields}, dtype=dtype))
    draw = np.random.default_rng(12)
    for weight in model.weights:  # so that blocks outweigh the embedding, and no text is constant
        if "norm" in weight.path:
            weight.assign(draw.normal(5.0, 3.0, weight.shape))
    return model


@pytest.fixture(scope="module")
def model():
    return made()


@pytest.fixture(scope="module")
def other():
    """Another family with the vocabulary of the model, whose drafts are mostly wrong."""
    keras.utils.set_random_seed(3)
    return Qwen3CausalLM(Qwen3Backbone(**QWEN["qwen3_debug"]))


def batch(lengths, seed=5):
    mask = np.arange(max(lengths))[None] < np.array(lengths)[:, None]
    ids = np.random.default_rng(seed).integers(3, 320, mask.shape)
    return {"token_ids": ids * mask, "padding_mask": mask}


def rows(found):
    pairs = zip(found["token_ids"], found["padding_mask"], strict=True)
    return [ids[mask.astype(bool)].tolist() for ids, mask in pairs]


def continued(model, inputs, **settings):
    return rows(model.generate(inputs, **{"max_length": LENGTH, "stop_token_ids": None} | settings))


@pytest.fixture(scope="module")
def plain(model):
    return continued(model, batch(LENGTHS))


@pytest.mark.nightly("tensorflow")
@pytest.mark.each_backend
def test_a_model_that_assists_itself_passes_once_for_all_drafts(model, plain):
    assert model.draft_counts is None
    assert all(len(set(row[-27:])) > 10 for row in plain)
    assert continued(model, batch(LENGTHS), assistant=model) == plain
    counts = model.draft_counts
    # The prompts, then five drafts and a token behind them; the last draft may look beyond the end.
    assert counts.passes == 1 + -(-(LENGTH - 1 - 1) // 6)
    assert counts.tokens == 3 * LENGTH - sum(LENGTHS)
    assert 0 <= counts.drafted - counts.accepted <= 5 * 3
    # Compiled steps serve the next prompts, and calls without drafts keep theirs.
    loops = {**model.generator.loops, **model.generator.draft_loops}
    inputs = batch((7, 22, 2), 6)
    assert continued(model, inputs, assistant=model) == continued(model, inputs)
    assert {**model.generator.loops, **model.generator.draft_loops} == loops


@pytest.mark.nightly("tensorflow")
@pytest.mark.each_backend
def test_wrong_drafts_change_no_token(model, other, plain):
    assert continued(model, batch(LENGTHS), assistant=other) == plain
    counts = model.draft_counts
    assert counts.accepted < 0.3 * counts.drafted
    # None is worse than no drafts: each pass gives every open row a token.
    assert counts.passes <= LENGTH - 1


def test_ngrams_repeat_a_text_that_repeats_itself(model):
    drafter = LookupDrafter(4)
    texts = [[1, 2, 3, 4, 9, 2, 3], [5, 6], [7, 8, 7], [1, 2, 3, 5, 2, 3, 6, 1, 2, 3]]
    drafter.start(texts, 9, Sampler(temperature=0.0))
    found = drafter.draft(texts, np.zeros((4, 5), "float32"))
    # What stood behind (2, 3); nothing; 8, 7 again and again; the longest n-gram counts.
    assert found.tolist() == [[4, 9, 2, 3], [0] * 4, [8, 7, 8, 7], [5, 2, 3, 6]]
    assert drafter.draft([[5, 6], [5, 6]], np.zeros((2, 5), "float32")).shape == (2, 0)


def test_a_constant_text_takes_few_passes():
    keras.utils.set_random_seed(7)
    model = GemmaCausalLM(GemmaBackbone(**PRESETS["gemma3_debug"]))
    for weight in model.weights:  # it repeats its last token for ever
        weight.assign(weight.value * 3.0)
    wanted = continued(model, batch((9, 2)))
    assert continued(model, batch((9, 2)), prompt_lookup_num_tokens=4) == wanted
    counts = model.draft_counts
    assert counts.passes < 0.4 * (LENGTH - 2)
    assert counts.accepted > 0.8 * counts.drafted


def test_stops_limits_and_streams_in_the_midst_of_drafts(model, plain):
    stop, told = plain[0][LENGTHS[0] + 3], [[], [], []]
    settings = {"max_length": None, "max_new_tokens": 30, "stop_token_ids": [stop]}
    stream = {"stream": lambda row, token: told[row].append(token)}
    found = continued(model, batch(LENGTHS), assistant=model, **settings, **stream)
    for row, whole, start, new in zip(found, plain, LENGTHS, told, strict=True):
        wanted = whole[start : start + 30]
        wanted = wanted[: wanted.index(stop) + 1] if stop in wanted else wanted
        assert row == whole[:start] + wanted and new == wanted
    assert len(told[0]) == 4 and len(told[1]) == 30
    # A row that has no room, and a batch that has none.
    prompts = [row[:length] for row, length in zip(plain, LENGTHS, strict=True)]
    limits = [LENGTHS[0], 33, 31]
    rows = model.generate_step(prompts, limits, drafter=drafter_of(model, model, 5, None))
    assert rows == [row[:limit] for row, limit in zip(plain, limits, strict=True)]
    tight = {"max_length": 1, "assistant": model}
    assert continued(model, batch(LENGTHS), **tight) == [row[:1] for row in plain]
    assert model.draft_counts == DraftCounts()


def test_a_sampler_draws_what_it_does_without_drafts():
    model = made("gemma3_debug")
    inputs, settings = batch((11,)), {"max_length": 30, "num_return_sequences": 3}

    def run(**drafts):
        model.compile(sampler=Sampler(4.0, top_k=40, top_p=0.9, repetition_penalty=1.7, seed=4))
        return [continued(model, inputs, **settings, **drafts) for _ in range(2)]

    wanted = run()
    assert len({tuple(row) for rows in wanted for row in rows}) == 6
    assert run(assistant=model) == wanted
    assert model.draft_counts.passes == 1 + -(-18 // 6)
    assert run(prompt_lookup_num_tokens=5) == wanted


def test_adapters_of_the_model(model, plain):
    tuned = made()
    tuned.backbone.enable_lora(rank=2)
    draw = np.random.default_rng(8)
    for variable in tuned.backbone.trainable_variables:
        variable.assign(draw.normal(0, 0.3, variable.shape))
    wanted, counts = continued(tuned, batch(LENGTHS)), []
    one = batch(LENGTHS[:1])
    assert continued(tuned, batch(LENGTHS), assistant=model) == wanted != plain
    counts.append(tuned.draft_counts)
    assert continued(tuned, one, assistant=model, num_assistant_tokens=1) == wanted[:1]
    counts.append(tuned.draft_counts)
    assert all(0 < count.accepted < count.drafted for count in counts)
    assert counts[1].passes < counts[1].tokens


def test_bfloat16_differs_at_near_ties_alone(model):
    """A pass over six tokens may round products otherwise than six passes do."""
    half = made(dtype="bfloat16")
    wanted = continued(half, batch(LENGTHS))
    found = continued(half, batch(LENGTHS), assistant=model)
    assert half.draft_counts.accepted > 20
    for mine, other in zip(found, wanted, strict=True):
        differ = [at for at, pair in enumerate(zip(mine, other, strict=True)) if len(set(pair)) > 1]
        if differ:
            logits = to_numpy(half(np.array([other[: differ[0]]])))[0, -1].astype("float64")
            gap = abs(logits[mine[differ[0]]] - logits[other[differ[0]]])
            assert gap <= TOLERANCES["logits"]["bfloat16"] * abs(logits).max()


def test_equal_tokenizers_allow_tables_of_other_sizes(model):
    tokenizer = train_tokenizer(demo.texts(), 500)
    text = GemmaCausalLMPreprocessor(tokenizer, sequence_length=40)
    large = made("gemma3_debug", vocabulary_size=520)
    small = made("gemma3_debug", seed=4, vocabulary_size=500)
    large.preprocessor = text
    small.preprocessor = GemmaCausalLMPreprocessor(tokenizer.to_dict())
    settings = {"max_length": 14, "stop_token_ids": None}
    wanted = large.generate("Say hello.", **settings)
    assert large.generate("Say hello.", **settings, assistant=small) == wanted
    # Ids that the assistant has no row for come from outside as well.
    ids = np.array([[519, 3, 4]])
    wanted = continued(large, ids, max_length=14)
    assert continued(large, ids, max_length=14, assistant=small) == wanted
    # Nor may it draft some that the model has no row for: this one says one of its last.
    table = to_numpy(large.backbone.token_embedding.embeddings.value).copy()
    table[518:] = [[100.0], [-100.0]]
    large.backbone.token_embedding.embeddings.assign(table)
    drafter = AssistantDrafter(large, 1, 500)
    drafter.start([[5, 3]], 4, Sampler(temperature=0.0))
    drafts = drafter.draft([[5, 3, 4]], np.zeros((1, 2), "float32"))
    drafter.finish()
    assert to_numpy(drafts).tolist() == [[499]]
    small.preprocessor = GemmaCausalLMPreprocessor(train_tokenizer(demo.texts(), 490))
    message = "a tokenizer with other tokens than the model's"
    refused(message, large.generate, "Say hello.", assistant=small)
    message = "a vocabulary of 500 tokens and the model one of 320"
    refused(message, continued, model, batch((3,)), assistant=small)


def test_what_is_refused(model, other, monkeypatch):
    for settings, words in (
        ({"assistant": other, "prompt_lookup_num_tokens": 3}, "give one of them"),
        ({"assistant": other, "num_assistant_tokens": 0}, "num_assistant_tokens is 0"),
        ({"num_assistant_tokens": 2}, "num_assistant_tokens is 2 without an assistant"),
        ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens is 0"),
        ({"assistant": "small"}, "assistant is of type str; give a task that generates"),
        ({"assistant": other.backbone}, "assistant is of type Qwen3Backbone"),
    ):
        refused(words, continued, model, batch((3,)), **settings)
    for sampler in (BeamSampler(2), ContrastiveSampler()):
        model.compile(sampler=sampler)
        words = f"{type(sampler).__name__} does not support drafts"
        for drafts in ({"assistant": other}, {"prompt_lookup_num_tokens": 3}):
            refused(words, continued, model, batch((3,)), **drafts)
    model.compile(sampler="greedy")
    monkeypatch.setattr(model, "call_with_cache", lambda *_: None)
    words = "own call_with_cache does not support drafts"
    refused(words, continued, model, batch((3,)), assistant=other)
