"""The matching of masks: SciPy's assignments, torch's `grid_sample`, gradients."""

import itertools

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels import transforms
from kmodels.training import SetCriterion, set_criterion
from kmodels.training.set_criterion import LabelTargets, MaskTargets, labels_of
from refusals import refused
from tolerances import tolerance

rng = np.random.default_rng(0)


def cheapest(cost):
    """The least total of any assignment of all rows, tried one by one."""
    rows, columns = cost.shape
    tried = itertools.permutations(range(columns), rows)
    return min(cost[np.arange(rows), list(chosen)].sum() for chosen in tried)


@pytest.mark.parametrize("find", [set_criterion.by_paths, set_criterion.linear_sum_assignment])
def test_assignments_are_the_cheapest(find):
    cost = rng.normal(size=(6, 4, 6)).astype("float32")
    cost[1] = np.round(cost[1])  # with ties
    valid = rng.random((6, 4)) < 0.7
    valid[0], valid[2] = True, False
    call = transforms.jit(find) if keras.backend.backend() != "torch" else find
    found = to_numpy(call(*map(keras.ops.convert_to_tensor, (cost, valid))))
    assert found.dtype == "int32" and (found[~valid] == -1).all()
    for matrix, own, columns in zip(cost.astype("float64"), valid, found, strict=True):
        chosen = columns[own]
        assert (chosen >= 0).all() and len(set(chosen)) == own.sum()
        total = matrix[own, chosen].sum()
        assert total == pytest.approx(cheapest(matrix[own]) if own.any() else 0.0, abs=1e-5)


def test_more_rows_than_columns():
    cost = rng.normal(size=(1, 5, 2)).astype("float32")
    valid = np.array([[False, True, True, True, False]])
    found = to_numpy(set_criterion.linear_sum_assignment(cost, valid))
    assert (found[0] >= 0).tolist() == [False, True, True, False, False]


def sampled(image, where):
    """One map (H, W) at (x, y) from 0 to 1, by two loops in float64."""
    height, width = image.shape
    total = 0.0
    x, y = where[0] * width - 0.5, where[1] * height - 0.5
    for row in range(height):
        for column in range(width):
            share = max(0, 1 - abs(x - column)) * max(0, 1 - abs(y - row))
            total += share * image[row, column]
    return total


def test_points_between_pixels():
    maps = rng.normal(size=(2, 3, 4, 5)).astype("float32")
    shared = rng.random((2, 6, 2)).astype("float32")
    shared[0, 0], shared[0, 1] = (0.0, 1.0), (1.0, 0.01)  # half of them outside
    own = rng.random((2, 3, 6, 2)).astype("float32")
    wanted = [
        [[sampled(m, p) for p in at] for m in one] for one, at in zip(maps, shared, strict=True)
    ]
    found = to_numpy(set_criterion.at_shared_points(keras.ops.convert_to_tensor(maps), shared))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance("hidden"))
    wanted = [[[sampled(m, p) for p in at] for m, at in zip(*pair, strict=True)]
              for pair in zip(maps, own, strict=True)]  # fmt: skip
    found = to_numpy(set_criterion.at_own_points(keras.ops.convert_to_tensor(maps), own))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance("hidden"))
    # Labels are masks of their classes, the largest first; what is no class is none.
    labels = rng.integers(0, 4, (2, 4, 5))
    labels[0, :2], labels[1, 0, :2], labels[1, labels[1] == 2] = 3, 255, -1
    targets = LabelTargets(keras.ops.convert_to_tensor(labels), 4, 3)
    classes = to_numpy(targets.classes)
    for row, one in zip(classes, labels, strict=True):
        amounts = [(one == c).sum() for c in row if c >= 0]
        assert amounts == sorted(amounts, reverse=True) and row[0] >= 0
    assert 2 not in classes[1]
    masks = np.stack([np.stack([(one == c) & (c >= 0) for c in row])
                      for row, one in zip(classes, labels, strict=True)])  # fmt: skip
    others = MaskTargets(masks, classes)
    for name, at in (("at_shared_points", shared), ("at_own_points", own)):
        np.testing.assert_allclose(
            to_numpy(getattr(targets, name)(keras.ops.convert_to_tensor(at)))[classes >= 0],
            to_numpy(getattr(others, name)(keras.ops.convert_to_tensor(at)))[classes >= 0],
            rtol=0, atol=tolerance("hidden"),
        )  # fmt: skip
    shown = to_numpy(labels_of({"mask_labels": masks, "class_labels": classes}, 255))
    kept = np.isin(labels[0], classes[0])
    np.testing.assert_array_equal(shown[0], np.where(kept, labels[0], 255))


def test_gradients_and_weights_of_images():
    """A matched mask is pulled to its target; an image of weight 0 is not there."""
    criterion = SetCriterion(3, train_num_points=64)
    masks = rng.normal(size=(2, 4, 8, 8)).astype("float32")
    classes = rng.normal(size=(2, 4, 4)).astype("float32")
    labels = np.zeros((2, 8, 8), "int32")
    labels[:, :, 4:] = 2

    def loss(logits, kinds):
        return criterion(labels, logits, kinds, seed=3)

    given = [keras.ops.convert_to_tensor(x) for x in (masks, classes)]

    def value(labels, logits, kinds, *weights):
        return criterion(labels, logits, kinds, 3, *weights)

    gradient = transforms.grad(loss, argnums=(0, 1))
    if keras.backend.backend() == "jax":  # which would compile each of its operations alone
        gradient, value = transforms.jit(gradient), transforms.jit(value)
    gradients = gradient(*given)
    slopes, kinds = map(to_numpy, gradients)
    matched = np.abs(slopes).max((2, 3)) > 0
    assert matched.sum(1).tolist() == [2, 2]  # as many as there are classes
    assert (np.abs(kinds).max(-1) > 0).all()  # queries without a mask are to say so
    for row, queries in zip(slopes, matched, strict=True):
        for own in row[queries]:
            left, right = own[:, :4].sum(), own[:, 4:].sum()
            assert left * right < 0
    alone = to_numpy(value(labels[:1], masks[:1], classes[:1]))
    weighted = value(labels, masks, classes, np.array([1.0, 0.0], "float32"))
    assert np.isfinite(alone) and np.isfinite(to_numpy(weighted))
    empty = value(np.full_like(labels, 255), masks, classes)
    shares = np.exp(classes) / np.exp(classes).sum(-1, keepdims=True)
    assert to_numpy(empty) == pytest.approx(2 * -np.log(shares[..., 3]).mean(), abs=1e-5)
    refused("train_num_points is 0; give at least 1", SetCriterion, 3, train_num_points=0)
