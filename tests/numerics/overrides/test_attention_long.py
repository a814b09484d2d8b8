"""Overrides that compute the weights of long texts again, at lengths that they would keep."""

import importlib

import keras
import numpy as np
import pytest

import op_cases
from arrays_made import shapes_made, squares
from gradients import to_numpy, value_and_grad
from kmodels import ops
from tolerances import tolerance

BACKEND = keras.backend.backend()
# Length above which weights are computed again. TensorFlow leaves such texts to the op's own body.
LIMIT = {"jax": ("_attention_choice_jax", "LONG"), "torch": ("attention_torch", "KEPT")}.get(
    BACKEND
)
QUERIES, KEYS = 150, 170
RNG = np.random.default_rng(6)
SEGMENTS = np.sort(RNG.integers(0, 4, (2, KEYS)), axis=1).astype("int32")
BLOCKS = np.where(RNG.random((2, KEYS)) > 0.7, -1, np.arange(KEYS) // 30).astype("int32")
MASK = RNG.random((2, 4, QUERIES, KEYS)) > 0.3
MASK[0, :, 40] = False
CASES = {
    "causal window, mask": {"causal": True, "window": 70, "mask": MASK},
    "window, segments": {"window": 40, "segment_ids": SEGMENTS, "soft_cap": 0.8},
    "causal, segments": {"causal": True, "segment_ids": SEGMENTS[:1]},
    "blocks, window, mask of keys": {
        **{"causal": True, "window": 40, "block_ids": BLOCKS, "mask": MASK[:, :1, :1]}
    },
}


def test_tensorflow_leaves_long_texts_to_the_op() -> None:
    x = keras.ops.zeros((1, 2048, 1, 2))
    reason = ops.attention.declines(x, x, x, causal=True)
    assert (reason is None) == (BACKEND != "tensorflow")
    assert reason is None or "in blocks" in reason


@pytest.fixture
def long(monkeypatch) -> None:
    if LIMIT is not None:
        module = importlib.import_module(f"kmodels.overrides.{LIMIT[0]}")
        monkeypatch.setattr(module, LIMIT[1], 0)
        if BACKEND == "torch":
            monkeypatch.setattr(module, "by_products", lambda *_: True)


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    sizes = ((QUERIES, 4), (KEYS, 2), (KEYS, 2))
    return [rng.normal(size=(2, *size, 4)).astype("float32") for size in sizes]


@pytest.mark.usefixtures("long")
@pytest.mark.parametrize("label", CASES)
def test_values_and_gradients(label: str) -> None:
    given, keywords = arrays(), CASES[label]
    value, gradients = value_and_grad(lambda *x: ops.attention(*x, **keywords), *given)
    expected = op_cases.reference_attention(*given, **keywords)
    assert np.abs(to_numpy(value) - expected).max() <= tolerance("attention")
    _, wanted = value_and_grad(lambda *x: ops.attention.generic(*x, **keywords), *given)
    for found, right in zip(gradients, wanted, strict=True):
        assert np.abs(right).max() > 0.1
        assert np.abs(found - right).max() <= tolerance("attention") * max(1, np.abs(right).max())
    if "mask" in keywords and keywords["mask"].shape[2] > 1:
        assert not gradients[0][0, 40].any()


@pytest.mark.usefixtures("long")
def test_dropout_is_drawn_again_as_it_was() -> None:
    """The function is linear in the values, whose gradient holds what the forward pass kept."""
    query, key, _ = arrays()
    value = np.ones(key.shape, "float32")
    keywords = {"causal": True, "dropout": 0.3}

    def run(number: int) -> tuple:
        seed = keras.random.SeedGenerator(number)
        return value_and_grad(
            lambda v: keras.ops.sum(
                ops.attention(query, key, v, seed=seed, **keywords), axis=(0, 1, 2), keepdims=True
            ),
            value,
        )

    query, key = (keras.ops.convert_to_tensor(x) for x in (query, key))
    total, (gradient,) = run(4)
    again, _ = run(4)
    np.testing.assert_array_equal(to_numpy(total), to_numpy(again))
    assert np.abs(to_numpy(total) - to_numpy(run(5)[0])).max() > 1e-2
    weight = np.random.default_rng(7).normal(size=tuple(total.shape)).astype("float32")
    found = (gradient * value).sum(axis=(0, 1, 2))
    wanted = (to_numpy(total) * weight)[0, 0, 0]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    assert abs(float(to_numpy(total)[0, 0, 0, 0]) / (2 * QUERIES * 4) - 1) < 0.05


def test_no_array_is_as_long_as_queries_and_keys() -> None:
    length = 1536
    tensors = [keras.ops.ones((1, length, heads, 4)) for heads in (2, 1, 1)]
    ids = keras.ops.convert_to_tensor(np.arange(length)[None] // 300)

    def run(*x):
        return ops.attention(*x, causal=True, segment_ids=ids, soft_cap=3.0)

    assert not squares(shapes_made(run, *tensors), length)
