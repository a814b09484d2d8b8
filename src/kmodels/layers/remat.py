"""Rematerialisation: activations inside a block are computed again in backward, not kept."""

from collections.abc import Callable
from typing import Any, Protocol

import keras

from kmodels.core import keras_internals
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor

# The layers of a block that can be computed again, besides blocks as a whole.
PARTS = ("attention", "mlp")
MODES = ("none", "block", *PARTS)


class RematBackend(Protocol):
    """Rematerialisation on one backend."""

    def call(
        self,
        layer: keras.layers.Layer,
        fn: Callable[..., Any],
        seeds: list[keras.Variable],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        """Returns `fn(*args, **kwargs)`, which the backward pass computes again.

        The second time it draws the random numbers of the first; `seeds` are the states of the
        layer's random streams.
        """
        ...


def rematerialize(model: keras.Model, mode: str) -> None:
    """Chooses what the backward pass computes again. Call it before the first step.

    Args:
        model: with layers called block_0, block_1, ...
        mode: "none"; "block", which keeps only what goes from block to block; "attention" or "mlp",
            which keep what goes into that part of each block, and nothing inside it.

    Raises:
        InputError: for another mode.
    """
    if mode not in MODES:
        raise InputError(f"remat is {mode!r}; choose {', '.join(MODES)}")
    for layer in keras_internals.sublayers(model):
        if layer.name.startswith("block_"):
            keras_internals.set_rematerialized(layer, mode == "block")
        elif layer.name in PARTS and "/block_" in f"/{layer.path}":
            keras_internals.set_rematerialized(layer, mode == layer.name)


def wrap(layer: keras.Layer, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, a layer's call, such that in training its backward pass starts from its inputs."""
    engine = backend_module("kmodels.layers.remat", RematBackend)
    seeds = _seeds(layer)

    def call(*args: object, **kwargs: object) -> Any:
        context = keras_internals.current_call_context()
        # A layer that does the same in training has no such argument.
        training = kwargs["training"] if "training" in kwargs else context.get_value("training")
        if not training:
            return fn(*args, **kwargs)

        def again(*args: object, **kwargs: object) -> Any:
            with keras_internals.call_context(context):
                return fn(*args, **kwargs)

        return engine.call(layer, again, seeds, args, kwargs)

    return call


def _seeds(layer: keras.Layer) -> list[Any]:
    """States of the random streams below a layer, which every call moves on."""
    weights = {id(variable) for variable in layer.weights}
    return [variable for variable in layer.variables if id(variable) not in weights]


def tensors_apart(args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], Callable[..., Any]]:
    """Returns the tensors in arguments, and a function of other tensors that gives (args, kwargs).

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
