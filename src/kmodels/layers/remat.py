"""Gradient checkpointing: the backward pass recomputes the activations inside a block."""

from collections.abc import Callable
from typing import Any, Protocol

import keras

from kmodels.core import keras_internals
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import check_choice
from kmodels.core.types import Tensor

# The layers of a block that can be computed again, besides blocks as a whole.
PARTS = ("attention", "mlp")
MODES = ("none", "block", *PARTS)


class RematBackend(Protocol):
    """Gradient checkpointing on one backend."""

    def call(
        self,
        layer: keras.layers.Layer,
        fn: Callable[..., Any],
        seeds: list[keras.Variable],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        """Returns `fn(*args, **kwargs)`, which the backward pass recomputes.

        The recomputation draws the same random numbers; `seeds` are the states of the layer's
        random streams.
        """
        ...


def rematerialize(model: keras.Model, mode: str) -> None:
    """Sets gradient checkpointing of a model's blocks. Call it before the first step.

    Args:
        model: with layers called block_0, block_1, ...
        mode: "none"; "block", which keeps only the inputs of blocks; "attention" or "mlp", which
            keeps only the input of that part of each block.

    Raises:
        InputError: for another mode.
    """
    check_choice("remat", mode, MODES)
    for layer in keras_internals.sublayers(model):
        if layer.name.startswith("block_"):
            keras_internals.set_rematerialized(layer, mode == "block")
        elif layer.name in PARTS and "/block_" in f"/{layer.path}":
            keras_internals.set_rematerialized(layer, mode == layer.name)


def wrap(layer: keras.Layer, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a layer's call `fn` with gradient checkpointing in training."""
    engine = backend_module("kmodels.layers.remat", RematBackend)
    weights = {id(variable) for variable in layer.weights}
    # The states of the random streams below the layer.
    seeds = [variable for variable in layer.variables if id(variable) not in weights]

    def call(*args: object, **kwargs: object) -> Any:
        context = keras_internals.current_call_context()
        # Not every layer has this argument.
        training = kwargs["training"] if "training" in kwargs else context.get_value("training")
        if not training:
            return fn(*args, **kwargs)

        def again(*args: object, **kwargs: object) -> Any:
            with keras_internals.call_context(context):
                return fn(*args, **kwargs)

        return engine.call(layer, again, seeds, args, kwargs)

    return call


def tensors_apart(args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], Callable[..., Any]]:
    """Splits the tensors from arguments; the function returned joins (args, kwargs) again.

    Tensors may be nested in tuples, lists and dictionaries.
    """
    leaves = keras.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if keras.ops.is_tensor(leaf)]

    def fill(*tensors: Tensor) -> tuple[tuple, dict[str, Any]]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return keras.tree.pack_sequence_as((args, kwargs), filled)

    return [leaves[place] for place in places], fill
