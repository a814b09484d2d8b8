"""The inputs of a model that takes rows of patches, by transformers' names."""

from typing import Any, ClassVar

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.types import Tensor, Tree

VALUES, SHAPES, MASK = "pixel_values", "spatial_shapes", "pixel_attention_mask"
NAMES = (VALUES, SHAPES, MASK)


class PatchInputs:
    """Lets a functional model be called without a mask, and with one image in each row.

    Attributes:
        optional_inputs: see `kmodels.layers.direct_calls.CalledDirectly`.
        by_image: whether the outputs have an axis for the images of a row, which goes where the
            inputs have none.
    """

    optional_inputs = True
    by_image: ClassVar[bool] = False

    def __call__(self, inputs: Tree, *args: object, **kwargs: Any) -> Any:
        """Calls the model with the axis for images, and None for a mask that is not given."""
        inputs, alone = rows(self, inputs)
        found = super().__call__(inputs, *args, **kwargs)  # type: ignore[misc]
        return keras.ops.squeeze(found, 1) if alone and self.by_image else found

    def call(self, inputs: Tree, training: bool | None = None, mask: Tree = None) -> Any:
        """Runs the graph, also where Keras calls it with what `fit` or `predict` was given."""
        inputs, alone = rows(self, inputs)
        found = super().call(inputs, training=training, mask=mask)  # type: ignore[misc]
        return keras.ops.squeeze(found, 1) if alone and self.by_image else found

    def intermediates(self, inputs: Tree) -> dict[str, Any]:
        """Returns every named intermediate of one forward pass, in the order of computation."""
        return super().intermediates(rows(self, inputs)[0])  # type: ignore[misc]


def graph_inputs(width: int, images: int | None, dtype: str) -> dict[str, keras.KerasTensor]:
    """Returns the symbolic inputs of a graph.

    Args:
        width: numbers of a patch.
        images: axes of the grids in front of their two numbers: None for any number of images in a
            row, 0 for one image without an axis.
        dtype: of the patches.
    """
    grids = (2,) if images == 0 else (images, 2)
    return {
        VALUES: keras.Input((None, width), name=VALUES, dtype=dtype),
        SHAPES: keras.Input(grids, name=SHAPES, dtype="int32"),
        MASK: keras.Input((None,), name=MASK, dtype="int32", optional=True),
    }


def rows(model: object, inputs: Tree) -> tuple[dict[str, Any], bool]:
    """Returns the inputs of the graph, and whether each row had one image without an axis for it.

    Raises:
        InputError: for something else than patches and their grids.
    """
    if not isinstance(inputs, dict) or inputs.get(VALUES) is None or inputs.get(SHAPES) is None:
        given = ", ".join(sorted(inputs)) if isinstance(inputs, dict) else type(inputs).__name__
        raise InputError(
            f"{type(model).__name__} got {given or 'nothing'}; give a dictionary with {VALUES} "
            f"(B, N, patch * patch * channels) and {SHAPES} (B, 2) or (B, S, 2), as its "
            "preprocessor makes it"
        )
    if unknown := sorted(set(inputs) - set(NAMES)):
        raise InputError(
            f"{type(model).__name__} got {', '.join(unknown)}; it takes {', '.join(NAMES)}"
        )
    values, shapes = inputs[VALUES], inputs[SHAPES]
    if getattr(shapes.shape, "rank", 2) is None:  # TensorFlow has traced the step for both
        raise InputError(
            f"one compiled step got {SHAPES} with and without an axis for the images of a row; "
            "give (B, S, 2) to all of its calls, with S = 1 for one image in each row"
        )
    if len(shapes.shape) not in (2, 3) or shapes.shape[-1] != 2:
        raise InputError(
            f"{SHAPES} has shape {tuple(shapes.shape)}; give (B, 2), rows and columns of the "
            "patches of each image, or (B, S, 2) for S images in each row"
        )
    alone = len(shapes.shape) == 2
    shapes = _whole(shapes)
    if alone:
        shapes = keras.ops.expand_dims(shapes, 1)
    mask = inputs.get(MASK)
    mask = None if mask is None else _whole(mask)
    return {VALUES: _tensor(values), SHAPES: shapes, MASK: mask}, alone


def _tensor(x: Tensor | np.ndarray) -> Any:
    return keras.ops.convert_to_tensor(x) if isinstance(x, np.ndarray) else x


def _whole(x: Tensor | np.ndarray) -> Any:
    """Returns whole numbers as int32, whatever they came as."""
    if isinstance(x, keras.KerasTensor):
        return x
    return keras.ops.convert_to_tensor(x, dtype="int32")
