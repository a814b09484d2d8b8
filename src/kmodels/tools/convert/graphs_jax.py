"""Graphs that JAX and Keras on JAX write."""

from pathlib import Path
from typing import TYPE_CHECKING

import jax
from jax import export

if TYPE_CHECKING:
    import keras

# One file for all; the ops of the graph are plain ones.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
KEEPS: dict[str, tuple[str, ...]] = {}


def savedmodel(model: "keras.Model", spec: "keras.InputSpec", path: Path) -> None:
    """Writes through jax2tf, by Keras."""
    model.export(str(path), format="tf_saved_model", input_signature=[spec], verbose=False)


def stablehlo(model: "keras.Model", spec: "keras.InputSpec", path: Path) -> None:
    """Writes the weights as constants and free axes as symbols."""
    names = iter(("batch", "length"))
    text = ", ".join(next(names) if size is None else str(size) for size in spec.shape)
    shape = jax.ShapeDtypeStruct(export.symbolic_shape(text), spec.dtype)
    found = export.export(jax.jit(lambda x: model(x)), platforms=PLATFORMS)(shape)
    path.write_bytes(found.serialize())


WRITERS = {"savedmodel": savedmodel, "stablehlo": stablehlo}
