"""Optional inputs of text models: token ids, and for example a padding mask."""

from collections.abc import Callable
from typing import Any, Protocol

import keras
import numpy as np

from kmodels.core import keras_internals
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError, same_shape
from kmodels.core.types import Tensor, Tree

GRAPH = ("token_ids", "padding_mask")
NAMES = (*GRAPH, "positions", "segment_ids")
# The name of the positions in transformers and in keras-hub's Gemma 4, and here.
POSITIONS = ("position_ids", "positions")
# Inputs with a number for each token.
OF_TOKENS = (*NAMES[1:], "vision_mask")
# Inputs that are not whole numbers.
FLOATS = ("images", "pixel_values")


class OrderBackend(Protocol):
    """Moving the positions of each row, if Keras' operations do not export."""

    def tokens_first(self, mask: Any) -> tuple[Any, Any]:
        """Returns the source and the destination of each position of a row, (B, T) int32 each."""
        ...

    def moved(self, x: Any, order: Any) -> Any:
        """Moves x (B, T) or (B, T, D): the places of each row, in the order (B, T)."""
        ...


_native = backend_module("kmodels.models.blocks.order", OrderBackend, optional=True)


class OptionalInputs:
    """Lets a functional model be called with token ids alone, and with more than its graph has.

    Attributes:
        optional_inputs: see `kmodels.layers.direct_calls.CalledDirectly`.
        takes: names of the inputs that it knows, of a task those that its backbone knows too.
        absent: names of the inputs of its graph that may be left out.
    """

    optional_inputs = True
    takes: tuple[str, ...] = NAMES
    absent: tuple[str, ...] = ("padding_mask",)
    check_token_ids: Callable[[Any], None]  # of a backbone

    def check_inputs(self, inputs: dict[str, Any]) -> None:
        """Raises `InputError` for ids without a row, and inputs of other sizes than the ids."""
        if (ids := inputs.get("token_ids")) is None:
            return
        self.check_token_ids(ids)
        wanted = _plain_shape(ids)
        if len(wanted) < 2 or 0 in wanted[1:]:
            raise InputError(f"token_ids has shape {wanted}; give rows of tokens, (rows, length)")
        for name in OF_TOKENS:
            if (x := inputs.get(name)) is None or (shape := _plain_shape(x)) == wanted:
                continue
            # One row of positions or segments may serve all rows, of positions without its axis.
            if name == "positions" and len(shape) == 1:
                shape = (1, *shape)
            one = name in ("positions", "segment_ids") and shape[:1] == (1,)
            if not same_shape(shape[one:], wanted[one:]):
                raise InputError(
                    f"{name} has shape {shape} beside token_ids of shape {wanted}; give one for "
                    "each token"
                )

    def __call__(self, inputs: Tree, *args: object, **kwargs: Any) -> Any:
        """Calls the model with None for each optional input that is not given."""
        inputs = _all_tensors(complete(self, inputs))
        return super().__call__(inputs, *args, **kwargs)  # type: ignore[misc]

    def compute_output_spec(self, inputs: Tree, *args: object, **kwargs: Any) -> Any:
        """Returns shapes and dtypes; an input that is not given changes neither."""
        completed, symbols = complete(self, inputs), self.input  # type: ignore[attr-defined]
        shapes = {name: x.shape for name, x in completed.items() if x is not None}
        specs = {
            name: keras.KerasTensor(shapes.get(name, symbol.shape), symbol.dtype)
            for name, symbol in symbols.items()
        }
        return super().compute_output_spec(specs, *args, **kwargs)  # type: ignore[misc]

    def call(self, inputs: Tree, training: bool | None = None, mask: Tree = None) -> Any:
        """Runs the graph on complete inputs, also if Keras calls it from `fit` or `predict`."""
        inputs = as_tensors(self, inputs)
        return super().call(inputs, training=training, mask=mask)  # type: ignore[misc]


def complete(model: keras.Model, inputs: Tree) -> dict[str, Any]:
    """Returns the inputs as a dictionary, with None for a mask that is not given.

    Keras' own warning lists names that the model does not have; they are left out.
    """
    names = _names(model)
    if isinstance(inputs, dict) and POSITIONS[0] in inputs and POSITIONS[1] in names:
        if POSITIONS[1] in inputs:
            raise InputError(f"the model got both {' and '.join(POSITIONS)}; give one of them")
        inputs = {POSITIONS[1] if name == POSITIONS[0] else name: inputs[name] for name in inputs}
    if not isinstance(inputs, dict):
        if isinstance(inputs, list | tuple):
            raise InputError(
                f"the model got a {type(inputs).__name__} of inputs; give token ids as an array, "
                f"or a dictionary with some of {', '.join(names)}"
            )
        inputs = {"token_ids": inputs}
    if inputs.get("token_ids") is None:
        raise InputError(
            f"the model got {', '.join(sorted(inputs)) or 'nothing'}; it needs token_ids, and "
            f"takes {', '.join(names[1:])} too"
        )
    if set(inputs) - set(names):
        keras_internals.warn_of_inputs(model, inputs)
    present = {name: inputs[name] for name in names if inputs.get(name) is not None}
    getattr(model, "backbone", model).check_inputs(present)
    return {**dict.fromkeys(model.absent), **present}


def _plain_shape(x: Any) -> tuple[int | None, ...]:
    """Returns the shape of rows of tokens, without Keras' additional last axis of 1."""
    shape = tuple(np.shape(x) if isinstance(x, list) else x.shape)
    return shape[:2] if len(shape) == 3 and shape[2] == 1 else shape


def _all_tensors(inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the inputs, all as tensors if some are: Keras takes no mixture.

    A preprocessor returns arrays, and values that are computed from them are tensors.
    """
    if not any(keras.ops.is_tensor(x) for x in inputs.values()):
        return inputs
    return {
        name: keras.ops.convert_to_tensor(x) if isinstance(x, np.ndarray) else x
        for name, x in inputs.items()
    }


def as_tensors(model: keras.Model, inputs: Tree) -> dict[str, Any]:
    """Returns the inputs by name as tensors, all but images int32 (B, T); missing ones are None."""
    inputs = complete(model, inputs)
    return {name: _tensor(inputs.get(name), name) for name in _names(model)}


def _names(model: keras.Model) -> tuple[str, ...]:
    return tuple(name for name in getattr(model, "backbone", model).takes if name in model.takes)


def _tensor(x: Any, name: str) -> Any:
    if x is None:
        return None
    if name in FLOATS:
        return keras.ops.convert_to_tensor(x)
    x = keras.ops.convert_to_tensor(x, dtype="int32")
    # Keras accepts an additional last axis of 1.
    return keras.ops.squeeze(x, -1) if len(x.shape) == 3 and x.shape[2] == 1 else x


@keras.saving.register_keras_serializable(package="kmodels")
class TokensFirst(keras.Operation):
    """The order that moves the tokens of each row to the front, and masked positions to the end.

    A causal model needs no mask then: nothing that follows a token reaches it, positions count the
    tokens, and the order of a row that is padded on the right is the one it has.

    Call:
        mask (B, T) int, 0 for masked positions -> (front, back), each (B, T) int32: the source of
        each position, and the destination of each position. For None it returns None twice.
    """

    def call(self, mask: Tensor | None) -> tuple[Any, Any]:
        """(B, T) -> twice (B, T)."""
        if mask is None:
            return None, None
        if _native is not None and not isinstance(mask, keras.KerasTensor):
            return _native.tokens_first(keras.ops.convert_to_tensor(mask))
        is_token = keras.ops.cast(mask, "bool")
        count = keras.ops.cast(is_token, "int32")
        before = keras.ops.cumsum(count, axis=1) - 1
        masked = keras.ops.cumsum(1 - count, axis=1) - 1
        back = keras.ops.where(
            is_token, before, keras.ops.sum(count, axis=1, keepdims=True) + masked
        )
        back = keras.ops.cast(back, "int32")
        return keras.ops.cast(keras.ops.argsort(back, axis=1), "int32"), back


@keras.saving.register_keras_serializable(package="kmodels")
class PaddingApart(keras.Operation):
    """Segments that keep masked positions apart, for bidirectional attention.

    Call:
        mask (B, T) int, 0 for masked places; segment_ids (B, T) int, or None for one segment in
        each row -> (B, T) int32. For None as the mask it gives the segments as they are.
    """

    def call(self, mask: Tensor | None, segment_ids: Tensor | None = None) -> Any:
        """(B, T) -> (B, T)."""
        if mask is None:
            return segment_ids
        is_token = keras.ops.cast(mask, "bool")
        if segment_ids is None:
            return keras.ops.cast(is_token, "int32")
        segment_ids = keras.ops.cast(segment_ids, "int32")
        lowest = keras.ops.min(segment_ids, axis=1, keepdims=True)
        return keras.ops.where(is_token, segment_ids, lowest - 1)


@keras.saving.register_keras_serializable(package="kmodels")
class Reordered(keras.Operation):
    """Moves the places of each row.

    Call:
        x (B, T) or (B, T, D), order (B, S) int32 -> y (B, S) or (B, S, D), with
        y[b, s] = x[b, order[b, s]]. None as the order changes
        nothing, and for None as x it gives None.
    """

    def call(self, x: Tensor | None, order: Tensor | None) -> Any:
        """(B, T, ...) -> (B, T, ...)."""
        if x is None or order is None:
            return x
        if _native is not None:
            return _native.moved(keras.ops.convert_to_tensor(x), order)
        if len(x.shape) == 3:
            order = keras.ops.expand_dims(order, -1)
        return keras.ops.take_along_axis(x, order, axis=1)

    def compute_output_spec(
        self, x: keras.KerasTensor, order: keras.KerasTensor
    ) -> keras.KerasTensor:
        """Returns the shape and the dtype of y."""
        length = (x if order is None else order).shape[1]
        return keras.KerasTensor((x.shape[0], length, *x.shape[2:]), dtype=x.dtype)
