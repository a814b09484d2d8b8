"""Layers: their sublayers, their calls, and other variables for built ones."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.variables import get_autocast_scope
from keras.src.layers.layer import CallContext


def children(layer: keras.Layer) -> list[Any]:
    """Returns the layers that are parts of a layer, without theirs."""
    return list(layer._layers)


def made_trainable(layer: keras.Layer) -> list[Any]:
    """Returns a layer's own variables that were made to be trained, frozen or not."""
    return list(layer._trainable_variables)


def own_variables(layer: keras.Layer) -> list[Any]:
    """Returns a layer's own variables in the order in which Keras writes them to a file."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def set_trainable(layer: keras.Layer, trainable: bool) -> None:
    """Sets a layer's own flag; its variables, and the layers below it, stay as they are."""
    layer._trainable = trainable


def sublayers(layer: keras.Layer) -> list[Any]:
    """Returns the layer itself and all below it, in no order to rely on."""
    return list(layer._flatten_layers())


def has_mask(mask: Any) -> bool:
    """Returns whether Keras passes a mask: of inputs by name it passes their names with None."""
    return mask is not None and any(part is not None for part in keras.tree.flatten(mask))


@contextmanager
def changing(layer: keras.Layer) -> Iterator[None]:
    """Lets a built layer take new variables and seeds inside the block."""
    locked = layer._tracker.locked
    layer._tracker.unlock()
    try:
        yield
    finally:
        if locked:
            layer._tracker.lock()


def attach(layer: keras.Layer, variables: Iterable[Any]) -> None:
    """Makes variables that exist part of a layer."""
    with changing(layer):
        for variable in variables:
            layer._track_variable(variable)


def detach(layer: keras.Layer, variables: Iterable[Any]) -> None:
    """Takes variables out of a layer; they keep their values."""
    for variable in variables:
        layer._untrack_variable(variable)


def keep_keywords(layer: keras.Layer) -> None:
    """Has Keras leave the arguments of a layer's calls as they are, see `converted`."""
    layer._convert_input_args = False


def converted(layer: keras.Layer, args: tuple) -> tuple:
    """Returns arguments as Keras converts them for a layer: tensors in the dtype of its inputs."""
    policy = layer.dtype_policy
    return tuple(policy.convert_input(x, layer.autocast, layer.input_dtype) for x in args)


_CONTEXT = "current_call_ctx"


@contextmanager
def call_context(context: object) -> Iterator[None]:
    """Lets layers see this context inside the block, and with it whether they are in training."""
    before = global_state.get_global_attribute(_CONTEXT)
    global_state.set_global_attribute(_CONTEXT, context)
    try:
        yield
    finally:
        global_state.set_global_attribute(_CONTEXT, before)


def current_call_context() -> Any:
    """Returns the context of the call that is running, or None."""
    return global_state.get_global_attribute(_CONTEXT)


class entering:
    """Opens the context of a call for a model that no layer is calling, as Keras does.

    Args:
        model: the model that is called.
    """

    def __init__(self, model: keras.Model):
        self.context = CallContext(model)

    def __enter__(self) -> CallContext:
        global_state.set_global_attribute(_CONTEXT, self.context)
        return self.context

    def __exit__(self, *_: object) -> None:
        global_state.set_global_attribute(_CONTEXT, None)


def losses_of(layer: keras.Layer) -> list[Any]:
    """Returns the list in which a layer keeps what `add_loss` took; it stays the same list."""
    return layer._losses


# What `needs_keras_call` looks at.
CALL_ATTRIBUTES = (
    "built",
    "autocast",
    "activity_regularizer",
    "_remat_mode",
    "_input_spec",
    "_dtype_policy",
)


def needs_keras_call(layer: keras.Layer) -> str | None:
    """Returns what `keras.layers.Layer.__call__` has to do for this layer (a clause), or None.

    It is about the layer alone: its arguments, and the dtype in which it reads its variables, are
    looked at elsewhere.
    """
    if not layer.built:
        return "Keras builds it"
    if layer._remat_mode:
        return "it is rematerialized"
    if layer.activity_regularizer is not None:
        return "it has an activity regularizer"
    if layer._input_spec is not None:
        return "it has an input spec"
    if layer.quantization_mode is not None:
        return "its policy is quantized"
    return None


def reads_variables_as(layer: keras.Layer, compute_dtype: str) -> bool:
    """Returns whether its variables are read in its compute dtype where the program stands."""
    scope = get_autocast_scope()
    if scope is None:
        return layer.variable_dtype == compute_dtype
    return scope.dtype == compute_dtype


def set_rematerialized(layer: keras.Layer, active: bool) -> None:
    """Sets whether Keras asks `rematerialized_call` how to call this layer."""
    layer._remat_mode = active or None


def is_rematerialized(layer: keras.Layer) -> bool:
    """Returns whether `set_rematerialized`, or a scope of Keras' own, made this layer so."""
    return bool(layer._remat_mode)


def keep_part(layer: keras.Layer, name: str, value: object) -> None:
    """Lets a part of a layer be read at once, where torch would look for it last and in Python."""
    if isinstance(value, keras.Layer) and "_modules" in vars(layer):
        vars(layer)[name] = value


def forget_part(layer: keras.Layer, name: str) -> None:
    """Ends `keep_part`, for a part that is about to be replaced or deleted."""
    held = vars(layer)
    if name in held and name in held.get("_modules", ()):
        del held[name]


def forget_parameters(model: keras.Model) -> None:
    """Has a model list its parameters again on torch, so that it lets go of those it lost."""
    vars(model).get("_modules", {}).pop("_torch_params", None)


def forget_losses(layer: keras.Layer) -> None:
    """Lets go of what `add_loss` took in former calls of a layer and those below it."""
    layer._clear_losses()
