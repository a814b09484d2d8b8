"""Attention in each way that it is computed in parts, beside NumPy's float64, and what it holds.

Short calls, and each dtype: `overrides/test_parity.py`.
"""

import importlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from arrays_made import shapes_made, squares
from gradients import assert_near, differences, second_derivative, to_numpy
from kmodels import ops, transforms
from kmodels.ops.attention import cuts
from numpy_attention import check
from tolerances import tolerance

BACKEND = keras.backend.backend()
module = importlib.import_module("kmodels.ops.attention")  # the name is the op's
# What is set for each way, in modules of overrides: a block of 32 queries after the other by the
# op's own body; on JAX the loops of long texts; on torch SDPA.
WAYS: dict[str, dict[str, Any]] = {"blocks": {}}
if BACKEND == "jax":
    WAYS["loops"] = {"attention_jax.PAIRS": 0}
if BACKEND == "torch":
    WAYS["sdpa"] = {}
each_way = pytest.mark.parametrize("way", WAYS, indirect=True)
QUERIES, KEYS = 100, 117
RNG = np.random.default_rng(2)
SEGMENTS = np.sort(RNG.integers(0, 4, (2, KEYS)), axis=1).astype("int32")
IMAGES = np.where(RNG.random((2, KEYS)) > 0.7, -1, np.arange(KEYS) // 30).astype("int32")
MASK = RNG.random((2, 4, QUERIES, KEYS)) > 0.4
MASK[0, :, 40] = False
# Blocks that lengths do not divide, and fewer queries than keys.
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "causal window, mask": {"causal": True, "window": 70, "mask": MASK},
    "window, segments": {"window": 40, "segment_ids": SEGMENTS},
    "causal window, segments": {"causal": True, "window": 70, "segment_ids": SEGMENTS[:1]},
    "soft cap, mask of keys": {"soft_cap": 0.5, "mask": MASK[:, :1, :1]},
    "images, window, segments": {
        **{"causal": True, "window": 40, "block_ids": IMAGES, "segment_ids": SEGMENTS[:1]}
    },
}


def arrays(queries: int = QUERIES, keys: int = KEYS, width: int = 8) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    sizes = ((queries, 4), (keys, 2), (keys, 2))
    return [rng.normal(size=(2, *size, width)).astype("float32") for size in sizes]


@pytest.fixture
def way(request, monkeypatch) -> Callable[..., Any]:
    """The op or its own body, computed in the way that is asked for."""
    name = getattr(request, "param", "blocks")
    for place, value in WAYS[name].items():
        file, _, attribute = place.partition(".")
        monkeypatch.setattr(importlib.import_module(f"kmodels.overrides.{file}"), attribute, value)
    if name != "blocks":
        return ops.attention
    monkeypatch.setattr(module, "PAIRS", 0)
    monkeypatch.setattr(module, "MOST", 32)
    monkeypatch.setattr(module, "LEAST", 32)
    return ops.attention.generic


def one_block(function, *given):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PAIRS", 2**40)
        return function(*given)


@each_way
@pytest.mark.parametrize("label", CASES)
def test_values_and_gradients(label: str, way) -> None:
    check(way, arrays(), CASES[label], compiled=True)


@each_way
@pytest.mark.parametrize("keywords", [{"causal": True}, {"causal": True, "window": 20}], ids=str)
def test_as_many_queries_as_keys(keywords, way) -> None:
    check(way, arrays(KEYS), keywords, compiled=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(dtype: str, way) -> None:
    check(way, arrays(), CASES["causal window, mask"], dtype, compiled=True)


@each_way
def test_dropout_is_drawn_again_as_it_was(way) -> None:
    given = arrays(37, 43)

    def run(*values, seed=5):
        generator = keras.random.SeedGenerator(seed)
        return way(*values, causal=True, dropout=0.4, seed=generator)

    differences(run, given)
    tensors = [keras.ops.convert_to_tensor(x) for x in given]
    for other in (run(*tensors, seed=6), way(*tensors, causal=True)):
        assert np.abs(to_numpy(run(*tensors)) - to_numpy(other)).max() > 0.1


def segments(keys: int, size: int) -> np.ndarray:
    return (np.arange(keys)[None] // size).astype("int32")


def images(keys: int, every: int, size: int) -> np.ndarray:
    """Blocks of `size` tokens, one in each `every`."""
    place = np.arange(keys)[None]
    return np.where(place % every < size, place // every, -1).astype("int32")


def mask(length: int, keys: int) -> np.ndarray:
    """Hides every tenth pair, and all from one query."""
    found = np.add.outer(np.arange(length) * 7, np.arange(keys) * 3) % 10 > 0
    found[length // 2] = False
    return found[None, None]


# Queries, keys, heads, heads of keys, width, and the call.
LENGTHS = {
    "128, window, cap": (128, 128, 4, 2, 8, {"causal": True, "window": 50, "soft_cap": 2.0}),
    "513, mask, segments": (
        *(513, 513, 4, 2, 4),
        {"causal": True, "mask": mask(513, 513), "segment_ids": segments(513, 100)},
    ),
    "1537, window, segments": (
        *(1537, 1537, 4, 2, 4),
        {"causal": True, "window": 300, "segment_ids": segments(1537, 700)},
    ),
    "1537, images, window": (
        *(1537, 1537, 2, 1, 4),
        {"causal": True, "window": 300, "block_ids": images(1537, 200, 64)},
    ),
    "1025 of 1300, cap, segments": (
        *(1025, 1300, 2, 1, 4),
        {"causal": True, "soft_cap": 1.5, "segment_ids": segments(1300, 500)},
    ),
    "1100, mask, images": (
        *(1100, 1100, 2, 1, 4),
        {"causal": True, "mask": mask(1100, 1100), "block_ids": images(1100, 150, 70)},
    ),
    "2049, window to both sides": (2049, 2049, 2, 1, 4, {"window": 200}),
    "8192": (8192, 8192, 1, 1, 4, {"causal": True}),
    "4096, window, segments, cap": (
        *(4096, 4096, 1, 1, 4),
        {"causal": True, "window": 700, "segment_ids": segments(4096, 1500), "soft_cap": 2.0},
    ),
}


@pytest.mark.each_time(
    "4096, window, segments, cap",
    "1537, images, window",
    "513, mask, segments",
    "128, window, cap",
    on=("jax", "tensorflow"),
)
@pytest.mark.parametrize(
    "label",
    # The shorter cases have what this one has.
    [pytest.param(label, marks=[pytest.mark.nightly] * (label == "8192")) for label in LENGTHS],
)
def test_lengths(label: str) -> None:
    """By the override where there is one, and by the op's own body, as they choose their blocks."""
    length, keys, heads, groups, width, keywords = LENGTHS[label]
    rng = np.random.default_rng(len(label))
    sizes = ((length, heads), (keys, groups), (keys, groups))
    given = [rng.normal(size=(1, *size, width)).astype("float32") for size in sizes]
    bodies = [ops.attention.generic]
    if ops.attention.declines(*map(keras.ops.convert_to_tensor, given), **keywords) is None:
        bodies.append(ops.attention)
    check(bodies, given, keywords, compiled=True)


@pytest.mark.each_time("reverse", on=("tensorflow",))
@pytest.mark.parametrize("mode", ["reverse"] if BACKEND == "torch" else ["reverse", "forward"])
def test_second_derivatives(mode: str, way) -> None:
    """torch has forward mode inside of torch.func alone, as the next test does."""
    short = {
        key: x[:, -43:] if key.endswith("ids") else x
        for key, x in CASES["images, window, segments"].items()
    }

    def run(*values):
        return way(*values, **short)

    given = arrays(37, 43, 4)
    wanted = one_block(second_derivative, run, given, mode)
    assert_near(second_derivative(run, given, mode), wanted, 10 * tolerance("attention"))


def test_transforms(way) -> None:
    """A map over calls, and the second derivative by one input."""
    # Ungrouped: TensorFlow's softmax has one axis less than grouped heads of a map would take.
    q, k, v = (keras.ops.convert_to_tensor(x[:, :, :2]) for x in arrays(37, 43, 4))
    ids = SEGMENTS[:1, :43]
    keywords = {"causal": True, "segment_ids": ids}

    def rows(q, k, v):
        return way(q[None], k[None], v[None], **keywords)[0]

    whole = way(q, k, v, **keywords)
    assert_near([transforms.vmap(rows)(q, k, v)], [whole], tolerance("attention"))
    few = q[:, -32:]  # blocks of one size are one loop: TensorFlow maps it slowly

    def of_scale(x):
        return keras.ops.sum(way(few * x, k, v, segment_ids=ids)[:, -1])

    x = keras.ops.convert_to_tensor(np.float32(1.3))
    found = to_numpy(transforms.hessian(of_scale)(x))
    wanted = to_numpy(one_block(transforms.hessian(of_scale), x))
    assert abs(wanted) > 1e-2
    assert abs(found - wanted) <= 1e-3 * abs(wanted)


def test_dropout_drops_its_share_of_each_row_and_column(way) -> None:
    ones = keras.ops.ones((4, 64, 2, 8))
    places = keras.ops.convert_to_tensor(np.eye(64, dtype="float32"))
    value = keras.ops.broadcast_to(places[None, :, None], (4, 64, 2, 64))
    weights = []
    for number in range(2):
        seed = SameAgain(keras.random.SeedGenerator(number))
        parts = [
            to_numpy(way(ones, ones, value[..., i : i + 8], dropout=0.25, seed=seed))
            for i in range(0, 64, 8)
        ]
        weights.append(np.concatenate(parts, -1) * 64)  # (B, T, N, S)
    for found in weights:
        kept = found > 0
        np.testing.assert_allclose(found[kept], 1 / 0.75, rtol=1e-5)
        assert abs(kept.mean() - 0.75) < 0.01  # 32,768 draws: four standard deviations
        assert np.abs(kept.mean(axis=(0, 1, 2)) - 0.75).max() < 0.1
        assert np.abs(kept.mean(axis=(0, 2, 3)) - 0.75).max() < 0.1
        assert len({x.tobytes() for x in kept.transpose(0, 2, 1, 3).reshape(-1, 64)}) == 512
    assert np.mean((weights[0] > 0) != (weights[1] > 0)) > 0.3


class SameAgain(keras.random.SeedGenerator):
    """Gives the first numbers of a generator at each call."""

    def __init__(self, seed: keras.random.SeedGenerator):
        super().__init__(0)
        self.numbers = seed.next()

    def next(self, ordered: bool = True):
        return self.numbers


@pytest.mark.once
def test_which_calls_go_by_blocks() -> None:
    def shapes(length: int, keys: int) -> list:
        return [keras.ops.zeros((1, x, 1, 1)) for x in (length, keys)]

    assert not module.pays_blockwise(*shapes(512, 512), None)
    assert not module.pays_blockwise(*shapes(1, 2**20), None)
    assert module.pays_blockwise(*shapes(1024, 1024), None)
    unknown = [keras.KerasTensor((None, None, 2, 4)) for _ in range(2)]
    assert not module.pays_blockwise(*unknown, None)
    symbols = [keras.KerasTensor((None, 2048, 2, 4)) for _ in range(3)]
    assert ops.attention(*symbols, causal=True).shape == (None, 2048, 2, 4)


@pytest.mark.once
def test_windows_leave_out_keys_that_nobody_sees() -> None:
    found = cuts(8192, 8192, False, True, 1024, 256)
    assert all(block.width <= 1024 + block.size for block in found)
    assert sum(block.size for block in found) == 8192
    full = cuts(8192, 8192, False, True, None, 256)
    assert sum(x.size * x.width for x in full) < 0.52 * 8192**2


def test_tensorflow_leaves_long_texts_to_the_op() -> None:
    x = keras.ops.zeros((1, 2048, 1, 2))
    reason = ops.attention.declines(x, x, x, causal=True)
    assert (reason is None) == (BACKEND != "tensorflow")
    assert reason is None or "rounds its own products" in reason


@pytest.mark.nightly("tensorflow")
@pytest.mark.parametrize("label", ["window", "segments, cap, dropout", "override"])
def test_no_array_is_as_long_as_queries_and_keys(label: str) -> None:
    length, keywords = 1536 if label == "override" else 1024, {"causal": True}
    if label == "window":
        keywords |= {"window": 900}
    else:
        keywords |= {"segment_ids": segments(length, 300), "soft_cap": 3.0}
    if "dropout" in label:
        keywords |= {"dropout": 0.1, "seed": keras.random.SeedGenerator(1)}
    tensors = [keras.ops.ones((1, length, heads, 4)) for heads in (2, 1, 1)]

    def run(*x):
        return (ops.attention if label == "override" else ops.attention.generic)(*x, **keywords)

    shapes = shapes_made(run, *tensors)
    assert not squares(shapes, length)
    if label != "override":
        assert squares(shapes, 256)  # the blocks themselves are seen
        assert squares(one_block(shapes_made, run, *tensors), length)
