"""The losses of pairs against NumPy in float64: values, gradients, weights and widths."""

from functools import partial

import keras
import numpy as np
import pytest

from gradients import to_numpy, value_and_grad
from kmodels import InputError
from kmodels.training import CLIPLoss, ContrastiveLoss, SigLIPLoss
from refusals import refused
from tolerances import tolerance

ROWS, WIDTH = 5, 12
ONES = np.ones(ROWS, "float32")
WEIGHTS = np.array([1.0, 0.5, 0.0, 2.0, 1.0], "float32")
THERE = WEIGHTS > 0
LOGITS = np.random.default_rng(3).normal(0, 4, (ROWS, ROWS)).astype("float32")
BOTH = pytest.mark.parametrize("kind", [CLIPLoss, SigLIPLoss])


def vectors(columns):
    return np.random.default_rng(3).normal(size=(ROWS, columns, WIDTH)).astype("float32")


def clip_rows(logits, there):
    """The loss of each pair as it stands in the paper: both ways, among what is there."""
    logits = logits.astype("float64")
    losses = []
    for i in range(len(logits)):
        row = [logits[i, j] for j in range(len(logits)) if there[j]]
        column = [logits[j, i] for j in range(len(logits)) if there[j]]
        both = np.log(np.exp(row).sum()) + np.log(np.exp(column).sum())
        losses.append(both / 2 - logits[i, i])
    return np.array(losses)


def siglip_rows(logits, there):
    logits = logits.astype("float64")
    losses = []
    for i in range(len(logits)):
        signs = [1 if i == j else -1 for j in range(len(logits))]
        terms = [np.log(1 + np.exp(-z * x)) for z, x in zip(signs, logits[i], strict=True)]
        losses.append(sum(term for term, seen in zip(terms, there, strict=True) if seen))
    return np.array(losses)


def contrastive_rows(vectors, there, scale=20.0, dims=(WIDTH,), shares=(1.0,)):
    """The loss of each row, (B,), written as it stands in the paper, at each width."""
    losses = np.zeros(len(vectors))
    for dim, share in zip(dims, shares, strict=True):
        some = vectors[..., :dim].astype("float64")
        unit = some / np.linalg.norm(some, axis=-1, keepdims=True)
        for i, row in enumerate(unit):
            scores = [
                scale * row[0] @ unit[j, c]
                for j in range(len(unit))
                for c in range(1, unit.shape[1])
                if there[j]
            ]
            losses[i] += share * (np.log(np.exp(scores).sum()) - scale * row[0] @ unit[i, 1])
    return losses


# Loss, the losses of the rows, input, weights.
MATRYOSHKA = {"matryoshka_dims": (12, 4), "matryoshka_weights": (1.0, 0.5)}
CASES = {
    "clip": (CLIPLoss, clip_rows, LOGITS, None),
    "clip with weights": (CLIPLoss, clip_rows, LOGITS, WEIGHTS),
    "siglip": (SigLIPLoss, siglip_rows, LOGITS, None),
    "siglip with weights": (SigLIPLoss, siglip_rows, LOGITS, WEIGHTS),
    "pairs": (ContrastiveLoss, contrastive_rows, vectors(2), None),
    "hard negatives": (
        *(partial(ContrastiveLoss, scale=7.0), partial(contrastive_rows, scale=7.0)),
        *(vectors(4), None),
    ),
    "weights": (ContrastiveLoss, contrastive_rows, vectors(3), WEIGHTS),
    "widths": (
        partial(ContrastiveLoss, **MATRYOSHKA),
        partial(contrastive_rows, dims=(12, 4), shares=(1.0, 0.5)),
        *(vectors(3), WEIGHTS),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    make, rows, x, weights = CASES[name]
    loss, given = make(), ONES if weights is None else weights

    def reference(x):
        return (rows(x, given > 0) * given).mean()

    value, (gradient,) = value_and_grad(lambda x: loss(None, x, weights), x)
    np.testing.assert_allclose(to_numpy(value), reference(x), atol=tolerance("losses"))
    # The sum of the helper is weighted by a number of its own.
    gradient = gradient / np.random.default_rng(7).normal(size=()).astype("float32")
    numeric = np.zeros_like(x, dtype="float64")
    for place in np.ndindex(*x.shape):
        step = np.zeros_like(numeric)
        step[place] = 1e-5
        numeric[place] = (reference(x + step) - reference(x - step)) / 2e-5
    bound = 1e-5 * np.abs(numeric).max() + tolerance("first_loss") * 0.1
    np.testing.assert_allclose(gradient, numeric, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("kind", "x", "some"),
    [
        (CLIPLoss, LOGITS, LOGITS[THERE][:, THERE]),
        (SigLIPLoss, LOGITS, LOGITS[THERE][:, THERE]),
        (ContrastiveLoss, vectors(3), vectors(3)[THERE]),
    ],
)
def test_rows_of_no_weight_are_as_if_they_were_not_there(kind, x, some):
    loss = kind(reduction="sum")
    whole = to_numpy(loss(None, x, WEIGHTS))
    np.testing.assert_allclose(whole, to_numpy(loss(None, some, WEIGHTS[THERE])), rtol=1e-6)
    _, (gradient,) = value_and_grad(lambda x: loss(None, x, WEIGHTS), x)
    assert np.isfinite(gradient).all() and not gradient[~THERE].any()
    assert x.ndim == 3 or not gradient[:, ~THERE].any()
    assert to_numpy(loss(None, x, np.zeros(ROWS))) == 0


def test_each_row():
    losses = to_numpy(ContrastiveLoss(reduction=None)(None, vectors(2)))
    expected = contrastive_rows(vectors(2), np.ones(ROWS))
    np.testing.assert_allclose(losses, expected, atol=tolerance("losses"))


@BOTH
def test_logits_of_any_size_stay_finite(kind):
    for size in (1e4, -1e4):
        value, (gradient,) = value_and_grad(lambda x: kind()(None, x), size * LOGITS)
        assert np.isfinite(to_numpy(value)).all() and np.isfinite(gradient).all()


@pytest.mark.once
@pytest.mark.parametrize(
    "loss",
    [
        CLIPLoss(reduction="sum"),
        SigLIPLoss(reduction="sum"),
        ContrastiveLoss(scale=5, matryoshka_dims=[8, 4], reduction="sum"),
    ],
    ids=lambda loss: loss.name,
)
def test_a_config_makes_it_again(loss):
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(loss))
    assert type(again) is type(loss) and again.get_config() == loss.get_config()
    if isinstance(again, ContrastiveLoss):
        assert again.matryoshka_weights == (1.0, 1.0)


@pytest.mark.once
@BOTH
def test_logits_that_are_not_square_are_refused(kind):
    message = rf"{kind.__name__} got logits of shape \(5, 4\); train on"
    with pytest.raises(InputError, match=message):
        kind()(None, LOGITS[:, :4])


@pytest.mark.once
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": 0}, "scale is 0; give a number above 0"),
        ({"matryoshka_dims": (4, 0)}, "matryoshka_dims"),
        ({"matryoshka_dims": (4, 2), "matryoshka_weights": (1,)}, r"are \(1,\) for 2 widths"),
        ({"matryoshka_dims": (4,), "matryoshka_weights": (-1,)}, "give one above 0 for each"),
    ],
)
def test_settings_of_the_contrastive_loss_are_checked(settings, message):
    refused(message, ContrastiveLoss, **settings)


@pytest.mark.once
def test_vectors_of_the_contrastive_loss_are_checked():
    with pytest.raises(InputError, match=r"sample_weight has shape \(2,\) beside labels of"):
        ContrastiveLoss()(None, vectors(2), [1.0, 2.0])
    with pytest.raises(InputError, match="matryoshka_dims has 13 and the vectors have 12 numbers"):
        ContrastiveLoss(matryoshka_dims=(13,))(None, vectors(2))
    with pytest.raises(InputError, match=r"got vectors of shape \(5, 12\); train on pairs"):
        ContrastiveLoss()(None, vectors(2)[:, 0])
