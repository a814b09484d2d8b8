"""keras-cv layers, run by TensorFlow on the CPU with any backend of Keras."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kmodels.core import keras_internals
from kmodels.core.errors import InputError

MISSING = -1.0
# Prefixes of lines of a TensorFlow error that are not its message.
_PLACES = ("in user code", "File ", "Exception encountered", "Arguments received", "return ", "*")


class HostLayers:
    """Layers one after the other on dictionaries of arrays.

    The layers run inside a TensorFlow function, where keras-cv leaves its results to TensorFlow;
    outside it would hand them to Keras' backend and its device.

    Args:
        layers: layers that take keras-cv's dictionaries.
        seed: seed of their generators, and of TensorFlow, whose generator some of them use.
    """

    def __init__(self, layers: Sequence[Any], seed: int):
        self._layers = layers
        for i, generator in enumerate(_generators(layers)):
            generator.reset_from_seed(seed + i)
        tf.random.set_seed(seed)
        self._function = tf.function(self._apply, reduce_retracing=True)

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns arrays after all layers.

        Args:
            inputs: arrays by keras-cv's names.

        Returns:
            Arrays by the same names; boxes are padded with -1 to at least their former number.

        Raises:
            InputError: for parts that a layer cannot handle.
        """
        with tf.device("cpu"):
            tensors = tf.nest.map_structure(tf.convert_to_tensor, dict(inputs))
            rows = 0
            if (boxes := tensors.get("bounding_boxes")) is not None:
                rows = int(boxes["boxes"].shape[1])
                there = boxes["classes"] != MISSING
                tensors["bounding_boxes"] = {
                    name: tf.ragged.boolean_mask(value, there) for name, value in boxes.items()
                }
            try:
                outputs = self._function(tensors)
            except (NotImplementedError, TypeError, ValueError) as error:
                raise InputError(_reason(error, inputs)) from error
            return tf.nest.map_structure(lambda x: _array(x, rows), outputs)

    def _apply(self, inputs: dict[str, Any]) -> dict[str, Any]:
        for layer in self._layers:
            inputs = layer(inputs)
        return inputs


def _generators(layers: Sequence[Any]) -> list[Any]:
    """Returns the random generators of all layers and of those within them, each once."""
    generators: dict[int, Any] = {}
    for layer in layers:
        for part in keras_internals.sublayers(layer):
            generator = getattr(part, "_random_generator", None)
            if isinstance(generator, tf.random.Generator):
                generators.setdefault(id(generator), generator)
    return list(generators.values())


def _array(value: Any, rows: int) -> np.ndarray:
    if isinstance(value, tf.RaggedTensor):
        rows = max(rows, int(tf.reduce_max(value.row_lengths())))
        shape = [None, rows, *[None] * (value.shape.rank - 2)]
        value = value.to_tensor(default_value=MISSING, shape=shape)
    return value.numpy()


def _reason(error: Exception, inputs: Mapping[str, Any]) -> str:
    """Returns the message of keras-cv and the name of its layer, without TensorFlow's traceback."""
    text = str(error)
    layers = re.findall(r"calling (\w+)\.call", text) or ["a keras-cv layer"]
    lines = [line.strip() for line in re.sub(r"\x1b\[\d*m", "", text).splitlines()]
    said = [x for x in lines if x and not x.startswith(_PLACES) and x.upper() != x]
    return (
        f"{layers[-1]} cannot augment {' and '.join(inputs)}: "
        f"{said[0] if said else type(error).__name__ + ', it has no method for one of them'}"
    )
