"""The op's own body in blocks: against its definition, against one block, and what it holds."""

import keras
import numpy as np
import pytest

import op_cases
from arrays_made import shapes_made, squares
from gradients import second_derivative, to_numpy, value_and_grad
from kmodels import ops, transforms
from kmodels.ops import _attention_blockwise as blockwise
from kmodels.ops._attention_cuts import cuts
from tolerances import tolerance

BACKEND = keras.backend.backend()
LENGTH, KEYS = 37, 43
RNG = np.random.default_rng(2)
SEGMENTS = np.sort(RNG.integers(0, 4, (2, KEYS)), axis=1).astype("int32")
BLOCKS = np.where(RNG.random((2, KEYS)) > 0.7, -1, np.arange(KEYS) // 9).astype("int32")
MASK = RNG.random((2, 4, LENGTH, KEYS)) > 0.4
MASK[0, :, 20] = False

# Blocks of eight queries; lengths that they do not divide, and fewer queries than keys.
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "causal window, mask": {"causal": True, "window": 11, "mask": MASK},
    "window, segments": {"window": 11, "segment_ids": SEGMENTS},
    "soft cap, mask of keys": {"soft_cap": 0.5, "mask": MASK[:, :1, :1]},
    "blocks, window, segments": {
        **{"causal": True, "window": 13, "block_ids": BLOCKS, "segment_ids": SEGMENTS[:1]}
    },
}


@pytest.fixture
def small(monkeypatch) -> None:
    monkeypatch.setattr(blockwise, "PAIRS", 0)
    monkeypatch.setattr(blockwise, "MOST", 8)
    monkeypatch.setattr(blockwise, "LEAST", 8)


def arrays(label: str, head_dim: int = 8) -> list[np.ndarray]:
    rng = np.random.default_rng(len(label))
    sizes = ((LENGTH, 4), (KEYS, 2), (KEYS, 2))
    return [rng.normal(size=(2, *size, head_dim)).astype("float32") for size in sizes]


def call(label: str, **more):
    return lambda q, k, v: ops.attention.generic(q, k, v, **CASES[label], **more)


def one_block(function, *given):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "PAIRS", 2**40)
        return function(*given)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("label", CASES)
def test_values_and_gradients(label: str) -> None:
    """Values against the definition in float64, gradients against one block's."""
    given = arrays(label)
    value, gradients = value_and_grad(call(label), *given, compiled=True)
    expected = op_cases.reference_attention(*given, **CASES[label])
    assert np.abs(to_numpy(value) - expected).max() <= tolerance("attention")
    if label != "plain":
        assert np.abs(expected - op_cases.reference_attention(*given)).max() > 1e-3
    _, wanted = one_block(value_and_grad, call(label), *given)
    for found, right in zip(gradients, wanted, strict=True):
        assert np.abs(right).max() > 0.1
        assert np.abs(found - right).max() <= tolerance("attention") * max(1, np.abs(right).max())
    if "mask" in CASES[label] and label.startswith("causal"):
        assert not gradients[0][0, 20].any()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(dtype: str) -> None:
    label = "causal window, mask"
    low = [keras.ops.cast(x, dtype) for x in arrays(label)]
    value = call(label)(*low)
    assert keras.backend.standardize_dtype(value.dtype) == dtype
    expected = op_cases.reference_attention(*map(to_numpy, low), **CASES[label])
    assert np.abs(to_numpy(value) - expected).max() <= tolerance("attention", dtype)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("mode", ["reverse"] if BACKEND == "torch" else ["reverse", "forward"])
def test_second_derivatives(mode: str) -> None:
    """torch has forward mode inside of torch.func alone, as the next test does."""
    label = "blocks, window, segments"
    found = second_derivative(call(label), arrays(label, 4), mode)
    wanted = one_block(second_derivative, call(label), arrays(label, 4), mode)
    for ours, right in zip(found, wanted, strict=True):
        assert np.abs(right).max() > 0.1
        assert np.abs(ours - right).max() <= 10 * tolerance("attention") * np.abs(right).max()


@pytest.mark.usefixtures("small")
def test_transforms() -> None:
    """A map over calls, and the second derivative by one input."""
    # Ungrouped: TensorFlow's softmax has one axis less than grouped heads of a map would take.
    q, k, v = (keras.ops.convert_to_tensor(x[:, :, :2]) for x in arrays("segments", 4))
    keywords = {"causal": True, "segment_ids": SEGMENTS[:1]}

    def rows(q, k, v):
        return ops.attention.generic(q[None], k[None], v[None], **keywords)[0]

    whole = ops.attention.generic(q, k, v, **keywords)
    mapped = transforms.vmap(rows)(q, k, v)
    assert np.abs(to_numpy(mapped) - to_numpy(whole)).max() <= tolerance("attention")

    few = q[
        :, -32:
    ]  # blocks of one size that see all, which is one loop: TensorFlow maps it slowly

    def of_scale(x):
        found = ops.attention.generic(few * x, k, v, segment_ids=SEGMENTS[:1])
        return keras.ops.sum(found[:, -1])

    x = keras.ops.convert_to_tensor(np.float32(1.3))
    found = to_numpy(transforms.hessian(of_scale)(x))
    wanted = to_numpy(one_block(transforms.hessian(of_scale), x))
    assert abs(wanted) > 1e-2
    assert abs(found - wanted) <= 1e-3 * abs(wanted)


@pytest.mark.usefixtures("small")
def test_dropout_is_drawn_again_as_it_was() -> None:
    """Gradients by differences of values: they hold only if both passes drop the same."""
    given = arrays("dropout")

    def run(*values):
        return call("causal", dropout=0.4, seed=keras.random.SeedGenerator(5))(*values)

    def total(*values) -> float:
        value = to_numpy(run(*map(keras.ops.convert_to_tensor, values))).astype("float64")
        return float((value * np.random.default_rng(7).normal(size=value.shape)).sum())

    _, gradients = value_and_grad(run, *given)
    for i, gradient in enumerate(gradients):
        step = np.random.default_rng(i).normal(size=gradient.shape).astype("float32") * 1e-2
        up, down = (
            total(*(x + sign * step if i == j else x for j, x in enumerate(given)))
            for sign in (1, -1)
        )
        slope = float((gradient.astype("float64") * step).sum())
        assert abs(slope) > 1e-2
        assert abs((up - down) / 2 - slope) < 2e-3 * max(1.0, abs(slope))


@pytest.mark.usefixtures("small")
def test_dropout_drops_its_share_of_each_row_and_column() -> None:
    ones = keras.ops.ones((4, 64, 2, 8))
    places = keras.ops.convert_to_tensor(np.eye(64, dtype="float32"))
    value = keras.ops.broadcast_to(places[None, :, None], (4, 64, 2, 64))
    weights = []
    for number in range(2):
        seed = keras.random.SeedGenerator(number)
        parts = [
            to_numpy(
                ops.attention.generic(
                    ones, ones, value[..., i : i + 8], dropout=0.25, seed=SameAgain(seed)
                )
            )
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

    assert not blockwise.pays(*shapes(512, 512), None)
    assert not blockwise.pays(*shapes(1, 2**20), None)
    assert blockwise.pays(*shapes(1024, 1024), None)
    unknown = [keras.KerasTensor((None, None, 2, 4)) for _ in range(2)]
    assert not blockwise.pays(*unknown, None)
    symbols = [keras.KerasTensor((None, 2048, 2, 4)) for _ in range(3)]
    assert ops.attention(*symbols, causal=True).shape == (None, 2048, 2, 4)


@pytest.mark.once
def test_windows_leave_out_keys_that_nobody_sees() -> None:
    found = cuts(8192, 8192, False, True, 1024, 256)
    assert all(block.width <= 1024 + block.size for block in found)
    assert sum(block.size for block in found) == 8192
    full = cuts(8192, 8192, False, True, None, 256)
    assert sum(x.size * x.width for x in full) < 0.52 * 8192**2


@pytest.mark.parametrize("label", ["causal", "segments, cap", "window, dropout"])
def test_no_array_is_as_long_as_queries_and_keys(label: str) -> None:
    length, keywords = 1024, {"causal": True}
    if label == "segments, cap":
        keywords |= {"segment_ids": np.arange(length)[None] // 300, "soft_cap": 3.0}
    if label == "window, dropout":
        keywords |= {"window": 100, "dropout": 0.1, "seed": keras.random.SeedGenerator(1)}
    tensors = [keras.ops.ones((1, length, heads, 4)) for heads in (2, 1, 1)]

    def run(*x):
        return ops.attention.generic(*x, **keywords)

    assert squares(shapes_made(run, *tensors), 256)  # the blocks themselves are seen
    assert not squares(shapes_made(run, *tensors), length)
    assert squares(one_block(shapes_made, run, *tensors), length)
