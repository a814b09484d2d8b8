"""Graphs on JAX, and the runtime that opens them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax import export

from kmodels.tools.convert.runtimes import listed

if TYPE_CHECKING:
    import keras

# One file serves all platforms; the graph has only standard ops.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
KEEPS: dict[str, tuple[str, ...]] = {}


def savedmodel(model: "keras.Model", spec: "keras.InputSpec", path: Path) -> None:
    """Writes by Keras through jax2tf."""
    model.export(str(path), format="tf_saved_model", input_signature=[spec], verbose=False)


def stablehlo(model: "keras.Model", spec: "keras.InputSpec", path: Path) -> None:
    """Writes weights as constants and axes of any length as symbols."""
    names = iter(("batch", "length"))
    text = ", ".join(next(names) if size is None else str(size) for size in spec.shape)
    shape = jax.ShapeDtypeStruct(export.symbolic_shape(text), spec.dtype)
    program = export.export(jax.jit(lambda x: model(x)), platforms=PLATFORMS)(shape)
    path.write_bytes(program.serialize())


def run_stablehlo(
    path: Path, samples: Sequence[np.ndarray], model: "keras.Model"
) -> list[np.ndarray]:
    """Runs the program in a file."""
    program = export.deserialize(bytearray(path.read_bytes()))
    return [np.asarray(x) for sample in samples for x in listed(program.call(sample))]


WRITERS = {"savedmodel": savedmodel, "stablehlo": stablehlo}
