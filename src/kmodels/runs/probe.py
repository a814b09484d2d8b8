"""Evaluation of frozen features by neighbours and a linear probe, on the host."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from kmodels.core.errors import InputError, check_whole
from kmodels.data import ImageLoader
from kmodels.runs.plots import principal_components, spread
from kmodels.training.loop import WholeBatches

if TYPE_CHECKING:
    import keras

__all__ = [
    "Probe",
    "check_installed",
    "compare",
    "component_map",
    "features",
    "linear",
    "neighbours",
    "principal_components",
]

# Inverse regularization strengths; held-out images choose one.
STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)
# Queries whose similarities are in memory at once.
CHUNK = 1024
# Images that a map shows, and its size.
MAPPED, MAP_WIDTH, MAP_HEIGHT = 500, 600, 340


def features(model: "keras.Model", batches: Any) -> np.ndarray:
    """Returns the features of images.

    Args:
        model: a model without a head, whose outputs are (B, D).
        batches: a `training.WholeBatches`.

    Returns:
        float32 (n, D), in the order of the images.
    """
    outputs = np.asarray(model.predict(batches, verbose=0), "float32")
    return outputs[: batches.samples]


def compare(
    features: Mapping[str, np.ndarray],
    labels: Mapping[str, np.ndarray],
    classes: int,
    number: int = 20,
) -> tuple[dict[str, dict[str, float]], float]:
    """Returns the accuracy of neighbours and the linear probe on unseen images.

    Args:
        features: (n, D) of the parts "train", "val" and "test".
        labels: int (n,), their classes.
        classes: number of classes.
        number: number of neighbours that vote.

    Returns:
        Accuracy by part for "knn" and "linear", and the strength that `linear` chose.

    Raises:
        InputError: for more neighbours than images.
    """
    known, names = features["train"], labels["train"]

    def scores(predict: Callable[[np.ndarray], np.ndarray]) -> dict[str, float]:
        return {
            part: float(np.mean(predict(features[part]) == labels[part]))
            for part in ("val", "test")
        }

    knn = scores(lambda queries: neighbours(known, names, queries, classes, number).argmax(-1))
    fitted, strength = linear(known, names, features["val"], labels["val"])
    return {"knn": knn, "linear": scores(fitted.predict)}, strength


def neighbours(
    known: np.ndarray,
    labels: np.ndarray,
    queries: np.ndarray,
    classes: int,
    number: int = 20,
    temperature: float = 0.07,
) -> np.ndarray:
    """Returns weighted votes of the nearest neighbours by cosine similarity.

    See Wu et al. 2018, and Caron et al. 2021, section 4.1.

    Args:
        known: (n, D) features of labelled images.
        labels: int (n,), their classes.
        queries: (m, D) features.
        classes: number of classes.
        number: number of neighbours that vote.
        temperature: the weight of a vote is exp(cosine / temperature).

    Returns:
        float64 (m, classes), shares that sum to 1.

    Raises:
        InputError: if `number` is not from 1 to n.
    """
    check_whole("neighbours", number)
    if number > len(known):
        raise InputError(f"neighbours is {number}; give at most {len(known)}, the number of images")
    known, queries = _unit(known), _unit(queries)
    votes = np.zeros((len(queries), classes))
    for start in range(0, len(queries), CHUNK):
        cosines = queries[start : start + CHUNK] @ known.T
        nearest = np.argpartition(-cosines, number - 1, axis=1)[:, :number]
        near = np.take_along_axis(cosines, nearest, axis=1)
        # Differences to the largest, so that no exponential overflows.
        weights = np.exp((near - near.max(1, keepdims=True)) / temperature)
        rows = np.arange(start, start + len(cosines))[:, None]
        np.add.at(votes, (rows, labels[nearest]), weights)
    return votes / votes.sum(1, keepdims=True)


def _unit(x: np.ndarray) -> np.ndarray:
    x = x.astype("float64")
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def component_map(features: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Returns a map of features for the page of a run.

    Args:
        features: (n, D) of held-out images.
        labels: int (n,).
        names: of the classes.

    Returns:
        `points` (x, y, label) of some hundred images within a frame of 600 by 340, and `classes`.
    """
    shown = spread(len(features), MAPPED)
    places = principal_components(features)[shown]
    low, high = places.min(0), places.max(0)
    size = np.array([MAP_WIDTH, MAP_HEIGHT]) - 20
    places = 10 + (places - low) / np.maximum(high - low, 1e-12) * size
    points = [
        [round(float(x), 1), round(float(y), 1), int(label)]
        for (x, y), label in zip(places, labels[shown], strict=True)
    ]
    return {"points": points, "classes": [str(name) for name in names]}


def check_installed() -> None:
    """Checks that the linear probe can be fitted.

    Raises:
        InputError: if scikit-learn is not installed.
    """
    if not find_spec("sklearn"):
        raise InputError("a linear probe needs scikit-learn: pip install 'kmodels[probe]'")


def linear(
    known: np.ndarray, labels: np.ndarray, held_out: np.ndarray, held_labels: np.ndarray
) -> tuple[Any, float]:
    """Fits logistic regression to standardized features; held-out images choose its strength.

    Args:
        known: (n, D) training features.
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


class Probe:
    """Evaluates an encoder that was pretrained without labels, by its frozen features.

    Args:
        data: a `kmodels.data.DataBundle` with held-out parts.
        images: number of labelled training images, evenly spaced; 0 for all.
        batch_size: images per batch.
        neighbours: number of neighbours that vote.
        settings: settings of `kmodels.data.ImageLoader`.
    """

    def __init__(
        self, data: Any, images: int, batch_size: int, neighbours: int, settings: dict[str, Any]
    ):
        check_installed()
        parts = {"train": data.train, "val": data.validation, "test": data.test}
        self.classes, self.neighbours = data.num_classes, neighbours
        count = len(data.train)
        parts["train"] = _Subset(data.train, spread(count, images or count))
        self.labels = {name: part.labels for name, part in parts.items()}
        self.batches = {
            name: WholeBatches(ImageLoader(part, batch_size, **settings))
            for name, part in parts.items()
        }

    def ask(self, encoder: "keras.Model", prefix: str = "") -> dict[str, float]:
        """Returns the accuracies on the held-out parts.

        Args:
            encoder: a model whose outputs are features (B, D).
            prefix: prefix of the names.

        Returns:
            "knn_val_accuracy", "knn_test_accuracy", "linear_val_accuracy" and
            "linear_test_accuracy".

        Raises:
            InputError: for more neighbours than images.
        """
        outputs = {name: features(encoder, batches) for name, batches in self.batches.items()}
        table, _ = compare(outputs, self.labels, self.classes, self.neighbours)
        return {
            f"{prefix}{way}_{part}_accuracy": score
            for way, row in table.items()
            for part, score in row.items()
        }


class _Subset:
    """The images of a source with these indices."""

    def __init__(self, source: Any, indices: np.ndarray):
        self.source, self.indices = source, indices
        self.labels = np.asarray(source.labels)[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def batch(self, indices: np.ndarray) -> tuple[Any, np.ndarray]:
        """Returns images and labels, see `kmodels.data.ImageSource`."""
        return self.source.batch(self.indices[indices])
