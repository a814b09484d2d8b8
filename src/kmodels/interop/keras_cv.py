"""keras-cv's augmentations as a step on the host, between the data and the training step.

keras-cv 0.9 always computes with TensorFlow, so its layers cannot be part of a step that JAX
compiles, and XLA cannot compile its operations on boxes. A step on the host works with every
backend, and with labels, boxes, masks and keypoints.
"""

import threading
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import keras
import numpy as np

from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.core.runtime import check_channels_last
from kmodels.core.types import Data
from kmodels.data.pipeline.arrays import to_numpy
from kmodels.data.pipeline.kinds import Mapped
from kmodels.interop.packages import need

__all__ = ["Augmentation", "layers"]

# keras-cv's names of the parts of an example, apart from images.
PARTS = ("labels", "bounding_boxes", "segmentation_masks", "keypoints")
BOXES = ("boxes", "classes")
# Layers that leave boxes unchanged although they move or remove objects.
LEAVE_BOXES = ("CutMix", "FourierMix")


def layers() -> Any:
    """Returns the module `keras_cv.layers`.

    Raises:
        InputError: if keras-cv, or TensorFlow, which it needs, is not installed.
    """
    if find_spec("tensorflow") is None:
        raise InputError(
            "keras-cv needs TensorFlow beside every backend: pip install tensorflow 'kmodels[cv]'; "
            "kmodels.data.Augment needs neither"
        )
    return need("keras_cv", "keras-cv", "cv").layers


class Augmentation:
    """A sequence of keras-cv layers on batches in NumPy.

    Pass it as `preprocess` to `kmodels.data.as_dataset`, or apply it to a loader with `over`. The
    random numbers depend on the seed and all batches before, so a run can be repeated, but not
    resumed exactly; use `kmodels.data.Augment` for that.

    Args:
        *layers: instances of classes in `keras_cv.layers`, or any Keras layers that take its
            dictionaries.
        seed: seed of the random numbers; also set as TensorFlow's global seed, which some layers
            use.

    Call:
        x: images (B, H, W, C), or a dictionary of keras-cv with "images" in it.
        y: labels, or a dictionary with "labels", "bounding_boxes" ({"boxes" (B, N, 4), "classes"
            (B, N)}), "segmentation_masks" or "keypoints", or boxes alone ({"boxes", "classes"}).
            Rows of padding boxes are -1, in and out.
        sample_weight: returned unchanged.

        It returns the same structure; images are float32, labels keep their dtype.

    Raises:
        InputError: without keras-cv or TensorFlow, inside a compiled step, for labels that a layer
            mixes and that are not one-hot floats, or if Keras' `image_data_format` is
            "channels_first".
    """

    def __init__(self, *layers: keras.Layer, seed: int = 0):
        check_channels_last()
        _module = globals()["layers"]()
        wrong = [layer for layer in layers if not isinstance(layer, keras.layers.Layer)]
        if wrong or not layers:
            raise InputError(
                f"Augmentation takes instances of layers, such as {_module.__name__}."
                f"RandomFlip(); it got {wrong[0]!r}"
                if wrong
                else "Augmentation got no layers"
            )
        from kmodels.interop import host_tensorflow

        self._run = host_tensorflow.HostLayers(layers, seed)
        self._lock = threading.Lock()
        parts = [part for layer in layers for part in keras_internals.sublayers(layer)]
        names = [type(part).__name__ for part in parts]
        self._wrong = [name for name in names if name in LEAVE_BOXES]

    def __call__(self, x: Data, y: Data = None, sample_weight: Data = None) -> Any:
        """Returns a batch after all layers; see the class."""
        pieces = dict(x) if isinstance(x, Mapping) else {"images": x}
        inputs = {name: _host(value) for name, value in (pieces | _parts(y)).items()}
        if "bounding_boxes" in inputs and self._wrong:
            raise InputError(
                f"{self._wrong[0]} cannot augment {' and '.join(inputs)}: it would leave the boxes "
                "as they are"
            )
        with self._lock:  # threads share the generators of the layers
            outputs = self._run(inputs)
        if "labels" in inputs:
            outputs["labels"] = _labels(inputs["labels"], outputs["labels"])
        pictures = outputs["images"]
        if isinstance(x, Mapping):
            pictures = {name: outputs[name] for name in pieces}
        parts = (pictures, _like(y, outputs), sample_weight)
        return pictures if y is None else parts[:2] if sample_weight is None else parts

    def over(self, loader: keras.utils.PyDataset) -> Mapped:
        """Returns the batches of an `ImageLoader` or another PyDataset after these layers.

        Args:
            loader: a loader of images in the value range of the layers, such as
                `ImageLoader(..., std=1 / 255)` for 0 to 255.
        """
        return Mapped(loader, self)


def _host(value: object) -> Any:
    """Returns arrays on the host, boxes too."""
    if isinstance(value, Mapping):
        return {name: _host(part) for name, part in value.items()}
    if isinstance(value, keras.KerasTensor):
        raise InputError(_COMPILED)
    try:
        array = to_numpy(value)
    except Exception as error:  # each framework raises another error for a traced value
        raise InputError(_COMPILED) from error
    return array if array.dtype.kind in "iub" else np.asarray(array, "float32")


_COMPILED = (
    "keras-cv's layers cannot be part of a compiled step or of a model; give the Augmentation as "
    "preprocess to kmodels.data.as_dataset, or put it over a loader: Augmentation(...).over(loader)"
)


def _parts(y: Data) -> dict[str, Any]:
    if y is None:
        return {}
    if not isinstance(y, Mapping):
        return {"labels": y}
    if set(y) == set(BOXES):
        return {"bounding_boxes": dict(y)}
    if unknown := sorted(set(y) - set(PARTS)):
        raise InputError(
            f"labels with {', '.join(map(str, unknown))}; keras-cv supports {', '.join(PARTS)}"
        )
    return dict(y)


def _like(y: Data, outputs: Mapping[str, Any]) -> Any:
    if y is None:
        return None
    if not isinstance(y, Mapping):
        return outputs["labels"]
    return (
        outputs["bounding_boxes"] if set(y) == set(BOXES) else {name: outputs[name] for name in y}
    )


def _labels(labels: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    if labels.dtype.kind == "f":
        return outputs
    back = outputs.astype(labels.dtype)
    if back.shape != labels.shape or not np.array_equal(back, outputs) or (back != labels).any():
        raise InputError(
            f"a layer mixes labels, which are {labels.dtype} of {labels.shape}; give one-hot "
            "float32"
        )
    return back
