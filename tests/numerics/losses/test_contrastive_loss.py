"""The loss of pairs against NumPy in float64: values, gradients, weights and widths."""

import keras
import numpy as np
import pytest

from gradients import to_numpy, value_and_grad
from kmodels import InputError
from kmodels.training import ContrastiveLoss
from tolerances import tolerance

ROWS, WIDTH = 5, 12
WEIGHTS = np.array([1.0, 0.5, 0.0, 2.0, 1.0], "float32")


def rows_of(vectors, weights, scale=20.0):
    """The loss of each row, (B,), written as it stands in the paper."""
    vectors = vectors.astype("float64")
    unit = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    there = weights > 0
    found = []
    for i, row in enumerate(unit):
        scores = [
            scale * row[0] @ unit[j, c]
            for j in range(len(unit))
            for c in range(1, unit.shape[1])
            if there[j]
        ]
        found.append(np.log(np.exp(scores).sum()) - scale * row[0] @ unit[i, 1])
    return np.array(found)


def expected_of(vectors, weights=None, dims=(WIDTH,), shares=(1.0,), **settings):
    weights = np.ones(len(vectors)) if weights is None else weights
    rows = sum(
        share * rows_of(vectors[..., :dim], weights, **settings)
        for dim, share in zip(dims, shares, strict=True)
    )
    return (rows * weights).mean()


def vectors(columns):
    return np.random.default_rng(3).normal(size=(ROWS, columns, WIDTH)).astype("float32")


CASES = {
    "pairs": (2, {}, None),
    "hard negatives": (4, {"scale": 7.0}, None),
    "weights": (3, {}, WEIGHTS),
    "widths": (3, {"matryoshka_dims": (12, 4), "matryoshka_weights": (1.0, 0.5)}, WEIGHTS),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    columns, settings, weights = CASES[name]
    loss, x = ContrastiveLoss(**settings), vectors(columns)
    dims = settings.get("matryoshka_dims", (WIDTH,))
    shares = settings.get("matryoshka_weights", (1.0,))
    scale = settings.get("scale", 20.0)

    def reference(x):
        return expected_of(x, weights, dims, shares, scale=scale)

    found, (gradient,) = value_and_grad(lambda y: loss(None, y, weights), x)
    np.testing.assert_allclose(to_numpy(found), reference(x), atol=tolerance("losses"))
    # The sum of the helper is weighted by a number of its own.
    gradient = gradient / np.random.default_rng(7).normal(size=()).astype("float32")
    numeric = np.zeros_like(x, dtype="float64")
    for place in np.ndindex(*x.shape):
        step = np.zeros_like(numeric)
        step[place] = 1e-5
        numeric[place] = (reference(x + step) - reference(x - step)) / 2e-5
    bound = 1e-5 * np.abs(numeric).max() + tolerance("first_loss") * 0.1
    np.testing.assert_allclose(gradient, numeric, rtol=0, atol=bound)


def test_rows_of_no_weight_are_as_if_they_were_not_there():
    x = vectors(3)
    there = WEIGHTS > 0
    loss = ContrastiveLoss(reduction="sum")
    whole = to_numpy(loss(None, x, WEIGHTS))
    np.testing.assert_allclose(whole, to_numpy(loss(None, x[there], WEIGHTS[there])), rtol=1e-6)
    _, (gradient,) = value_and_grad(lambda y: loss(None, y, WEIGHTS), x)
    assert np.isfinite(gradient).all() and not gradient[~there].any()
    assert to_numpy(loss(None, x, np.zeros(ROWS))) == 0


def test_each_row():
    x = vectors(2)
    found = ContrastiveLoss(reduction=None)(None, x)
    np.testing.assert_allclose(to_numpy(found), rows_of(x, np.ones(ROWS)), atol=tolerance("losses"))


def test_a_config_makes_it_again():
    loss = ContrastiveLoss(scale=5, matryoshka_dims=[8, 4], reduction="sum")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(loss))
    assert again.get_config() == loss.get_config()
    assert again.matryoshka_weights == (1.0, 1.0)


def test_what_it_does_not_take():
    for settings, message in (
        ({"scale": 0}, "scale is 0; give a number above 0"),
        ({"matryoshka_dims": (4, 0)}, "matryoshka_dims"),
        ({"matryoshka_dims": (4, 2), "matryoshka_weights": (1,)}, r"are \(1,\) for 2 widths"),
        ({"matryoshka_dims": (4,), "matryoshka_weights": (-1,)}, "give one above 0 for each"),
    ):
        with pytest.raises(InputError, match=message):
            ContrastiveLoss(**settings)
    with pytest.raises(InputError, match="matryoshka_dims has 13 and the vectors have 12 numbers"):
        ContrastiveLoss(matryoshka_dims=(13,))(None, vectors(2))
    with pytest.raises(InputError, match=r"got vectors of shape \(5, 12\); train on pairs"):
        ContrastiveLoss()(None, vectors(2)[:, 0])
