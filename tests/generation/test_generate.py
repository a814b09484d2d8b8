"""Generation: the cache against the whole model, samplers, stopping, streaming, compiled shapes."""

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels.errors import InputError
from kmodels.generation import Sampler, continue_prompts
from kmodels.generation.generate import bucket
from kmodels.models import GemmaBackbone, GemmaCausalLM
from kmodels.models.gemma.presets import PRESETS

GREEDY = Sampler(temperature=0.0)


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(7)
    model = GemmaCausalLM(GemmaBackbone(**PRESETS["gemma3_debug"]))
    for weight in model.weights:  # away from constant continuations
        weight.assign(weight.value * 3.0)
    return model


@pytest.fixture(scope="module")
def prompts():
    draw = np.random.default_rng(1)
    return [draw.integers(3, 320, length).tolist() for length in (5, 13, 1)]


@pytest.fixture(scope="module")
def continued(model, prompts):
    loops = model.generator.loops
    return continue_prompts(model.backbone, prompts, max_length=29, sampler=GREEDY, loops=loops)


def test_the_cache_changes_nothing(model, prompts, continued):
    ids = np.array(continued, "int32")
    choice = to_numpy(model({"token_ids": ids, "padding_mask": np.ones_like(ids)})).argmax(-1)
    for row, prompt in enumerate(prompts):
        assert continued[row][: len(prompt)] == prompt
        np.testing.assert_array_equal(choice[row, len(prompt) - 1 : -1], ids[row, len(prompt) :])


# How often a step was traced; torch's has its own test in test_compiled_torch.py.
TRACES = {"jax": "_cache_size", "tensorflow": "experimental_get_tracing_count"}


def test_lengths_share_compiled_steps(model, prompts, continued):
    loops = model.generator.loops
    assert len(loops) == 1
    loop = next(iter(loops.values()))
    draw = np.random.default_rng(2)
    for lengths, max_length in (((7, 15, 3), 24), ((1, 2, 16), 31)):
        others = [draw.integers(3, 320, length).tolist() for length in lengths]
        continue_prompts(model.backbone, others, max_length=max_length, sampler=GREEDY, loops=loops)
        assert list(loops.values()) == [loop]
    if count := TRACES.get(keras.backend.backend()):
        assert [getattr(step, count)() for step in (loop.first, loop.following)] == [1, 1]
    # Another bucket is another loop: the counters above can count.
    continue_prompts(model.backbone, [[3] * 17], max_length=18, sampler=GREEDY, loops=loops)
    assert len(loops) == 2


def test_stop_tokens_end_a_row_and_streaming_tells_each_token(model, prompts, continued):
    stop = continued[0][len(prompts[0]) + 2]
    inputs = {
        "token_ids": np.array([row + [0] * (13 - len(row)) for row in prompts]),
        "padding_mask": np.array([[1] * len(row) + [0] * (13 - len(row)) for row in prompts]),
    }
    told: list[list[int]] = [[], [], []]
    found = model.generate(
        inputs, max_length=29, stop_token_ids=[stop], stream=lambda row, t: told[row].append(t)
    )
    for row, prompt in enumerate(prompts):
        new = continued[row][len(prompt) :]
        new = new[: new.index(stop) + 1] if stop in new else new
        assert told[row] == new
        mask = found["padding_mask"][row].astype(bool)
        assert found["token_ids"][row][mask].tolist() == prompt + new
    bare = model.generate(inputs, max_length=29, stop_token_ids=None, strip_prompt=True)
    assert bare["token_ids"][1, :16].tolist() == continued[1][13:]


def test_bucket_sizes():
    assert [bucket(n) for n in (1, 16, 17, 200, 256, 257, 600)] == [16, 16, 32, 256, 256, 512, 768]


def _filtered(sampler, logits, history):
    """The distribution after Transformers' steps, in float64."""
    x = logits.astype("float64").copy()
    if sampler.repetition_penalty:
        for row, held in zip(x, history, strict=True):
            for token in set(held):
                row[token] *= sampler.repetition_penalty ** (-1 if row[token] > 0 else 1)
    x /= sampler.temperature
    for row in x:
        order = np.argsort(-row)
        if sampler.top_k:
            row[order[sampler.top_k :]] = -np.inf
        if sampler.top_p:
            p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            before = np.cumsum(p[order]) - p[order]
            row[order[before >= sampler.top_p]] = -np.inf
        if sampler.min_p:
            row[row < row.max() + np.log(sampler.min_p)] = -np.inf
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(temperature=0.7),
        Sampler(top_k=3),
        Sampler(top_p=0.6),
        Sampler(min_p=0.2),
        Sampler(repetition_penalty=2.5),
        Sampler(temperature=1.3, top_k=6, top_p=0.9, min_p=0.05, repetition_penalty=1.7),
    ],
)
def test_draws_follow_the_filtered_distribution(sampler):
    draw = np.random.default_rng(3)
    logits = draw.normal(0, 2, (1, 9)).astype("float32")
    history = np.array([[0, 4, 4, 7]], "int32")
    wanted = _filtered(sampler, logits, history)[0]
    number = 2000
    draws = ((np.arange(number) + 0.5) / number).astype("float32")
    tokens = to_numpy(
        sampler.choose(
            keras.ops.convert_to_tensor(np.repeat(logits, number, 0)),
            keras.ops.convert_to_tensor(np.repeat(history, number, 0)),
            keras.ops.convert_to_tensor(draws),
        )
    )
    share = np.bincount(tokens, minlength=9) / number
    np.testing.assert_allclose(share, wanted, atol=2 / number)


def test_seeds_decide_the_draws(model, prompts):
    def run(seed):
        sampler = Sampler(temperature=1.5, seed=seed)
        return continue_prompts(model.backbone, prompts[:1], max_length=12, sampler=sampler)

    assert run(1) == run(1) != run(2)


def test_nothing_to_do_and_nothing_to_begin_with(model):
    assert continue_prompts(model.backbone, [[3, 4]], max_length=2, sampler=GREEDY) == [[3, 4]]
    with pytest.raises(InputError, match="prompt 1 is empty"):
        continue_prompts(model.backbone, [[3], []], max_length=4, sampler=GREEDY)
    with pytest.raises(InputError, match="no preprocessor"):
        model.generate("text")
    with pytest.raises(InputError, match="stop_token_ids is 'auto'"):
        model.generate({"token_ids": [[3]], "padding_mask": [[1]]}, max_length=4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": 0.0}, "min_p is 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
    ],
)
def test_sampler_settings_out_of_range(fields, message):
    with pytest.raises(InputError, match=message):
        Sampler(**fields)


def test_unknown_sampler(model):
    with pytest.raises(InputError, match="sampler is 'beam'"):
        model.compile(sampler="beam")
