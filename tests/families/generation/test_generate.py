"""Generation: the rings of the cache, samplers, stopping, streaming, compiled shapes.

That tokens with the cache are those without is a check of tests/families/test_families.py.
"""

import math

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels import transforms
from kmodels.generation import BeamSampler, ContrastiveSampler, Sampler, continue_prompts
from kmodels.generation.cache import ring_shapes
from kmodels.generation.generate import bucket
from kmodels.generation.task import empty_cache
from kmodels.models import GemmaBackbone, GemmaCausalLM
from kmodels.models.blocks.sizes import sizes
from kmodels.models.gemma.presets import PRESETS
from kmodels.tools.plan import estimate
from kmodels.tools.plan.estimate import Setup
from refusals import refused
from tolerances import tolerance

# The loops and the caches are each backend's own.
pytestmark = pytest.mark.each_backend

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
def inputs(prompts):
    mask = np.arange(13)[None] < np.array([[len(row)] for row in prompts])
    ids = [row + [0] * (13 - len(row)) for row in prompts]
    return {"token_ids": np.array(ids), "padding_mask": mask.astype(int)}


@pytest.fixture(scope="module")
def continued(model, prompts):
    loops = model.generator.loops
    return continue_prompts(model.backbone, prompts, max_length=29, sampler=GREEDY, loops=loops)


def whole_model(model, rows):
    """Logits of each row without a cache, compiled once: what follows a row changes none of its."""
    ids = np.zeros((6, 32), "int32")
    for held, row in zip(ids, rows, strict=False):
        held[: len(row)] = row
    logits = model.predict({"token_ids": ids, "padding_mask": np.ones_like(ids)}, verbose=0)
    return [found[: len(row)] for found, row in zip(logits, rows, strict=False)]


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


def test_stop_tokens_end_a_row_and_streaming_tells_each_token(model, inputs, prompts, continued):
    stop = continued[0][len(prompts[0]) + 2]
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
    # There may be nothing to do.
    assert continue_prompts(model.backbone, [[3, 4]], max_length=2, sampler=GREEDY) == [[3, 4]]


# === Caches ===

# Blocks of other heads and widths, of which two use the keys and values of another.
UNEVEN = PRESETS["gemma4_debug"]


@pytest.mark.each_time("mixed_bfloat16", on=("jax", "tensorflow"))
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_rings_have_the_compute_dtype_and_a_window_bounds_them_whatever_the_length(policy):
    backbone = GemmaBackbone(**UNEVEN, dtype=policy)
    assert backbone.cache_windows == [8, None] and backbone.cache_shapes == [(2, 8), (1, 16)]
    every = range(backbone.config.vocabulary_size)
    for max_length, slots in ((16, 16 + 16), (300, 16 + 512))[: 2 if policy == "float32" else 1]:
        loops, found = {}, []

        def look(row, token, loops=loops, found=found):
            (loop,) = loops.values()
            rings = loop.rings.values() if isinstance(loop.rings, dict) else loop.rings
            found.extend((keras.backend.standardize_dtype(x.dtype), x.shape) for x in rings)

        settings = {"max_length": max_length, "sampler": GREEDY, "loops": loops}
        continue_prompts(backbone, [[3, 4, 5]], stop=every, on_token=look, **settings)
        assert {dtype for dtype, _ in found} == {backbone.compute_dtype}
        numbers = [int(np.prod(shape)) for _, shape in found]
        assert numbers == [8 * 2 * 8] * 2 + [slots * 16] * 2


def test_one_array_holds_the_caches_of_all_blocks():
    model = GemmaCausalLM(GemmaBackbone(**UNEVEN))
    ids = np.random.default_rng(6).integers(3, 320, (2, 9)).astype("int32")
    cache = empty_cache(model.backbone, 2, 12)
    assert tuple(cache.shape) == (2, 2, 2, 12, 2, 16)
    # Called as it is, it is on JAX a program for each op of each length and block.
    jax = keras.backend.backend() == "jax"
    extend = transforms.jit(model.call_with_cache) if jax else model.call_with_cache
    parts = []
    for start, end in ((0, 6), (6, 7), (7, 9)):
        new, index = map(keras.ops.convert_to_tensor, (ids[:, start:end], np.int32(start)))
        logits, hidden, cache = extend(new, cache, index)
        assert tuple(hidden.shape) == (2, end - start, UNEVEN["hidden_dim"])
        parts.append(to_numpy(logits))
    expected, limit = model.predict(ids, verbose=0), tolerance("logits")
    np.testing.assert_allclose(np.concatenate(parts, 1), expected, rtol=0, atol=limit)


def test_the_estimate_asks_each_block():
    setup = Setup(2, 16)
    plain, uneven = (GemmaBackbone.make_config(**x) for x in (PRESETS["gemma_debug"], UNEVEN))
    rings = ring_shapes(GemmaBackbone(**UNEVEN), 2, 20)
    assert estimate.cache_bytes(sizes(uneven), setup, 20) == sum(map(math.prod, rings)) * 4
    held = {array.name: array for array in estimate.of_step([], sizes(uneven), setup)}
    for index, (width, mlp) in enumerate(((8, 64), (16, 64), (8, 128), (16, 128))):
        assert held[f"block_{index}/attention/turned_query"].shape == (2, 16, 4, width)
        assert held[f"block_{index}/mlp/gate"].shape == (2, 16, mlp)
    # What a norm of queries was given.
    names = {array.name for array in estimate.of_step([], sizes(plain), setup)}
    assert "block_1/attention/query" in set(held) - names


# === Samplers ===


def test_the_penalty_knows_all_tokens_of_a_row(model, prompts):
    penalty, changed = 3.0, 0
    sampler = Sampler(temperature=0.0, repetition_penalty=penalty)
    rows = continue_prompts(model.backbone, prompts, max_length=30, sampler=sampler)
    for row, prompt, logits in zip(rows, prompts, whole_model(model, rows), strict=True):
        for i in range(len(prompt), len(row)):
            scores, held = logits[i - 1].copy(), sorted(set(row[:i]))
            known = scores[held]
            scores[held] = np.where(known > 0, known / penalty, known * penalty)
            assert row[i] == scores.argmax()
            changed += scores.argmax() != logits[i - 1].argmax()
    assert changed > 3


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


def test_a_seed_of_the_sampler_begins_its_own_sequence(model, prompts):
    loops = {}

    def run(sampler):
        settings = {"max_length": 12, "sampler": sampler, "loops": loops}
        return continue_prompts(model.backbone, prompts[:1], **settings)

    first, second = Sampler(temperature=1.5, seed=1), Sampler(temperature=1.5, seed=1)
    calls = [run(first), run(first)]
    assert calls[0] != calls[1]
    assert [run(second), run(second)] == calls
    assert run(Sampler(temperature=1.5, seed=2)) != calls[0]


# What the second call after seed 3 draws, the same on each backend.
DRAWN = [14, 14, 146, 29]


def test_calls_differ_and_repeat_after_the_seed_is_set(model, prompts):
    loops = {}

    def run():
        settings = {"max_length": 9, "sampler": Sampler(temperature=1.5), "loops": loops}
        return continue_prompts(model.backbone, prompts[:1], **settings)[0]

    keras.utils.set_random_seed(3)
    calls = [run(), run(), run()]
    assert len({tuple(call) for call in calls}) == 3
    keras.utils.set_random_seed(3)
    assert [run(), run(), run()] == calls
    assert calls[1][5:] == DRAWN


PROMPT = {"token_ids": [[3]], "padding_mask": [[1]]}


def drawn(model, sampler):
    model.use_sampler(sampler)
    try:
        return model.generate(PROMPT, 6, stop_token_ids=None)["token_ids"].tolist()
    finally:
        model.use_sampler("greedy")


def test_shares_too_small_for_float32_keep_the_most_likely_token(model):
    assert drawn(model, Sampler(top_p=1e-300)) == drawn(model, "greedy")
    assert drawn(model, ContrastiveSampler(k=10**6, alpha=0)) == drawn(model, "greedy")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _: Sampler(temperature=-1), "temperature is -1"),
        (lambda _: Sampler(top_k=0), "top_k is 0"),
        (lambda _: Sampler(top_p=1.5), "top_p is 1.5"),
        (lambda _: Sampler(min_p=-0.1), "min_p is -0.1"),
        (lambda _: Sampler(repetition_penalty=0.0), "repetition_penalty is 0"),
        # In float32, probabilities become NaN.
        (lambda _: Sampler(temperature=1e-40), "temperature is 1e-40; give 0"),
        (lambda _: Sampler(temperature=float("inf")), "temperature is inf; give a finite number"),
        (lambda _: Sampler(temperature=False), "temperature is False; give a finite number"),
        (lambda _: Sampler(repetition_penalty=1e-40), "repetition_penalty is 1e-40; give a num"),
        (lambda _: BeamSampler(length_penalty="1"), "length_penalty is '1'; give a finite number"),
        (lambda _: BeamSampler(length_penalty=5e3), "length_penalty is 5000.0; give a number"),
        (lambda _: ContrastiveSampler(alpha=float("nan")), "alpha is nan; give a finite number"),
        (lambda model: drawn(model, BeamSampler(temperature=0.0)), "BeamSampler divides by it"),
        (lambda model: drawn(model, ContrastiveSampler(temperature=0.0)), "Sampler divides by it"),
        (lambda model: model.compile(sampler={"class_name": "x"}), "sampler is {'class_name'"),
        (lambda model: model.compile(sampler="beams"), "sampler is 'beams'"),
        (
            lambda model: continue_prompts(model.backbone, [[3], []], max_length=4, sampler=GREEDY),
            "prompt 1 is empty",
        ),
        (lambda model: model.generate("text"), "no preprocessor"),
        (lambda model: model.generate(PROMPT, max_length=4), "stop_token_ids is 'auto'"),
        (
            lambda model: model.generate(PROMPT, max_length=4, stop_token_ids=3),
            "stop_token_ids is 3; give a list of ids, 'auto' or None",
        ),
        (
            lambda model: model.generate(PROMPT, max_length=4, stop_token_ids=[1, 2.5]),
            "a token of stop_token_ids is 2.5; give a whole number",
        ),
        (
            lambda model: model.generate(PROMPT, 4, max_new_tokens=2),
            "max_length and max_new_tokens; give one",
        ),
        (
            lambda model: model.generate(PROMPT, 4, num_return_sequences=0),
            "num_return_sequences is 0",
        ),
        (lambda model: model.score(PROMPT, scoring_mode="perplexity"), "mode is 'perplexity'"),
        (lambda model: model.score(PROMPT, scoring_mode="loss"), "give target_ids"),
    ],
)
def test_settings_that_cannot_be(model, call, message):
    refused(message, call, model)


def test_each_prompt_has_its_own_new_tokens_and_its_own_sequences(
    model, inputs, prompts, continued
):
    found = model.generate(inputs, stop_token_ids=None, max_new_tokens=4)
    for row, prompt in enumerate(prompts):
        mask = found["padding_mask"][row] == 1
        assert found["token_ids"][row][mask].tolist() == continued[row][: len(prompt) + 4]
    model.use_sampler(Sampler(temperature=2.0))
    found = model.generate(inputs, 16, stop_token_ids=None, num_return_sequences=2)["token_ids"]
    model.use_sampler("greedy")
    for row, prompt in enumerate(prompts):
        one, other = found[2 * row].tolist(), found[2 * row + 1].tolist()
        assert one[: len(prompt)] == other[: len(prompt)] == prompt and one != other


def _log_probabilities(model, rows, start):
    """Of each row's tokens from `start` on."""
    found = []
    for row, logits in zip(rows, whole_model(model, rows), strict=True):
        logits = logits.astype("float64")
        likely = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1))[:, None]
        likely -= logits.max(-1, keepdims=True)
        found.append(sum(likely[place - 1, row[place]] for place in range(start, len(row))))
    return found


def test_beam_search_finds_what_is_more_likely(model, prompts):
    inputs = {"token_ids": np.array([prompts[0], prompts[1][:5]])}
    greedy = model.generate(inputs, 9, stop_token_ids=None)["token_ids"]
    model.use_sampler(BeamSampler(num_beams=4))
    found = model.generate(inputs, 9, stop_token_ids=None, num_return_sequences=3)["token_ids"]
    for settings, message in (
        ({"num_return_sequences": 5}, "num_return_sequences is 5"),
        ({"stream": print}, "stream is not supported with BeamSampler"),
    ):
        refused(message, model.generate, inputs, 9, stop_token_ids=None, **settings)
    best = found[::3]
    stop = int(best[0, 6])
    stopped = model.generate(inputs, 9, stop_token_ids=[stop])
    model.use_sampler("greedy")
    # Beams end where a stop token is chosen.
    row = stopped["token_ids"][0][stopped["padding_mask"][0] == 1]
    assert row[-1] == stop or len(row) == 9
    assert stop not in row[5:-1]
    for row in range(2):
        beams = found[3 * row :][:3]
        *scores, single = _log_probabilities(model, [*beams, greedy[row]], 5)
        assert sorted(scores, reverse=True) == scores
        assert scores[0] >= single - 1e-5


@pytest.mark.nightly("jax", "tensorflow")
def test_contrastive_search_without_a_penalty_is_greedy(model, prompts, continued):
    inputs = {"token_ids": np.array([prompts[0]])}
    model.use_sampler(ContrastiveSampler(k=3, alpha=0.0))
    same = model.generate(inputs, 12, stop_token_ids=None)["token_ids"][0]
    model.use_sampler(ContrastiveSampler(k=3, alpha=0.9))
    other = model.generate(inputs, 12, stop_token_ids=None)["token_ids"][0]
    model.use_sampler("greedy")
    assert same.tolist() == continued[0][:12] != other.tolist()


def test_a_call_with_cache_of_ones_own_is_what_generate_calls(model, prompts, monkeypatch):
    given = model.call_with_cache

    def always_seven(*args):
        logits, hidden, cache = given(*args)
        return keras.ops.where(keras.ops.arange(logits.shape[-1]) == 7, 1e9, logits), hidden, cache

    monkeypatch.setattr(model, "call_with_cache", always_seven)
    model.use_sampler("greedy")
    inputs = {"token_ids": np.array([prompts[0]])}
    found = model.generate(inputs, 8, stop_token_ids=None)["token_ids"][0].tolist()
    assert found == [*prompts[0], 7, 7, 7]
    message = "own call_with_cache, which supports neither streams nor beams"
    refused(message, model.generate, inputs, 8, stop_token_ids=None, stream=print)


def test_scores_are_logits_and_losses_and_layers_can_be_changed(model, prompts):
    ids = np.array([prompts[1]], "int32")
    logits = to_numpy(model(ids))
    np.testing.assert_allclose(to_numpy(model.score(ids)), logits, atol=1e-5)
    targets = np.roll(ids, -1, 1)
    loss = to_numpy(model.score(ids, scoring_mode="loss", target_ids=targets))[0, :-1]
    rows = [prompts[1][: n + 1] for n in (1, 5, 12)]
    wanted = [_log_probabilities(model, [row], len(row) - 1)[0] for row in rows]
    np.testing.assert_allclose(loss[[0, 4, 11]], np.negative(wanted), atol=1e-4)
    seen = []

    def intercept(x, number):
        seen.append((number, tuple(x.shape)))
        return x * 0.0 if number == 0 else x

    changed = to_numpy(model.score(ids, layer_intercept_fn=intercept))
    assert seen == [(number, (1, 13, 32)) for number in (-1, 0, 1)]
    assert np.ptp(changed, axis=1).max() < 1e-5 < np.ptp(logits, axis=1).max()
