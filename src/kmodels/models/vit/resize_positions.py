"""Position embeddings of a file, or of a model, for another image size."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from kmodels.models.vit.config import ViTConfig
from kmodels.weights import LazyArray
from kmodels.weights.positions import fit_positions

Tensors = Mapping[str, LazyArray]


def fitting(
    config: ViTConfig, name: str, flat: bool = False
) -> Callable[[Tensors, ViTConfig], Tensors]:
    """Returns what makes the position embedding of a file fit another image size.

    Args:
        config: config of the file.
        name: name of the tensor; a file without it stays as it is.
        flat: whether it is (rows, D) instead of (1, rows, D).
    """

    def fit(held: Tensors, wanted: ViTConfig) -> Tensors:
        if name not in held:
            return held
        table = held[name]
        if flat:
            table = table.map((1, *table.shape), lambda x: x[None])
        table = fit_positions(
            table,
            config.grid,
            wanted.grid,
            config.num_special_positions,
            wanted.position_interpolation,
        )
        return {**held, name: table.map(table.shape[1:], lambda x: x[0]) if flat else table}

    return fit


def resized(model: keras.Model, image_size: Sequence[int], patch_size: int | None = None) -> Any:
    """Returns a copy of a backbone or task for other image and patch sizes.

    It goes through a preset, which knows adapters, quantized kernels and the rules for positions
    and patches.
    """
    height, width = image_size
    config = getattr(model, "backbone", model).config
    fields = {"image_shape": (height, width, config.image_shape[2])}
    fields |= {} if patch_size is None else {"patch_size": patch_size}
    with tempfile.TemporaryDirectory() as folder:
        path = model.save_to_preset(Path(folder) / "model")
        dtype = getattr(model, "backbone", model).dtype_policy
        return type(model).from_preset(path, dtype=dtype, **fields)
