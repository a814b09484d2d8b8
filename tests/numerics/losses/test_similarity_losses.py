"""The losses of CLIP and SigLIP against NumPy in float64: values, gradients and weights."""

import keras
import numpy as np
import pytest

from gradients import to_numpy, value_and_grad
from kmodels import InputError
from kmodels.training import CLIPLoss, SigLIPLoss
from tolerances import tolerance

ROWS = 5
WEIGHTS = np.array([1.0, 0.5, 0.0, 2.0, 1.0], "float32")
LOGITS = np.random.default_rng(3).normal(0, 4, (ROWS, ROWS)).astype("float32")


def clip_rows(logits, there):
    """The loss of each pair as it stands in the paper: both ways, among what is there."""
    logits = logits.astype("float64")
    found = []
    for i in range(len(logits)):
        row = [logits[i, j] for j in range(len(logits)) if there[j]]
        column = [logits[j, i] for j in range(len(logits)) if there[j]]
        both = np.log(np.exp(row).sum()) + np.log(np.exp(column).sum())
        found.append(both / 2 - logits[i, i])
    return np.array(found)


def siglip_rows(logits, there):
    logits = logits.astype("float64")
    found = []
    for i in range(len(logits)):
        signs = [1 if i == j else -1 for j in range(len(logits))]
        terms = [np.log(1 + np.exp(-z * x)) for z, x in zip(signs, logits[i], strict=True)]
        found.append(sum(term for term, seen in zip(terms, there, strict=True) if seen))
    return np.array(found)


CASES = {
    "clip": (CLIPLoss, clip_rows, None),
    "clip with weights": (CLIPLoss, clip_rows, WEIGHTS),
    "siglip": (SigLIPLoss, siglip_rows, None),
    "siglip with weights": (SigLIPLoss, siglip_rows, WEIGHTS),
}
losses = pytest.mark.parametrize("name", CASES)


@losses
def test_values_and_gradients(name):
    kind, rows, weights = CASES[name]
    loss, given = kind(), np.ones(ROWS) if weights is None else weights

    def reference(x):
        return (rows(x, given > 0) * given).mean()

    found, (gradient,) = value_and_grad(lambda x: loss(None, x, weights), LOGITS)
    np.testing.assert_allclose(to_numpy(found), reference(LOGITS), atol=tolerance("losses"))
    # The sum of the helper is weighted by a number of its own.
    gradient = gradient / np.random.default_rng(7).normal(size=()).astype("float32")
    numeric = np.zeros((ROWS, ROWS))
    for place in np.ndindex(ROWS, ROWS):
        step = np.zeros_like(numeric)
        step[place] = 1e-5
        numeric[place] = (reference(LOGITS + step) - reference(LOGITS - step)) / 2e-5
    bound = 1e-5 * np.abs(numeric).max() + tolerance("first_loss") * 0.1
    np.testing.assert_allclose(gradient, numeric, rtol=0, atol=bound)


@pytest.mark.parametrize("kind", [CLIPLoss, SigLIPLoss])
def test_pairs_of_no_weight_are_as_if_they_were_not_there(kind):
    there = WEIGHTS > 0
    loss, some = kind(reduction="sum"), LOGITS[there][:, there]
    whole = to_numpy(loss(None, LOGITS, WEIGHTS))
    np.testing.assert_allclose(whole, to_numpy(loss(None, some, WEIGHTS[there])), rtol=1e-6)
    _, (gradient,) = value_and_grad(lambda x: loss(None, x, WEIGHTS), LOGITS)
    assert np.isfinite(gradient).all()
    assert not gradient[~there].any() and not gradient[:, ~there].any()
    assert to_numpy(loss(None, LOGITS, np.zeros(ROWS))) == 0


@pytest.mark.parametrize("kind", [CLIPLoss, SigLIPLoss])
def test_logits_of_any_size_stay_finite(kind):
    for size in (1e4, -1e4):
        found, (gradient,) = value_and_grad(lambda x: kind()(None, x), size * LOGITS)
        assert np.isfinite(to_numpy(found)).all() and np.isfinite(gradient).all()


@pytest.mark.parametrize("kind", [CLIPLoss, SigLIPLoss])
def test_a_config_makes_it_again(kind):
    loss = kind(reduction="sum")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(loss))
    assert type(again) is kind and again.get_config() == loss.get_config()


@pytest.mark.parametrize("kind", [CLIPLoss, SigLIPLoss])
def test_what_it_does_not_take(kind):
    with pytest.raises(
        InputError, match=rf"{kind.__name__} got logits of shape \(5, 4\); train on"
    ):
        kind()(None, LOGITS[:, :4])
