"""Results and gradients against NumPy in float64, for the generic bodies and the overrides."""

import importlib
import sys
from contextlib import nullcontext

import keras
import numpy as np
import pytest

from gradients import value_and_gradients
from kmodels import decisions, generic_only, ops
from kmodels.core.dispatch import reset_decisions
from kmodels.core.errors import InputError
from kmodels.ops.linear_cross_entropy import tile_of
from tolerances import tolerance

module = importlib.import_module("kmodels.ops.linear_cross_entropy")

# More classes than a tile and a remainder.
ROWS, WIDTH, VOCABULARY = 300, 8, 5000


def reference(hidden, table, labels, weights, soft_cap):
    """Loss, hits, and the gradients of hidden and table."""
    hidden, table = hidden.astype("float64"), table.astype("float64")
    used = weights != 0
    grad = np.zeros_like(hidden)
    h, y, w = hidden[used], labels[used], weights[used].astype("float64")
    raw = h @ table.T
    z = raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)
    top = z.max(1)
    p = np.exp(z - top[:, None])
    total = p.sum(1)
    rows = np.arange(len(y))
    loss = (w * (np.log(total) + top - z[rows, y])).sum()
    dz = p / total[:, None]
    dz[rows, y] -= 1
    dz *= w[:, None]
    if soft_cap is not None:
        dz *= 1 - (z / soft_cap) ** 2
    grad[used] = dz @ table
    return loss, (w * (z.argmax(1) == y)).sum(), grad, dz.T @ h


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((ROWS, WIDTH)).astype("float32")
    table = rng.standard_normal((VOCABULARY, WIDTH)).astype("float32")
    labels = rng.integers(0, VOCABULARY, ROWS).astype("int32")
    # Half of the labels are the best class, so that hits are more than luck; some lie in the rest.
    labels[::2] = (hidden @ table.T).argmax(1)[::2]
    labels[1] = VOCABULARY - 1
    weights = rng.random(ROWS).astype("float32")
    weights[rng.permutation(ROWS)[:60]] = 0.0
    return hidden, table, labels, weights


def close(found, expected, what="linear_cross_entropy"):
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=tolerance(what) * np.abs(expected).max()
    )


# torch.compile makes an instance of every autograd.Function, which torch itself deplores.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("generic", "trainable", "soft_cap", "compiled"),
    [
        (True, False, None, False),
        (True, True, 3.0, False),
        (False, False, None, False),
        (False, False, 3.0, True),
        (False, True, None, True),
        (False, True, 3.0, False),
    ],
)
def test_matches_float64(data, generic, trainable, soft_cap, compiled):
    hidden, table, *rest = data
    labels, weights = (keras.ops.convert_to_tensor(x) for x in rest)

    def run(h, t):
        return ops.linear_cross_entropy(
            h, t, labels, weights, soft_cap=soft_cap, trainable_table=trainable
        )

    reset_decisions()
    with generic_only() if generic else nullcontext():
        loss, hits, (dh, dt) = value_and_gradients(run, (hidden, table), compiled)
    assert decisions()["linear_cross_entropy"]["override"] == (not generic)
    expected = reference(*data, soft_cap)
    close(loss, expected[0])
    close(float(hits), expected[1])
    close(dh, expected[2])
    if trainable:
        close(dt, expected[3])
    else:
        assert not dt.any()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("generic", "soft_cap", "compiled"),
    [(True, 3.0, False), (False, None, True), (False, 3.0, False)],
)
def test_rows_that_stand_in_a_frozen_table(data, generic, soft_cap, compiled):
    hidden, table, labels, weights = (x.copy() for x in data)
    chosen = np.array([5, 0, VOCABULARY - 1, labels[weights > 0][0]], "int32")
    rows, table[chosen] = table[chosen], 9.0
    labels, weights, ids = (keras.ops.convert_to_tensor(x) for x in (labels, weights, chosen))

    def run(h, t, r):
        given = {"rows": r, "row_ids": ids, "soft_cap": soft_cap}
        return ops.linear_cross_entropy(h, t, labels, weights, **given)

    reset_decisions()
    with generic_only() if generic else nullcontext():
        loss, hits, (dh, dt, dr) = value_and_gradients(run, (hidden, table, rows), compiled)
    assert decisions()["linear_cross_entropy"]["override"] == (not generic)
    expected = reference(*data, soft_cap)
    close(loss, expected[0])
    close(float(hits), expected[1])
    close(dh, expected[2])
    close(dr, expected[3][chosen])
    assert not dt.any()


def test_what_has_no_weight_plays_no_part(data):
    hidden, table, labels, weights = (x.copy() for x in data)
    expected = reference(hidden, table, labels, weights, None)
    hidden[weights == 0] = np.nan
    labels[weights == 0] = -100
    for block in (generic_only, nullcontext):
        with block():
            loss, hits, (dh,) = value_and_gradients(
                lambda h: ops.linear_cross_entropy(
                    h, *(keras.ops.convert_to_tensor(x) for x in (table, labels, weights))
                ),
                (hidden,),
            )
        close(loss, expected[0])
        close(float(hits), expected[1])
        close(dh, expected[2])


def test_no_weight_at_all(data):
    hidden, table, labels, weights = data
    loss, hits, (dh,) = value_and_gradients(
        lambda h: ops.linear_cross_entropy(
            h, *(keras.ops.convert_to_tensor(x) for x in (table, labels, weights * 0))
        ),
        (hidden,),
    )
    assert loss == 0.0 and float(hits) == 0.0 and not dh.any()


def test_evaluation_and_bfloat16(data):
    expected = reference(*data, None)
    for dtype in ("float32", "bfloat16"):
        arguments = [keras.ops.convert_to_tensor(x) for x in data]
        arguments[0] = keras.ops.cast(arguments[0], dtype)
        loss, hits = ops.linear_cross_entropy(*arguments)
        assert keras.backend.standardize_dtype(loss.dtype) == "float32"
        bound = tolerance("linear_cross_entropy", dtype)
        assert abs(float(loss) - expected[0]) <= bound * expected[0]
        if dtype == "float32":
            assert float(hits) == pytest.approx(expected[1], rel=bound)


def test_in_bfloat16_gradients_stay_near(data):
    hidden, table, *rest = data
    labels, weights = (keras.ops.convert_to_tensor(x) for x in rest)

    def run(h, t):
        h, t = keras.ops.cast(h, "bfloat16"), keras.ops.cast(t, "bfloat16")
        return ops.linear_cross_entropy(h, t, labels, weights, trainable_table=True)

    _, _, (dh, dt) = value_and_gradients(run, (hidden, table))
    expected = reference(*data, None)
    for found, wanted in ((dh, expected[2]), (dt, expected[3])):
        bound = tolerance("linear_cross_entropy", "bfloat16") * np.abs(wanted).max()
        np.testing.assert_allclose(found, wanted, rtol=0, atol=bound)


def log_probs(data, upstream, soft_cap=None, temperature=1.0):
    """Log-probabilities, entropies, and the gradients by hidden and table of upstream x both."""
    hidden, table, labels, weights = data
    used = weights != 0
    h, t, y, w = (x.astype("float64") for x in (hidden[used], table, labels[used], weights[used]))
    raw = h @ t.T
    z = (raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)) / temperature
    log_p = z - np.log(np.exp(z - z.max(1)[:, None]).sum(1))[:, None] - z.max(1)[:, None]
    p, rows, y = np.exp(log_p), np.arange(len(y)), y.astype(int)
    entropy = -(p * log_p).sum(1)
    results, grad = np.zeros((2, len(labels))), np.zeros(hidden.shape)
    results[0, used], results[1, used] = w * log_p[rows, y], w * entropy
    of_log_prob, of_entropy = (w * each[used] for each in upstream)
    dz = -p * of_log_prob[:, None] - p * (log_p + entropy[:, None]) * of_entropy[:, None]
    dz[rows, y] += of_log_prob
    dz *= (1 if soft_cap is None else 1 - (z * temperature / soft_cap) ** 2) / temperature
    grad[used] = dz @ t
    return results, grad, dz.T @ h


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("generic", "table_is", "settings", "compiled"),
    [
        (True, "frozen", {}, False),
        (True, "trained", {"soft_cap": 3.0, "temperature": 0.7}, False),
        (False, "frozen", {}, False),
        (False, "frozen", {"soft_cap": 3.0, "temperature": 0.7}, True),
        (False, "trained", {"temperature": 1.4}, True),
        (False, "trained", {"soft_cap": 3.0, "temperature": 0.7}, False),
        (False, "rows", {"soft_cap": 3.0, "temperature": 0.7}, False),
        (True, "rows", {"temperature": 1.4}, False),
    ],
)
@pytest.mark.parametrize("with_entropy", [False, True])
def test_log_probs_match_float64(data, generic, table_is, settings, compiled, with_entropy):
    hidden, table, labels, weights = (x.copy() for x in data)
    upstream = np.random.default_rng(3).normal(size=(2, ROWS)).astype("float32")
    upstream[1] *= with_entropy
    expected = log_probs(data, upstream, **settings)
    chosen = np.array([5, 0, VOCABULARY - 1, labels[weights > 0][0]], "int32")
    rows = table[chosen]
    if table_is == "rows":
        table[chosen] = 9.0
    hidden[weights == 0], labels[weights == 0] = np.nan, -100
    tensors = [keras.ops.convert_to_tensor(x) for x in (labels, weights, chosen, upstream)]
    labels, weights, ids, upstream = tensors

    def run(h, t, r):
        given = {"rows": r, "row_ids": ids} if table_is == "rows" else {}
        found = ops.linear_log_probs(
            *(h, t, labels, weights),
            trainable_table=table_is == "trained",
            with_entropy=with_entropy,
            **settings,
            **given,
        )
        found = keras.ops.stack(found if with_entropy else [found])
        return keras.ops.sum(found * upstream[: len(found)]), found

    reset_decisions()
    with generic_only() if generic else nullcontext():
        _, found, (dh, dt, dr) = value_and_gradients(run, (hidden, table, rows), compiled)
    assert decisions()["linear_log_probs"]["override"] == (not generic)
    found = keras.ops.convert_to_numpy(found)
    assert found.dtype == "float32"
    for ours, right in zip(found, expected[0], strict=False):
        close(ours, right, "linear_log_probs")
    close(dh, expected[1], "linear_log_probs")
    if table_is == "rows":
        close(dr, expected[2][chosen], "linear_log_probs")
    if table_is == "trained":
        close(dt, expected[2], "linear_log_probs")
    else:
        assert not dt.any()


def test_log_probs_without_weights_and_outside_of_a_gradient(data):
    hidden, table, labels, weights = data
    expected = log_probs((hidden, table, labels, np.ones_like(weights)), np.zeros((2, ROWS)))[0]
    for dtype in ("float32", "bfloat16"):
        tensors = [keras.ops.convert_to_tensor(x) for x in (hidden, table, labels)]
        tensors[0] = keras.ops.cast(tensors[0], dtype)
        found = ops.linear_log_probs(*tensors, with_entropy=True)
        for ours, right in zip(found, expected, strict=True):
            assert keras.backend.standardize_dtype(ours.dtype) == "float32"
            bound = tolerance("linear_log_probs", dtype) * np.abs(right).max()
            ours = keras.ops.convert_to_numpy(ours)
            np.testing.assert_allclose(ours, right, rtol=0, atol=bound)


@pytest.mark.parametrize("generic", [True, False])
def test_hits_are_the_labels_with_the_highest_logit(data, generic):
    hidden, table, labels, weights = data
    best = (hidden.astype("float64") @ table.T.astype("float64")).argmax(1)
    labels = np.where(np.arange(ROWS) % 3 == 0, best, labels).astype("int32")
    expected = (labels == best) & (weights != 0)
    assert 0 < expected.sum() < (weights != 0).sum() and (labels == best)[weights == 0].any()
    tensors = [keras.ops.convert_to_tensor(x) for x in (hidden, table, labels, weights)]
    for settings in ({}, {"with_entropy": True, "soft_cap": 3.0, "temperature": 0.7}):
        with generic_only() if generic else nullcontext():
            *others, hits = ops.linear_log_probs(*tensors, with_hits=True, **settings)
        assert len(others) == 1 + ("with_entropy" in settings)
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(hits), expected)


@pytest.mark.once
def test_what_does_not_fit_is_refused(data):
    hidden, table, labels, weights = (keras.ops.convert_to_tensor(x) for x in data)
    with pytest.raises(InputError, match=r"takes hidden \(M, D\).*got \(300, 8\), \(5000, 7\)"):
        ops.linear_cross_entropy(hidden, table[:, :7], labels, weights)
    with pytest.raises(InputError, match="soft_cap 0; it must be positive"):
        ops.linear_cross_entropy(hidden, table, labels, weights, soft_cap=0)
    with pytest.raises(InputError, match="temperature 0; it must be positive"):
        ops.linear_log_probs(hidden, table, labels, temperature=0)
    for given in (
        {"rows": table[:2]},
        {"rows": table[:2, :3], "row_ids": labels[:2]},
        {"rows": table[:2], "row_ids": labels[:3]},
    ):
        with pytest.raises(InputError, match=r"takes rows \(N, D\) with row_ids \(N,\), got"):
            ops.linear_cross_entropy(hidden, table, labels, weights, **given)
    given = {"rows": table[:2], "row_ids": labels[:2], "trainable_table": True}
    with pytest.raises(InputError, match="rows beside a frozen table; leave out trainable_table"):
        ops.linear_cross_entropy(hidden, table, labels, weights, **given)


# On an accelerator: 2**28 bytes of float32 scores, in words of a tile.
TILES = [
    # vocabulary, positions, accelerator, words
    (262144, 8192, False, 4096),
    (5000, 10, False, 4096),
    (4000, 10, False, 4000),
    (50257, 10, False, 4096),
    (68096, 10, False, 3584),
    (262144, 8192, True, 8192),
    (262144, None, True, 8192),
    (262144, 256, True, 262144),
    (256000, 8192, True, 6400),
    (262144, 2048, True, 32768),
    (262144, 10**6, True, 2048),
    (1000, 10**6, True, 1000),
    (50257, 8192, True, 8192),
    (262144, 0, True, 262144),
]


@pytest.mark.once
@pytest.mark.parametrize(("vocabulary", "positions", "accelerator", "words"), TILES)
def test_tiles(vocabulary, positions, accelerator, words):
    assert tile_of(vocabulary, positions, accelerator) == words


@pytest.mark.once
def test_tiles_of_an_accelerator_stay_within_the_budget():
    for vocabulary in (32000, 50257, 152064, 256000, 262144):
        for positions in (1, 64, 1000, 8192, 10**5):
            tile = tile_of(vocabulary, positions, True)
            assert 1 <= tile <= vocabulary
            assert 4 * positions * tile <= module.BUDGET or tile == module.NARROWEST
            # No tile is half of what would fit.
            assert tile == vocabulary or 2 * tile > module.BUDGET // (4 * positions) - 256


@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_an_accelerators_way_is_right(data, monkeypatch, soft_cap):
    """On a CPU that the override takes for one: no position is left out, and tiles are others."""
    override = sys.modules[ops.linear_cross_entropy.override.__module__]
    name = "on_cuda" if keras.backend.backend() == "torch" else "on_accelerator"
    monkeypatch.setattr(override, name, lambda *_: True)
    monkeypatch.setattr(module, "NARROWEST", 512)
    monkeypatch.setattr(module, "BUDGET", 4 * ROWS * 768)
    hidden, table, labels, weights = (x.copy() for x in data)
    hidden[weights == 0], labels[weights == 0] = np.nan, 10**6
    labels, weights = (keras.ops.convert_to_tensor(x) for x in (labels, weights))

    def run(h, t):
        return ops.linear_cross_entropy(
            h, t, labels, weights, soft_cap=soft_cap, trainable_table=True
        )

    loss, hits, (dh, dt) = value_and_gradients(run, (hidden, table), False)
    expected = reference(*data, soft_cap)
    for found, wanted in zip((loss, hits, dh, dt), expected, strict=True):
        close(np.asarray(found), wanted)

    def frozen(h, t):
        return ops.linear_cross_entropy(h, t, labels, weights, soft_cap=soft_cap)

    close(value_and_gradients(frozen, (hidden, table), False)[2][0], expected[2])
