"""Position embeddings of a file for the image size of a model."""

from collections.abc import Callable, Mapping

from kmodels.models.vit.config import ViTConfig
from kmodels.weights import LazyArray
from kmodels.weights.positions import fit_positions

Tensors = Mapping[str, LazyArray]


def fitting(
    config: ViTConfig, name: str, flat: bool = False
) -> Callable[[Tensors, ViTConfig], Tensors]:
    """What makes the position embedding of a file fit another image size.

    Args:
        config: of the file.
        name: of the tensor; a file without it stays as it is.
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
