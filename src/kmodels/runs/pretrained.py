"""Probe a backbone that was pretrained without labels, by neighbours and a linear classifier."""

from typing import TYPE_CHECKING, Any

import numpy as np

from kmodels.data import ImageLoader
from kmodels.runs import probe
from kmodels.training.evaluation import WholeBatches

if TYPE_CHECKING:
    import keras

__all__ = ["Probe"]


class Probe:
    """Asks the frozen features of an encoder for the classes of images, again and again.

    Args:
        data: a `kmodels.data.DataBundle` with held-out parts.
        images: number of training images whose labels are told, evenly chosen; 0 for all.
        batch_size: images per batch.
        neighbours: number of them that vote.
        settings: of the loaders, as of `kmodels.data.ImageLoader`.
    """

    def __init__(
        self,
        data: Any,
        images: int,
        batch_size: int,
        neighbours: int,
        settings: dict[str, Any],
    ):
        probe.check_installed()
        parts = {"train": data.train, "val": data.validation, "test": data.test}
        self.classes, self.neighbours = data.num_classes, neighbours
        count = len(data.train)
        chosen = np.unique(np.linspace(0, count - 1, min(images or count, count)).astype(int))
        parts["train"] = _Some(data.train, chosen)
        self.labels = {name: part.labels for name, part in parts.items()}
        self.batches = {
            name: WholeBatches(ImageLoader(part, batch_size, **settings))
            for name, part in parts.items()
        }

    def ask(self, encoder: "keras.Model", before: str = "") -> dict[str, float]:
        """Returns the accuracies on the held-out parts.

        Args:
            encoder: gives features (B, D).
            before: first part of the names.

        Returns:
            "knn_val_accuracy", "knn_test_accuracy", "linear_val_accuracy" and
            "linear_test_accuracy".

        Raises:
            InputError: for more neighbours than there are images.
        """
        held = {name: probe.features(encoder, batches) for name, batches in self.batches.items()}
        table, _ = probe.compare(held, self.labels, self.classes, self.neighbours)
        return {
            f"{before}{way}_{part}_accuracy": score
            for way, row in table.items()
            for part, score in row.items()
        }


class _Some:
    """Chosen images of a source.

    Args:
        source: a `kmodels.data.ImageSource`.
        chosen: their numbers.
    """

    def __init__(self, source: Any, chosen: np.ndarray):
        self.source, self.chosen = source, chosen
        self.labels = np.asarray(source.labels)[chosen]

    def __len__(self) -> int:
        return len(self.chosen)

    def batch(self, indices: np.ndarray) -> tuple[Any, np.ndarray]:
        """Returns images and labels, see `kmodels.data.ImageSource`."""
        return self.source.batch(self.chosen[indices])
