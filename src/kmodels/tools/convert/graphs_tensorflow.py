"""Graphs that Keras writes on TensorFlow, and the runtime that opens them."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from kmodels.tools.convert.runtimes import listed

if TYPE_CHECKING:
    import keras

# The ops of each format that keep their override: tf2onnx supports erf, but not erfc, which the
# exact GELU of Keras uses.
KEEPS = {"onnx": ("gelu",)}


def savedmodel(model: "keras.Model", spec: "keras.InputSpec", path: Path) -> None:
    """Writes a directory for tf.saved_model.load and TensorFlow Serving."""
    model.export(str(path), format="tf_saved_model", input_signature=[spec], verbose=False)


def onnx(model: "keras.Model", spec: "keras.InputSpec", path: Path) -> None:
    """Writes by tf2onnx."""
    model.export(str(path), format="onnx", input_signature=[spec], verbose=False)


def litert(model: "keras.Model", spec: "keras.InputSpec", path: Path) -> None:
    """Writes only built-in ops of LiteRT; others would need TensorFlow at runtime."""
    own = {"supported_ops": [tf.lite.OpsSet.TFLITE_BUILTINS]}
    model.export(str(path), format="litert", input_signature=[spec], verbose=False, target_spec=own)


def openvino(model: "keras.Model", spec: "keras.InputSpec", path: Path) -> None:
    """Writes a directory with model.xml and model.bin."""
    where = str(path / "model.xml")
    model.export(where, format="openvino", input_signature=[spec], verbose=False)


def run_savedmodel(
    path: Path, samples: Sequence[np.ndarray], model: "keras.Model"
) -> list[np.ndarray]:
    """Runs the endpoint "serve" of a SavedModel on the CPU."""
    with suppress(RuntimeError):  # TensorFlow is in use already
        # It would allocate the memory of all accelerators.
        tf.config.set_visible_devices([], "GPU")
    with tf.device("CPU:0"):
        loaded = tf.saved_model.load(str(path))
        tensors = map(tf.constant, samples)
        return [np.asarray(x) for tensor in tensors for x in listed(loaded.serve(tensor))]


WRITERS = {"savedmodel": savedmodel, "onnx": onnx, "litert": litert, "openvino": openvino}
