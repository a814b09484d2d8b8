"""Graphs that Keras writes on TensorFlow."""

from pathlib import Path
from typing import Any

import tensorflow as tf

# By format, ops that keep their override: tf2onnx knows the error function, and not the
# complementary one that the exact GELU of Keras takes.
KEEPS = {"onnx": ("gelu",)}


def savedmodel(model: Any, spec: Any, path: Path) -> None:
    """A folder for tf.saved_model.load and TensorFlow Serving."""
    model.export(str(path), format="tf_saved_model", input_signature=[spec], verbose=False)


def onnx(model: Any, spec: Any, path: Path) -> None:
    """By tf2onnx."""
    model.export(str(path), format="onnx", input_signature=[spec], verbose=False)


def litert(model: Any, spec: Any, path: Path) -> None:
    """With the ops alone that LiteRT has of its own; others would need TensorFlow beside it."""
    own = {"supported_ops": [tf.lite.OpsSet.TFLITE_BUILTINS]}
    model.export(str(path), format="litert", input_signature=[spec], verbose=False, target_spec=own)


def openvino(model: Any, spec: Any, path: Path) -> None:
    """A folder with model.xml and model.bin."""
    where = str(path / "model.xml")
    model.export(where, format="openvino", input_signature=[spec], verbose=False)


WRITERS = {"savedmodel": savedmodel, "onnx": onnx, "litert": litert, "openvino": openvino}
