"""The rings of the cache: exact beyond the window, and no larger than it."""

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels.generation import Sampler, continue_prompts
from kmodels.models import GemmaBackbone, GemmaCausalLM
from kmodels.models.gemma.presets import PRESETS

# The loops and the caches are each backend's own.
pytestmark = pytest.mark.each_backend

WINDOW = 8
# The longest row.
LENGTH = 55


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(11)
    model = GemmaCausalLM(GemmaBackbone(**PRESETS["gemma2_debug"]))
    assert model.backbone.cache_windows == [WINDOW, None]
    draw = np.random.default_rng(12)
    for weight in model.weights:  # so that blocks outweigh the embedding, and no text is constant
        if "norm" in weight.path:
            weight.assign(draw.normal(5.0, 3.0, weight.shape))
    return model


@pytest.fixture(scope="module")
def prompts():
    """Longer than the window, shorter, as long, one token."""
    draw = np.random.default_rng(5)
    return [draw.integers(3, 320, length).tolist() for length in (19, 3, WINDOW, 1)]


def recomputed(model, rows):
    """Logits of each row by the whole model, without a cache, compiled for all lengths at once."""
    ids = np.zeros((len(rows), LENGTH), "int32")
    for held, row in zip(ids, rows, strict=True):
        held[: len(row)] = row
    return model.predict({"token_ids": ids, "padding_mask": np.ones_like(ids)}, verbose=0)


def test_tokens_are_those_of_the_whole_model_over_several_windows(model, prompts):
    rows = continue_prompts(
        model.backbone, prompts, max_length=LENGTH, sampler=Sampler(temperature=0.0)
    )
    choice = recomputed(model, rows).argmax(-1)
    for row, prompt, chosen in zip(rows, prompts, choice, strict=True):
        assert len(row) == LENGTH
        assert row[: len(prompt)] == prompt
        assert row[len(prompt) :] == chosen[len(prompt) - 1 : -1].tolist()
        assert len(set(row[len(prompt) :])) > 10


def test_the_penalty_knows_all_tokens_of_a_row(model, prompts):
    penalty = 3.0
    sampler = Sampler(temperature=0.0, repetition_penalty=penalty)
    rows = continue_prompts(model.backbone, prompts, max_length=30, sampler=sampler)
    changed = 0
    for row, prompt, logits in zip(rows, prompts, recomputed(model, rows), strict=True):
        for i in range(len(prompt), len(row)):
            scores = logits[i - 1].copy()
            held = sorted(set(row[:i]))
            scores[held] = np.where(
                scores[held] > 0, scores[held] / penalty, scores[held] * penalty
            )
            assert row[i] == scores.argmax()
            changed += scores.argmax() != logits[i - 1].argmax()
    assert changed > 3


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16"])
def test_the_rings_have_the_compute_dtype(policy):
    backbone = GemmaBackbone(**PRESETS["gemma3_debug"], dtype=policy)
    loops, dtypes = {}, set()

    def look(row, token):
        (loop,) = loops.values()
        rings = loop.rings.values() if isinstance(loop.rings, dict) else loop.rings
        dtypes.update(keras.backend.standardize_dtype(ring.dtype) for ring in rings)

    sampler = Sampler(temperature=0.0)
    prompt = [3, 4, 5]
    rows = continue_prompts(
        backbone, [prompt], max_length=14, sampler=sampler, on_token=look, loops=loops
    )
    assert rows[0][:3] == prompt and len(rows[0]) == 14
    assert dtypes == {"bfloat16"}


def ring_bytes(model, max_length):
    """Bytes of each ring while one prompt is continued, two a layer."""
    loops, sizes = {}, []

    def look(row, token):
        (loop,) = loops.values()
        rings = loop.rings.values() if isinstance(loop.rings, dict) else loop.rings
        sizes.extend(to_numpy(ring).nbytes for ring in rings)

    every = range(model.backbone.config.vocabulary_size)
    settings = {"max_length": max_length, "sampler": Sampler(temperature=0.0), "loops": loops}
    continue_prompts(model.backbone, [[3, 4, 5]], stop=every, on_token=look, **settings)
    return sizes


def test_a_window_bounds_its_layers_whatever_the_length(model):
    config = model.backbone.config
    token = config.num_key_value_heads * config.head_dim * 4
    short, long = ring_bytes(model, 16), ring_bytes(model, 300)
    assert short == [WINDOW * token] * 2 + [(16 + 16) * token] * 2
    assert long == [WINDOW * token] * 2 + [(16 + 512) * token] * 2
