"""Evaluation of frozen features by neighbours and a linear probe, on the host."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from kmodels.core.errors import InputError, check_whole

if TYPE_CHECKING:
    import keras

__all__ = [
    "check_installed",
    "compare",
    "component_map",
    "features",
    "linear",
    "neighbours",
    "principal_components",
]

# Strengths of regularisation among which the held-out images choose.
STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)
# Queries whose similarities are in memory at once.
CHUNK = 1024
# Images that a map shows, and its size.
MAPPED, MAP_WIDTH, MAP_HEIGHT = 500, 600, 340


def features(model: "keras.Model", batches: Any) -> np.ndarray:
    """Returns what a model without a head gives for images.

    Args:
        model: gives (B, D).
        batches: a `training.WholeBatches`.

    Returns:
        float32 (n, D), in the order of the images.
    """
    found = np.asarray(model.predict(batches, verbose=0), "float32")
    return found[: batches.samples]


def compare(
    held: Mapping[str, np.ndarray],
    labels: Mapping[str, np.ndarray],
    classes: int,
    number: int = 20,
) -> tuple[dict[str, dict[str, float]], float]:
    """Returns the accuracy of neighbours and the linear probe on unseen images.

    Args:
        held: features (n, D) of the parts "train", "val" and "test".
        labels: int (n,), their classes.
        classes: of which there are so many.
        number: of neighbours that vote.

    Returns:
        Accuracy by part for "knn" and "linear", and the strength that `linear` chose.

    Raises:
        InputError: for more neighbours than there are images.
    """
    known, names = held["train"], labels["train"]

    def scores(say: Callable[[np.ndarray], np.ndarray]) -> dict[str, float]:
        return {part: float(np.mean(say(held[part]) == labels[part])) for part in ("val", "test")}

    near = scores(lambda asked: neighbours(known, names, asked, classes, number).argmax(-1))
    fitted, strength = linear(known, names, held["val"], labels["val"])
    return {"knn": near, "linear": scores(fitted.predict)}, strength


def neighbours(
    known: np.ndarray,
    labels: np.ndarray,
    asked: np.ndarray,
    classes: int,
    number: int = 20,
    temperature: float = 0.07,
) -> np.ndarray:
    """Votes of the nearest by cosine, the nearer the more (Wu et al. 2018; Caron et al. 2021, 4.1).

    Args:
        known: (n, D) features of images whose class is known.
        labels: int (n,), their classes.
        asked: (m, D) features.
        classes: of which there are so many.
        number: of neighbours that vote.
        temperature: a vote is exp(cosine / temperature).

    Returns:
        float64 (m, classes), shares that sum to 1.

    Raises:
        InputError: for a number that is not from 1 to n.
    """
    check_whole("neighbours", number)
    if number > len(known):
        raise InputError(f"neighbours is {number}; there are {len(known)} images to choose from")
    known, asked = _unit(known), _unit(asked)
    votes = np.zeros((len(asked), classes))
    for start in range(0, len(asked), CHUNK):
        cosines = asked[start : start + CHUNK] @ known.T
        nearest = np.argpartition(-cosines, number - 1, axis=1)[:, :number]
        near = np.take_along_axis(cosines, nearest, axis=1)
        # Only differences go in, so that no exponential is too large.
        weights = np.exp((near - near.max(1, keepdims=True)) / temperature)
        rows = np.arange(start, start + len(cosines))[:, None]
        np.add.at(votes, (rows, labels[nearest]), weights)
    return votes / votes.sum(1, keepdims=True)


def _unit(x: np.ndarray) -> np.ndarray:
    x = x.astype("float64")
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def principal_components(features: np.ndarray) -> np.ndarray:
    """Returns where features lie on their first two principal components.

    Args:
        features: (n, D), of which the directions count, as for neighbours.

    Returns:
        (n, 2).
    """
    unit = _unit(features)
    centred = unit - unit.mean(0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    return centred @ axes[:2].T


def component_map(features: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Returns a map of features for the page of a run.

    Args:
        features: (n, D) of held-out images.
        labels: int (n,).
        names: of the classes.

    Returns:
        `points` (x, y, label) of some hundred images within a frame of 600 by 340, and `classes`.
    """
    chosen = np.unique(np.linspace(0, len(features) - 1, min(MAPPED, len(features))).astype(int))
    places = principal_components(features)[chosen]
    low, high = places.min(0), places.max(0)
    size = np.array([MAP_WIDTH, MAP_HEIGHT]) - 20
    places = 10 + (places - low) / np.maximum(high - low, 1e-12) * size
    points = [
        [round(float(x), 1), round(float(y), 1), int(label)]
        for (x, y), label in zip(places, labels[chosen], strict=True)
    ]
    return {"points": points, "classes": [str(name) for name in names]}


def check_installed() -> None:
    """Checks that the linear probe can be fitted.

    Raises:
        InputError: where scikit-learn is not installed.
    """
    if not find_spec("sklearn"):
        raise InputError("a linear probe needs scikit-learn: pip install 'kmodels[probe]'")


def linear(
    known: np.ndarray,
    labels: np.ndarray,
    held_out: np.ndarray,
    held_labels: np.ndarray,
) -> tuple[Any, float]:
    """Fits logistic regression to standardised features, as strong as suits held-out images.

    Args:
        known: (n, D) features to learn from.
        labels: int (n,), their classes.
        held_out: (m, D) features that choose the strength.
        held_labels: int (m,), their classes.

    Returns:
        scikit-learn's model, whose `predict` takes features, and the inverse strength chosen.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    best: tuple[float, Any, float] | None = None
    for strength in STRENGTHS:
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=2000))
        model.fit(known, labels)
        score = float(np.mean(model.predict(held_out) == held_labels))
        if best is None or score > best[0]:
            best = (score, model, strength)
    assert best is not None
    return best[1], best[2]
