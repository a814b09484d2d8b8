"""What a set of masks is compared with: masks of an image, each with a class."""

from collections.abc import Mapping
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.core.types import Tensor, Tree
from kmodels.training.matching import points as at

# Of segments that are given as masks with classes.
KEYS = ("mask_labels", "class_labels")


class Targets:
    """Masks of each image, at most T, with their classes.

    Args:
        classes: int32 (B, T); -1 where an image has fewer.

    Attributes:
        valid: bool (B, T), whether there is a mask.
    """

    def __init__(self, classes: Tensor):
        self.classes = keras.ops.cast(classes, "int32")
        self.valid = self.classes >= 0

    def at_shared_points(self, points: Tensor) -> Any:
        """Returns how far each mask covers points (B, P, 2) of its image: float32 (B, T, P)."""
        raise NotImplementedError

    def at_own_points(self, points: Tensor) -> Any:
        """Returns how far each mask covers points of its own, (B, T, P, 2): float32 (B, T, P)."""
        raise NotImplementedError


class MaskTargets(Targets):
    """Masks as they are; they may overlap.

    Args:
        masks: (B, T, H, W), zeros and ones.
        classes: see `Targets`.
    """

    def __init__(self, masks: Tensor, classes: Tensor):
        super().__init__(classes)
        self.masks = keras.ops.cast(masks, "float32")

    def at_shared_points(self, points: Tensor) -> Any:
        """See `Targets`."""
        return at.at_shared_points(self.masks, points)

    def at_own_points(self, points: Tensor) -> Any:
        """See `Targets`."""
        return at.at_own_points(self.masks, points)


class LabelTargets(Targets):
    """The classes that are in a mask of labels, each with all of its pixels.

    The masks themselves are never made: a pixel is looked up where a point lies.

    Args:
        labels: whole numbers (B, H, W); those that are no class count for nothing.
        num_classes: number of classes.
        most: classes of an image that are kept, those with the most pixels.
    """

    def __init__(self, labels: Tensor, num_classes: int, most: int):
        ops = keras.ops
        labels = ops.cast(labels, "int32")
        self.size = tuple(labels.shape)[1:]
        self.labels = ops.reshape(labels, (-1, self.size[0] * self.size[1]))
        counts = _counts(self.labels, num_classes)
        amounts, order = ops.top_k(counts, min(most, num_classes))
        super().__init__(ops.where(amounts > 0, ops.cast(order, "int32"), -1))

    def at_shared_points(self, points: Tensor) -> Any:
        """See `Targets`."""
        ops, found = keras.ops, 0.0
        own = ops.expand_dims(self.classes, 2)
        for index, weight in at.corners(points, self.size):
            held = ops.take_along_axis(self.labels, index, axis=1)
            found += ops.where(ops.expand_dims(held, 1) == own, ops.expand_dims(weight, 1), 0.0)
        return found

    def at_own_points(self, points: Tensor) -> Any:
        """See `Targets`."""
        ops, found = keras.ops, 0.0
        own = ops.expand_dims(self.classes, 2)
        for index, weight in at.corners(points, self.size):
            flat = ops.reshape(index, (-1, index.shape[1] * index.shape[2]))
            held = ops.take_along_axis(self.labels, flat, axis=1)
            held = ops.reshape(held, (-1, *index.shape[1:]))
            found += ops.where(held == own, weight, 0.0)
        return found


def _counts(labels: Tensor, num_classes: int) -> Any:
    """Returns the pixels of each class, int32 (B, num_classes)."""
    ops = keras.ops
    batch = ops.shape(labels)[0]
    there = ops.logical_and(labels >= 0, labels < num_classes)
    start = ops.expand_dims(ops.arange(batch, dtype="int32") * num_classes, 1)
    cells = ops.where(there, labels, 0) + start
    added = ops.zeros((batch * num_classes,), "int32")
    found = ops.scatter_update(
        added,
        ops.reshape(cells, (-1, 1)),
        ops.reshape(ops.cast(there, "int32"), (-1,)),
        reduction="add",
    )
    return ops.reshape(found, (-1, num_classes))


def targets_of(y: Tree, num_classes: int, most: int, ignore_class: int | None = None) -> Targets:
    """Returns what labels of a step mean.

    Args:
        y: masks of labels (B, H, W) or (B, H, W, 1), or a dictionary of "mask_labels"
            (B, T, H, W) and "class_labels" (B, T).
        num_classes: number of classes.
        most: masks of an image that can be predicted.
        ignore_class: label of pixels that belong to no target, or None.

    Raises:
        InputError: for labels in another form.
    """
    if isinstance(y, Mapping):
        return MaskTargets(*parts_of(y))
    labels = labels_of(y)
    if ignore_class is not None:
        labels = keras.ops.where(labels == ignore_class, -1, labels)
    return LabelTargets(labels, num_classes, most)


def labels_of(y: Tree, none: int = -1) -> Any:
    """Returns the label of each pixel; of masks that overlap the first one's.

    Args:
        y: as of `targets_of`.
        none: label of pixels that no mask has.

    Returns:
        int32 (B, H, W).

    Raises:
        InputError: for labels in another form.
    """
    ops = keras.ops
    if isinstance(y, Mapping):
        masks, classes = parts_of(y)
        classes = ops.cast(classes, "int32")
        there = ops.cast(masks, "bool") & ops.expand_dims(classes >= 0, (2, 3))
        first = ops.argmax(ops.cast(there, "int32"), axis=1)
        shape = ops.shape(first)
        held = ops.take_along_axis(classes, ops.reshape(first, (shape[0], -1)), axis=1)
        return ops.where(ops.any(there, axis=1), ops.reshape(held, shape), none)
    labels: Any = y
    shape = tuple(labels.shape)
    if len(shape) == 4 and shape[-1] == 1:
        labels, shape = labels[..., 0], shape[:-1]
    if len(shape) != 3:
        raise InputError(
            f"labels have shape {shape}; give (B, H, W), or mask_labels and class_labels"
        )
    return ops.cast(labels, "int32")


def parts_of(y: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns masks and classes of labels by name; raises `InputError` for other names."""
    if set(y) != set(KEYS):
        raise InputError(
            f"labels have the keys {', '.join(map(str, y))}; give {' and '.join(KEYS)}"
        )
    return y[KEYS[0]], y[KEYS[1]]
