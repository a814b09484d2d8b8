"""The inputs of a decoder: token ids, and optionally a mask, positions and segments."""

from typing import Any, Protocol

import keras
import numpy as np

from kmodels.core import keras_internals
from kmodels.core.dispatch import Tensor, backend_module
from kmodels.core.errors import InputError

GRAPH = ("token_ids", "padding_mask")
NAMES = (*GRAPH, "positions", "segment_ids")


class OrderBackend(Protocol):
    """Moving the places of each row, where Keras' own operations do not export."""

    def inverse(self, order: Tensor) -> Tensor:
        """Returns the inverse of each row of (B, T), a permutation of its places."""
        ...

    def moved(self, x: Tensor, order: Tensor) -> Tensor:
        """Moves x (B, T) or (B, T, D): the places of each row, in the order (B, T)."""
        ...


_native = backend_module("kmodels.models.common.order", OrderBackend, optional=True)


class OptionalInputs:
    """Lets a functional model be called with token ids alone, and with more than its graph has."""

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the model with None for each optional input that is not given."""
        inputs = _all_tensors(complete(self, inputs))
        return super().__call__(inputs, *args, **kwargs)  # type: ignore[misc]


def complete(model: Any, inputs: Any) -> dict[str, Any]:
    """Returns the inputs as a dictionary, with None for a mask that is not given.

    Keras' own warning tells of names that the model does not know; they are left out.

    Raises:
        InputError: without token ids.
    """
    if not isinstance(inputs, dict):
        if isinstance(inputs, list | tuple):
            raise InputError(
                f"the model got a {type(inputs).__name__} of inputs; give token ids as an array, "
                f"or a dictionary with some of {', '.join(NAMES)}"
            )
        inputs = {"token_ids": inputs}
    if inputs.get("token_ids") is None:
        raise InputError(
            f"the model got {', '.join(sorted(inputs)) or 'nothing'}; it needs token_ids, and "
            f"takes {', '.join(NAMES[1:])} too"
        )
    if set(inputs) - set(NAMES):
        keras_internals.warn_of_inputs(model, inputs)
    given = {name: inputs[name] for name in NAMES if inputs.get(name) is not None}
    return {"padding_mask": None, **given}


def _all_tensors(inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the inputs, all as tensors if some are: Keras takes no mixture.

    A preprocessor gives arrays, and what is computed from one of them is a tensor.
    """
    if not any(keras.ops.is_tensor(x) for x in inputs.values()):
        return inputs
    return {
        name: keras.ops.convert_to_tensor(x) if isinstance(x, np.ndarray) else x
        for name, x in inputs.items()
    }


def as_tensors(model: Any, inputs: Any) -> dict[str, Any]:
    """Returns the inputs by name as int32 tensors (B, T); what is not given is None."""
    inputs = complete(model, inputs)
    return {name: _tensor(inputs.get(name)) for name in NAMES}


def _tensor(x: Any) -> Any:
    if x is None:
        return None
    x = keras.ops.convert_to_tensor(x, dtype="int32")
    # Keras takes a last axis of 1 where a model has none.
    return keras.ops.squeeze(x, -1) if len(x.shape) == 3 else x


@keras.saving.register_keras_serializable(package="kmodels")
class TokensFirst(keras.Operation):
    """The order in which the tokens of each row stand in front, and masked places behind them.

    A causal model needs no mask then: nothing that follows a token reaches it, positions count the
    tokens, and the order of a row that is padded on the right is the one it has.

    Call:
        mask (B, T) int, 0 for what is to be as if it were not there -> (front, back), each (B, T)
        int32: the place that moves to each, and where each place has gone. None gives None twice.
    """

    def call(self, mask: Any) -> tuple[Any, Any]:
        """(B, T) -> twice (B, T)."""
        if mask is None:
            return None, None
        is_token = keras.ops.cast(mask, "bool")
        count = keras.ops.cast(is_token, "int32")
        before = keras.ops.cumsum(count, axis=1) - 1
        masked = keras.ops.cumsum(1 - count, axis=1) - 1
        back = keras.ops.where(
            is_token, before, keras.ops.sum(count, axis=1, keepdims=True) + masked
        )
        back = keras.ops.cast(back, "int32")
        front = keras.ops.argsort(back, axis=1) if _native is None else _native.inverse(back)
        return keras.ops.cast(front, "int32"), back


@keras.saving.register_keras_serializable(package="kmodels")
class Reordered(keras.Operation):
    """Moves the places of each row.

    Call:
        x (B, T) or (B, T, D), order (B, T) int32 -> y as x, with y[b, t] = x[b, order[b, t]]. None
        as the order changes nothing, and None as x gives None.
    """

    def call(self, x: Any, order: Any) -> Any:
        """(B, T, ...) -> (B, T, ...)."""
        if x is None or order is None:
            return x
        if _native is not None:
            return _native.moved(keras.ops.convert_to_tensor(x), order)
        if len(x.shape) == 3:
            order = keras.ops.expand_dims(order, -1)
        return keras.ops.take_along_axis(x, order, axis=1)

    def compute_output_spec(self, x: Any, order: Any) -> keras.KerasTensor:
        """Returns the shape and the dtype of x."""
        return keras.KerasTensor(x.shape, dtype=x.dtype)
