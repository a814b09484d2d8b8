"""A model as it is served: one tensor in, one out, any number of rows."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from kmodels.core.types import Tree


class Served(keras.Model):
    """A model without its optional inputs, never in training.

    Args:
        model: a backbone or task.

    Call:
        preprocessed images (B, height, width, C) float32, or token ids (B, T) int32 -> what the
        model gives.
    """

    def __init__(self, model: keras.Model):
        super().__init__(name="served")
        self.served = model

    def call(self, inputs: Tree) -> Any:
        """Returns what the model gives."""
        return outputs(self.served, inputs)


def serve(model: keras.Model) -> tuple[Served, keras.InputSpec]:
    """Returns the model as it is served, built, and what it takes; None for axes of any length."""
    served = Served(model)
    served(samples(model, 2)[1])
    if _takes_text(model):
        return served, keras.InputSpec(shape=(None, None), dtype="int32", name="token_ids")
    shape = (None, *model.input.shape[1:])
    return served, keras.InputSpec(shape=shape, dtype="float32", name="images")


def outputs(model: keras.Model, inputs: Tree) -> Any:
    """Returns what a model gives of images, or of the ids of rows without padding."""
    if _takes_text(model):
        whole = {"token_ids": inputs, "padding_mask": keras.ops.ones_like(inputs)}
        if "position_ids" in model.input:  # keras-hub's Gemma 4
            whole["position_ids"] = keras.ops.cumsum(whole["padding_mask"], axis=1) - 1
        if "vision_indices" in model.input:  # keras-hub's Gemma 3
            whole |= _unseen(model, keras.ops.shape(inputs))
        return model(whole, training=False)
    return model(inputs, training=False)


def _unseen(model: keras.Model, shape: Sequence[int]) -> dict[str, Any]:
    """Returns an image for each row that no token shows; without any its convolution may fail."""
    count = getattr(model, "backbone", model).num_vision_tokens_per_image
    return {
        "images": keras.ops.zeros((shape[0], 1, *model.input["images"].shape[2:])),
        "vision_indices": keras.ops.zeros((shape[0], count), "int32"),
        "vision_mask": keras.ops.zeros(tuple(shape), "int32"),
    }


def samples(model: keras.Model, length: int) -> list[np.ndarray]:
    """Inputs of two shapes, always the same, so that an axis that was meant to be free has to be.

    Args:
        model: a backbone or task.
        length: length of the longer rows of text.
    """
    rng = np.random.default_rng(0)
    if _takes_text(model):
        size = getattr(model, "backbone", model).config.vocabulary_size
        shapes = ((3, length), (1, length // 2 + 1))
        return [rng.integers(0, size, shape).astype("int32") for shape in shapes]
    shape = model.input.shape[1:]
    return [rng.normal(size=(rows, *shape)).astype("float32") for rows in (3, 1)]


def _takes_text(model: keras.Model) -> bool:
    return isinstance(model.input, dict)
