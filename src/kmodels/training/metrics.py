"""Metrics that leave out ignored labels, and the average precision of boxes."""

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import keras
import numpy as np

from kmodels.core.arguments import Checked
from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import DTypeLike, Tensor
from kmodels.data.images.sources import check_whole_classes
from kmodels.training.sparse_labels import check_pixels, like, mask_ignored


@keras.saving.register_keras_serializable(package="kmodels")
class MeanIoU(Checked, keras.metrics.MeanIoU):
    """Keras' `MeanIoU` with exact counts for any number of pixels on every backend.

    It sums counts of pixels over batches, devices and processes, and divides once. Keras' own casts
    labels to a dtype that JAX does not have by default, which warns at each first batch; its counts
    are int32 on JAX and torch, and a data set of photographs has more than 2 ** 31 pixels; and it
    takes weights of pixels, but none of images.

    Args:
        num_classes: number of classes.
        name: name of the metric.
        dtype: of the counts.
        ignore_class: label of pixels that are ignored; None if all count.
        sparse_y_true: labels are whole numbers; False for one-hot ones.
        sparse_y_pred: predictions are whole numbers; False for logits or probabilities, which is
            the default here.
        axis: axis of the classes in one-hot labels and logits.

    Call:
        y_true: (B, H, W), or (B, H, W, 1).
        y_pred: (B, H, W, classes).
        sample_weight: (B,), (B, H, W), or None.

        The result is the mean over the classes that masks or predictions have.
    """

    def __init__(
        self,
        num_classes: int,
        name: str = "mean_iou",
        dtype: DTypeLike = None,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = False,
        axis: int = -1,
    ):
        check_whole("num_classes", num_classes)
        super().__init__(
            num_classes=num_classes,
            name=name,
            dtype=dtype or "float32",
            ignore_class=ignore_class,
            sparse_y_true=sparse_y_true,
            sparse_y_pred=sparse_y_pred,
            axis=axis,
        )

    def update_state(
        self, y_true: Tensor, y_pred: Tensor, sample_weight: Tensor | None = None
    ) -> None:
        """Adds the pixels of a batch to the counts.

        Args:
            y_true: masks.
            y_pred: predictions.
            sample_weight: weights of images or pixels, or None.
        """
        ops, classes = keras.ops, self.num_classes
        if self.sparse_y_true and not self.sparse_y_pred and self.axis == -1:
            check_pixels(y_true, y_pred)
        if not self.sparse_y_true:
            y_true = ops.argmax(y_true, axis=self.axis)
        if not self.sparse_y_pred:
            y_pred = ops.argmax(y_pred, axis=self.axis)
        if sample_weight is not None:
            sample_weight = like(sample_weight, y_true, self.dtype)
            sample_weight = ops.broadcast_to(sample_weight, ops.shape(y_true))
        rows = ops.shape(y_true)[0]
        true = ops.reshape(ops.cast(y_true, "int32"), (rows, -1))
        said = ops.reshape(ops.cast(y_pred, "int32"), (rows, -1))
        there = ops.ones_like(true, dtype="bool")
        for numbers in (true, said):
            there = ops.logical_and(there, (numbers >= 0) & (numbers < classes))
        if self.ignore_class is not None:
            there = ops.logical_and(there, true != self.ignore_class)
        # Whole numbers: float32 cannot count beyond 2 ** 24 one by one.
        weights = ops.cast(there, "int32")
        if sample_weight is not None:
            row_weights = ops.reshape(sample_weight, (rows, -1))
            weights = row_weights * ops.cast(there, self.dtype)
        cells = ops.where(there, true * classes + said, 0)
        # Not `segment_sum`, which on torch waits for the device and counts in float32.
        counts = ops.scatter_update(
            ops.zeros((classes**2,), ops.dtype(weights)),
            ops.reshape(cells, (-1, 1)),
            ops.reshape(weights, (-1,)),
            reduction="add",
        )
        counts = ops.reshape(ops.cast(counts, self.dtype), (classes, classes))
        self.total_cm.assign_add(counts)


@keras.saving.register_keras_serializable(package="kmodels")
class SparseAccuracy(keras.metrics.SparseCategoricalAccuracy):
    """Keras' `SparseCategoricalAccuracy` that does not count labels of -100."""

    def update_state(self, y_true: Tensor, y_pred: Tensor, sample_weight: Any = None) -> None:
        """Counts a batch."""
        y_true, _, counted = mask_ignored(y_true, y_pred, None)
        weights = keras.ops.cast(counted, self.dtype)
        if sample_weight is not None:
            weights = weights * like(sample_weight, counted, self.dtype)
        super().update_state(y_true, y_pred, weights)


# COCO's twelve figures, by torchmetrics' names.
AVERAGES = (
    *("map", "map_50", "map_75", "map_small", "map_medium", "map_large"),
    *("mar_1", "mar_10", "mar_100", "mar_small", "mar_medium", "mar_large"),
)


def average_precision(
    detected: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Returns COCO's average precision and recall of boxes, computed by pycocotools.

    Args:
        detected: for each image "boxes" (n, 4), "scores" (n,) and "labels" (n,), as `detect` of a
            `kmodels.models.ViTObjectDetector` gives them; for a whole curve call it with
            threshold=0.
        wanted: for each image "boxes" (T, 4) and "labels" (T,), and if there are any "iscrowd" (T,)
            and "area" (T,). Boxes are x and y of the upper left and of the lower right corner, in
            pixels.

    Returns:
        Figures from 0 to 1, by torchmetrics' names: "map" is the mean over the IoU from 0.5 to
        0.95; -1 if there is nothing to find, as for "map_large" without large boxes.

    Raises:
        InputError: without pycocotools, if the numbers of images differ, or for objects in another
            form.
    """
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError:
        raise InputError(
            "average_precision needs the package pycocotools: pip install 'kmodels[detection]'"
        ) from None
    if len(detected) != len(wanted):
        raise InputError(
            f"objects of {len(detected)} images and labels of {len(wanted)} images; give as many"
        )

    def rows(
        images_of: str, images: Sequence[Mapping[str, Any]], *more: str
    ) -> list[dict[str, Any]]:
        annotations: list[dict[str, Any]] = []
        for image, one in enumerate(images):
            boxes = _boxes_of(one, f"{images_of} image {image}", more)
            for number, (left, top, right, bottom) in enumerate(boxes.tolist()):
                row: dict[str, Any] = {"id": len(annotations) + 1, "image_id": image, "iscrowd": 0}
                row["category_id"] = int(one["labels"][number])
                row["bbox"] = [left, top, right - left, bottom - top]
                row["area"] = (right - left) * (bottom - top)
                row |= {name: float(one[name][number]) for name in more if name in one}
                row["iscrowd"] = int(row["iscrowd"])
                annotations.append(row)
        return annotations

    labels, objects = (
        rows("wanted", wanted, "iscrowd", "area"),
        rows("detected", detected, "scores"),
    )
    truth: Any = COCO()
    results: Any = COCO()
    categories = [{"id": i} for i in sorted({row["category_id"] for row in labels + objects})]
    images = [{"id": image} for image in range(len(wanted))]
    for row in objects:
        row["score"] = row.pop("scores")
    with redirect_stdout(io.StringIO()):
        for coco, annotations in ((truth, labels), (results, objects)):
            coco.dataset = {"images": images, "categories": categories, "annotations": annotations}
            coco.createIndex()
        evaluation = COCOeval(truth, results, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return dict(zip(AVERAGES, map(float, evaluation.stats), strict=True))


def _boxes_of(one: Mapping[str, Any], where: str, names: Sequence[str]) -> np.ndarray:
    """Returns the boxes of an image, float64 (n, 4).

    Args:
        one: the objects.
        where: names the image in messages.
        names: numbers that objects may have beside "labels"; "scores" must be there.

    Raises:
        InputError: for objects in another form, of which pycocotools would count some as found.
    """
    needed = ("boxes", "labels", *(name for name in names if name == "scores"))
    if lacking := [name for name in needed if name not in one]:
        raise InputError(f"{where} has no {', '.join(lacking)}, but {', '.join(map(str, one))}")
    boxes = np.asarray(one["boxes"], "float64")
    boxes = boxes if boxes.size else boxes.reshape(0, 4)
    others = {name: np.asarray(one[name]) for name in ("labels", *names) if name in one}
    shapes = {"boxes": boxes.shape, **{name: x.shape for name, x in others.items()}}
    if {*shapes.values()} - {(len(boxes),)} != {(len(boxes), 4)}:
        given = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InputError(f"{where} has {given}; give (n, 4) boxes and (n,) of the others")
    check_whole_classes(labels := others["labels"], where)
    if labels.dtype.kind not in "biuf" or (labels < 0).any():
        raise InputError(
            f"{where} has the labels {labels.tolist()}; give the number of a class from 0 for each "
            "box, and leave out boxes of padding"
        )
    ordered = (boxes[:, :2] <= boxes[:, 2:]).all()
    if not ordered or not all(np.isfinite(x).all() for x in (boxes, *others.values())):
        raise InputError(
            f"{where} has a box that is not x and y of the upper left and of the lower right "
            "corner, or a number that is not finite"
        )
    return boxes
