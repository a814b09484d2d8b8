"""Graphs that Keras writes on TensorFlow."""

from pathlib import Path
from typing import TYPE_CHECKING

import tensorflow as tf

if TYPE_CHECKING:
    import keras

# The ops of each format that keep their override: tf2onnx knows the error function, and not the
# complementary one that the exact GELU of Keras takes.
KEEPS = {"onnx": ("gelu",)}


def savedmodel(model: "keras.Model", spec: "keras.InputSpec", path: Path) -> None:
    """Writes a folder for tf.saved_model.load and TensorFlow Serving."""
    model.export(str(path), format="tf_saved_model", input_signature=[spec], verbose=False)


def onnx(model: "keras.Model", spec: "keras.InputSpec", path: Path) -> None:
    """Writes by tf2onnx."""
    model.export(str(path), format="onnx", input_signature=[spec], verbose=False)


def litert(model: "keras.Model", spec: "keras.InputSpec", path: Path) -> None:
    """Writes only ops that LiteRT has of its own; others would need TensorFlow beside it."""
    own = {"supported_ops": [tf.lite.OpsSet.TFLITE_BUILTINS]}
    model.export(str(path), format="litert", input_signature=[spec], verbose=False, target_spec=own)


def openvino(model: "keras.Model", spec: "keras.InputSpec", path: Path) -> None:
    """Writes a folder with model.xml and model.bin."""
    where = str(path / "model.xml")
    model.export(where, format="openvino", input_signature=[spec], verbose=False)


WRITERS = {"savedmodel": savedmodel, "onnx": onnx, "litert": litert, "openvino": openvino}
