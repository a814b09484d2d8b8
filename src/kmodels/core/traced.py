"""Tells whether code that was traced from a model is still valid.

A compiled step is what Python did while it was traced. Adapters that are put on, merged or disabled
since, quantized kernels, frozen variables and `generic_only` are not in it. Whatever keeps compiled
code therefore keeps the `TracedState` in which it was traced, and compares it before each call.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import keras

from kmodels.core import dispatch, keras_internals

log = logging.getLogger("kmodels")


class TracedBackend(Protocol):
    """A backend that runs a step without Python once it is traced."""

    def tracing(self) -> bool:
        """Returns whether a function is being traced just now."""
        ...


# It is None where Python runs each step, as on torch: `torch.compile` looks at attributes itself.
_steps = dispatch.backend_module("kmodels.core.traced", TracedBackend, optional=True)
_changes = 0
# Maps a model to the state in which each of Keras' functions was made.
_made: WeakKeyDictionary[Any, dict[str, "TracedState"]] = WeakKeyDictionary()
# Models of users in whose steps layers of kmodels ran; Keras makes their functions.
_around: WeakSet[Any] = WeakSet()


class TracedState:
    """The state that traced code depends on; equal where one trace serves both.

    It holds every variable and whether it is trained, what layers have as `variant` (adapters,
    quantized kernels), copies of variables, policies of dtypes, and the ops that are generic. It
    keeps nothing alive.

    Args:
        *models: built.
    """

    __slots__ = ("_hash", "_held", "_values")

    def __init__(self, *models: keras.Layer):
        held: list[Any] = []
        values: list[Any] = [dispatch.generic_now()]
        for model in models:
            variables = model.variables
            held += variables
            values.append((model.trainable, *(variable.trainable for variable in variables)))
            for layer in keras_internals.sublayers(model):
                values.append(layer.dtype_policy.name)
                for part in (*getattr(layer, "variant", ()), getattr(layer, "copies", None)):
                    values.append(part is None)
                    held += [] if part is None else [part]
        self._values = tuple(values)
        self._hash = hash((self._values, tuple(map(id, held))))
        self._held = [ref(part) for part in held]

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
    """The state of models in a loop: a number is compared in each step, and little else.

    A change of what is trained may go unseen.

    Args:
        models: built.
        changed: called where a layer's `variant` is another one.
    """

    def __init__(self, models: Sequence[keras.Layer], changed: Callable[[], None]):
        self._models = models
        self._changed = changed
        self._seen: Any = _changes, dispatch.generic_now()
        self._state = TracedState(*models)

    def state(self) -> TracedState:
        """Returns the state now."""
        if self._seen != (now := (_changes, dispatch.generic_now())):
            self._changed()
            self._seen, self._state = now, TracedState(*self._models)
        return self._state


def follow(model: keras.Model, name: str) -> None:
    """Drops a compiled function of a model if the model has changed since it was made.

    Args:
        model: built.
        name: "train_function", "test_function" or "predict_function".
    """
    if _steps is None:
        return
    state = TracedState(model)
    made = _made.setdefault(model, {})
    # Only the requested function is made: `fit` may be running, and evaluate in between.
    if made.get(name) != state:
        made[name] = state
        setattr(model, name, None)


def tracing() -> bool:
    """Returns True if a function is being traced just now, so that arrays have no values."""
    return _steps is not None and _steps.tracing()


def changes() -> int:
    """Returns a number that is another one after each change of a layer's `variant`."""
    return _changes


def changed() -> None:
    """Call it where a layer's `variant` changes."""
    global _changes
    _changes += 1
    # A change while a step is traced is a part of that step.
    if not _around or tracing():
        return
    for model in list(_around):
        _begin_optimizer_anew(model)
        for kind in ("train", "test", "predict") if _steps is not None else ():
            if getattr(model, f"{kind}_function", None) is not None:
                # Made, not traced yet; and never None, as `fit` may be running.
                getattr(model, f"make_{kind}_function")(force=True)


def _begin_optimizer_anew(model: keras.Model) -> None:
    """Has the optimizer of a user's model built again if that trains what it has no slots for."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return
    held = {id(variable) for variable in keras_internals.built_for(optimizer)}
    if all(id(variable) in held for variable in model.trainable_variables):
        return
    # There is no warning: a caller that compiles next has done all that it could ask for.
    log.warning(
        "%s has slots for other variables than %s trains now: they, and its count of steps, begin "
        "again, as after compile",
        optimizer.name,
        model.name,
    )
    keras_internals.unbuild(optimizer, restart=True)


class Noted(keras.layers.Layer if TYPE_CHECKING else object):
    """First base of the first layer of a model, so that users' models around it are known."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Keras' call."""
        if _steps is None:  # else layers note it, once per trace
            _note()
        return super().__call__(*args, **kwargs)


def note() -> None:
    """A layer with a `variant` calls it, so that a user's model around it notices changes."""
    if _steps is not None:
        _note()


def _note() -> None:
    model = getattr(keras_internals.current_call_context(), "entry_layer", None)
    # A model that calls `follow` needs no more.
    if isinstance(model, keras.Model) and not getattr(model, "follows_changes", False):
        _around.add(model)
