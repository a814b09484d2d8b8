"""A decoder whose blocks differ in heads, head widths and windows: each has a cache of its own."""

from dataclasses import dataclass
from functools import partial

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels import transforms
from kmodels.generation import Sampler, continue_prompts
from kmodels.generation.cache import ring_shapes
from kmodels.generation.protocol import call_with_cache, empty_cache
from kmodels.memory import activations, estimate
from kmodels.memory.sizes import Setup
from kmodels.models.common.config import BlockConfig, DecoderConfig
from kmodels.models.common.decoder import DecoderBackbone
from kmodels.models.common.layers import DecoderBlock
from kmodels.models.common.sizes import sizes
from tolerances import tolerance

# The loops and the caches are each backend's own.
pytestmark = pytest.mark.each_backend

# (query heads, key/value heads, head width, window) of each block.
SHAPES = ((4, 2, 6, 5), (4, 1, 10, None), (6, 6, 4, 3))
VOCABULARY, WIDTH = 60, 16


@dataclass(frozen=True)
class UnevenConfig(DecoderConfig):
    def block(self, index):
        heads, groups, width, window = SHAPES[index]
        return BlockConfig(
            num_query_heads=heads,
            num_key_value_heads=groups,
            head_dim=width,
            mlp_dim=self.mlp_dim + 4 * index,
            epsilon=self.layer_norm_epsilon,
            query_scale=width**-0.5,
            rope_wavelength=10_000.0,
            window=window,
            use_query_key_norm=index == 1,
        )


class UnevenBlock(DecoderBlock):
    config_class = UnevenConfig


class UnevenBackbone(DecoderBackbone):
    config_class = UnevenConfig
    block_class = UnevenBlock


@pytest.fixture(scope="module")
def backbone():
    keras.utils.set_random_seed(3)
    made = UnevenBackbone(VOCABULARY, len(SHAPES), 4, 2, WIDTH, 24, 6)
    draw = np.random.default_rng(4)
    for weight in made.weights:  # so that no text is constant
        if "norm" in weight.path:
            weight.assign(draw.normal(2.0, 1.0, weight.shape))
    return made


def recomputed(backbone, rows):
    """Logits of each row by the whole model, without a cache."""
    ids = np.zeros((3, 30), "int32")
    for held, row in zip(ids, rows, strict=False):
        held[: len(row)] = row
    hidden = backbone.predict({"token_ids": ids, "padding_mask": np.ones_like(ids)}, verbose=0)
    return to_numpy(backbone.token_embedding.logits(keras.ops.convert_to_tensor(hidden)))


def test_each_block_has_rings_of_its_own_shape(backbone):
    assert backbone.cache_shapes == [(2, 6), (1, 10), (6, 4)]
    rings = [(3, 5, 2, 6), (3, 20, 1, 10), (3, 3, 6, 4)]
    assert ring_shapes(backbone, 3, 20) == [ring for ring in rings for _ in range(2)]


def test_tokens_with_the_cache_are_those_without(backbone):
    draw = np.random.default_rng(5)
    prompts = [draw.integers(1, VOCABULARY, length).tolist() for length in (11, 3, 1)]
    rows = continue_prompts(backbone, prompts, max_length=30, sampler=Sampler(temperature=0.0))
    choice = recomputed(backbone, rows).argmax(-1)
    for row, prompt, chosen in zip(rows, prompts, choice, strict=True):
        assert row[: len(prompt)] == prompt and len(row) == 30
        assert row[len(prompt) :] == chosen[len(prompt) - 1 : -1].tolist()
        assert len(set(row[len(prompt) :])) > 5


def test_one_array_holds_the_caches_of_all_blocks(backbone):
    ids = np.random.default_rng(6).integers(1, VOCABULARY, (2, 9)).astype("int32")
    cache = empty_cache(backbone, 2, 12)
    assert tuple(cache.shape) == (2, 3, 2, 12, 6, 10)
    # Called as it is, it is on JAX a program for each op of each length and block.
    extend = partial(call_with_cache, backbone)
    extend = transforms.jit(extend) if keras.backend.backend() == "jax" else extend
    parts = []
    for start, end in ((0, 6), (6, 7), (7, 9)):
        new, index = map(keras.ops.convert_to_tensor, (ids[:, start:end], np.int32(start)))
        logits, _, cache = extend(new, cache, index)
        parts.append(to_numpy(logits))
    expected = recomputed(backbone, ids.tolist())[:2, :9]
    limit = tolerance("logits")
    np.testing.assert_allclose(np.concatenate(parts, 1), expected, rtol=0, atol=limit)


def test_the_estimate_asks_each_block(backbone):
    setup = Setup(2, 16)
    found = sizes(backbone.config)
    numbers = sum(groups * width for _, groups, width, _ in SHAPES)
    assert estimate.cache_bytes(found, setup, 20) == 2 * 2 * 20 * numbers * 4
    held = {array.name: array for array in activations.of_step([], found, setup)}
    for index, (heads, _, width, _) in enumerate(SHAPES):
        prefix = f"block_{index}"
        assert held[f"{prefix}/attention/turned_query"].shape == (2, 16, heads, width)
        assert held[f"{prefix}/mlp/gate"].shape == (2, 16, 24 + 4 * index)
        assert (f"{prefix}/attention/query" in held) == (index == 1)
