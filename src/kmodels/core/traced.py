"""Tests whether code that was traced from a model is still valid.

A compiled step repeats the calls that Python made while it was traced. Adapters that were added,
merged or disabled later, quantized kernels, frozen variables, `generic_only` and later bodies of
`kmodels.override` are not in it. So whoever keeps compiled code keeps the `TracedState` of its
trace, and compares it before each call.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

import keras

from kmodels.core import dispatch, keras_internals, runtime

log = logging.getLogger("kmodels")


# On torch Python runs each step, and `torch.compile` looks at attributes itself.
_RUNS_TRACED = runtime.native.runs_traced()
_changes = 0
# Maps a model to the state in which each of Keras' functions was made.
_made: WeakKeyDictionary[Any, dict[str, "TracedState"]] = WeakKeyDictionary()
# Models of users in whose steps layers of kmodels ran; Keras makes their functions.
_around: WeakSet[Any] = WeakSet()


class TracedState:
    """The state that traced code depends on; equal states can share one trace.

    It consists of the variables and their `trainable`, the `variant` of layers (adapters, quantized
    kernels), copies of variables, dtype policies, and the paths of ops. It keeps no variable alive.

    Args:
        *models: built models.
    """

    __slots__ = ("_hash", "_held", "_values")

    def __init__(self, *models: keras.Layer):
        parts: list[Any] = []
        values: list[Any] = [dispatch.paths_now()]
        for model in models:
            variables = model.variables
            parts += variables
            values.append((model.trainable, *(variable.trainable for variable in variables)))
            for layer in keras_internals.sublayers(model):
                values.append(layer.dtype_policy.name)
                for part in (*getattr(layer, "variant", ()), getattr(layer, "copies", None)):
                    values.append(part is None)
                    parts += [] if part is None else [part]
        self._values = tuple(values)
        self._hash = hash((self._values, tuple(map(id, parts))))
        self._held = [ref(part) for part in parts]

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TracedState) or self._hash != other._hash:
            return False
        # An id may have been given away again, so what is gone is equal to nothing.
        return self._values == other._values and all(
            mine() is not None and mine() is theirs()
            for mine, theirs in zip(self._held, other._held, strict=True)
        )


class Watch:
    """The state of models in a loop; in most steps only a number is compared.

    A change of `trainable` alone is not noticed.

    Args:
        models: built models.
        changed: called if the `variant` of a layer has changed.
    """

    def __init__(self, models: Sequence[keras.Layer], changed: Callable[[], None]):
        self._models = models
        self._changed = changed
        self._seen: Any = _changes, dispatch.paths_now()
        self._state = TracedState(*models)

    def state(self) -> TracedState:
        """Returns the current state."""
        if self._seen != (now := (_changes, dispatch.paths_now())):
            self._changed()
            self._seen, self._state = now, TracedState(*self._models)
        return self._state


def follow(model: keras.Model, name: str) -> None:
    """Drops a compiled function of a model if the model has changed since it was made.

    Args:
        model: built.
        name: "train_function", "test_function" or "predict_function".
    """
    if not _RUNS_TRACED:
        return
    state = TracedState(model)
    made = _made.setdefault(model, {})
    # Only the requested function is made: `fit` may be running, and evaluate in between.
    if made.get(name) != state:
        made[name] = state
        setattr(model, name, None)


def changes() -> int:
    """Returns the number of changes of a layer's `variant` so far."""
    return _changes


def changed() -> None:
    """Counts a change of a layer's `variant`; the layer calls it."""
    global _changes
    _changes += 1
    # A change while a step is traced is a part of that step.
    if not _around or runtime.native.tracing():
        return
    for model in list(_around):
        _begin_optimizer_anew(model)
        for kind in ("train", "test", "predict") if _RUNS_TRACED else ():
            if getattr(model, f"{kind}_function", None) is not None:
                # Made, not traced yet; and never None, as `fit` may be running.
                getattr(model, f"make_{kind}_function")(force=True)


def _begin_optimizer_anew(model: keras.Model) -> None:
    """Builds the optimizer of a user's model again if it lacks slots for a trained variable."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return
    built = {id(variable) for variable in keras_internals.built_for(optimizer)}
    if all(id(variable) in built for variable in model.trainable_variables):
        return
    # There is no warning: a caller that compiles next has done all that it could ask for.
    log.warning(
        "%s has slots for other variables than %s trains now: they, and its count of steps, begin "
        "again, as after compile",
        optimizer.name,
        model.name,
    )
    keras_internals.unbuild(optimizer, restart=True)


class Variant:
    """Attribute of a layer that traced code depends on; setting it counts as a change.

    The value is in the attribute of the same name with an underscore.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        return self if layer is None else getattr(layer, self._name)

    def __set__(self, layer: Any, value: object) -> None:
        setattr(layer, self._name, value)
        changed()


class Noted(keras.layers.Layer if TYPE_CHECKING else object):
    """First base of the first layer of a model, which notes a user's model around it."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Calls the layer."""
        if not _RUNS_TRACED:  # else layers note it, once per trace
            _note()
        return super().__call__(*args, **kwargs)


def note() -> None:
    """Notes a user's model around a layer with a `variant`; the layer calls it in each call."""
    if _RUNS_TRACED:
        _note()


def _note() -> None:
    model = getattr(keras_internals.current_call_context(), "entry_layer", None)
    # A model that calls `follow` needs no more.
    if isinstance(model, keras.Model) and not getattr(model, "follows_changes", False):
        _around.add(model)
