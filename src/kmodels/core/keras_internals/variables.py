"""Variables: their first values, the dtype in which they are read, and where they lie."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.backend.common import global_state, stateless_scope
from keras.src.backend.common.variables import AutocastScope

from kmodels.core.types import InitializerLike, Tensor

_UNINITIALIZED = "uninitialized_variables"


@contextmanager
def without_values() -> Iterator[list[Any]]:
    """Models built in this block have shapes, paths and layers; no numbers are allocated.

    Keras would give what it calls uninitialized variables their values when the next such block
    ends, so they are taken off its list. The list that is given here holds them when the block is
    over, for `give_value` and `draw_values`.
    """
    waiting = list(global_state.get_global_attribute(_UNINITIALIZED, [], set_to_default=True))
    made: list[Any] = []
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield made
    finally:
        made += global_state.get_global_attribute(_UNINITIALIZED, [])[len(waiting) :]
        global_state.set_global_attribute(_UNINITIALIZED, waiting)


def has_value(variable: keras.Variable) -> bool:
    """Returns False for a variable made in `without_values` that has got none since."""
    return variable._value is not None


def give_value(variable: keras.Variable, value: Tensor) -> None:
    """Sets the first value of a variable that has none: a tensor of its shape and dtype."""
    variable._initialize(value)
    variable._initializer = None


def begin_with(variable: keras.Variable, initializer: Any) -> None:
    """Gives a variable a first value of its own: now, or when it is drawn."""
    if has_value(variable):
        variable.assign(initializer(tuple(variable.shape), variable.dtype))
    else:
        variable._initializer = initializer


def draw_values(variables: Iterable[Any]) -> None:
    """Lets each variable that has no value yet draw it.

    Over a mesh on JAX Keras would compile a program that holds the numbers of a large variable as
    constants. Initializers that draw on the host, those with `values`, give each device its part
    there.
    """
    place = _place()
    for variable in variables:
        if has_value(variable):
            continue
        values = getattr(variable._initializer, "values", None)
        if place is not None and values is not None:
            give_value(variable, place(variable, values(tuple(variable.shape), variable.dtype)))
        else:
            variable._deferred_initialize()


def _place() -> Any:
    """Returns what the distribution does with arrays of the host, or None for nothing."""
    return getattr(keras.distribution.distribution(), "place", None)


def in_stateless_scope() -> bool:
    """Tells whether variables are read from and written to a `keras.StatelessScope`."""
    return stateless_scope.in_stateless_scope()


def draws_later() -> bool:
    """Returns whether variables are made `without_values` and drawn by `draw_values`."""
    return _place() is not None and not in_stateless_scope()


class _Reading(threading.local):
    """A thread's flag: after `read_stored` no scope has a say about variables."""

    stored = False


_reading = _Reading()


def value_of(variable: keras.Variable, cast: bool = True) -> Any:
    """Returns a variable's value, at once where Keras would give what is stored.

    Keras looks for scopes, devices and symbolic tensors first, which takes as long as a small
    product.

    Args:
        variable: the variable.
        cast: gives the value in the dtype of the layer's autocast; False for its own.
    """
    if type(variable) is keras.Variable and (
        _reading.stored or _gives_stored(variable._dtype if cast else None)
    ):
        held = variable._value
        return variable.value if held is None else held
    if cast:
        return variable.value
    with no_autocast():
        return variable.value


def _gives_stored(dtype: str | None) -> bool:
    """Returns whether the scopes that are open let a variable's value be what it holds.

    `dtype` is the variable's, or any name that is no dtype for all of them; None where no autocast
    is asked for.
    """
    # What holds in this thread; Keras' own look-up takes several times as long.
    scopes = vars(global_state.GLOBAL_STATE_TRACKER)
    if scopes.get("stateless_scope") is not None or scopes.get("torch_device") is not None:
        return False
    scope = None if dtype is None else scopes.get("autocast_scope")
    return scope is None or scope.dtype is None or scope.dtype == dtype


def read_stored() -> bool:
    """Has `value_of` look for scopes no more, if there are none; returns whether it does so.

    It holds in this thread until `read_through_scopes`; no scope may open before.
    """
    _reading.stored = _gives_stored("every")
    return _reading.stored


def read_through_scopes() -> None:
    """Ends `read_stored`."""
    _reading.stored = False


def no_autocast() -> AutocastScope:
    """Returns a block in which variables have their own dtype."""
    return AutocastScope(None)


def autocast(policy: keras.DTypePolicy) -> AutocastScope:
    """Returns a block in which variables are read in the compute dtype, as in a layer's call."""
    # Named where it changes nothing too: under AutocastScope(None) a variable's `dtype` is float32.
    return AutocastScope(policy.compute_dtype)


def autocasts(variable: keras.Variable) -> bool:
    """Tells whether a layer reads this variable in its compute dtype."""
    return variable._autocast


def layout_of(variable: keras.Variable) -> Any:
    """Returns the layout that `keras.distribution` gave a variable, or None."""
    return getattr(variable, "_layout", None)


def change_class(variable: keras.Variable, kind: type) -> None:
    """Makes a variable one of a subclass of `keras.Variable`, in place.

    Layers and optimizers make their variables themselves and hold them by identity, so one that is
    to read or take values another way cannot be replaced by a new one.
    """
    variable.__class__ = kind


def let_value_go(variable: keras.Variable) -> None:
    """Takes the tensor out of a variable, for a class that finds its value elsewhere."""
    vars(variable).pop("_value", None)


def first_value(variable: keras.Variable, shape: Sequence[int]) -> Any:
    """Returns what the initializer of a variable without a value gives for a shape."""
    return variable._initializer(tuple(shape), dtype=variable.dtype)


class OwnAssign(keras.Variable):
    """A variable that takes values by `take`, which a subclass defines."""

    def take(self, value: Tensor) -> None:
        """Takes a value of the variable's whole shape."""
        raise NotImplementedError

    @property
    def held(self) -> Any:
        """The tensor in the dtype of the variable, whatever scope is in force; None without one."""
        return self._value

    def _direct_assign(self, value: Tensor) -> None:
        self.take(value)


class ValueElsewhere(OwnAssign):
    """A variable whose tensor a subclass finds by `found`, whenever it is read."""

    def found(self) -> Any:
        """Returns the tensor, or None as long as there is none."""
        raise NotImplementedError

    def has_taken(self) -> None:
        """Notes that the variable has a value, so that its initializer is not asked any more."""
        self._initializer = None

    @property
    def _value(self) -> Any:  # type: ignore[override]
        return self.found()

    def _initialize(self, value: Tensor) -> None:
        self.take(value)

    def _initialize_with_initializer(self, initializer: InitializerLike) -> None:
        # The whole is drawn on the host: a device may not have the room.
        with keras.device("cpu"):
            super()._initialize_with_initializer(initializer)
