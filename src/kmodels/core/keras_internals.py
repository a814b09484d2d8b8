"""The only place that looks inside Keras, for what its public interface does not give.

`tests/numerics/core/test_keras_internals.py` has a contract test for each private name in it.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import keras
import numpy as np
from keras.src import backend
from keras.src.backend.common import global_state, stateless_scope
from keras.src.backend.common.variables import AutocastScope, get_autocast_scope
from keras.src.layers.layer import CallContext
from keras.src.legacy.saving import json_utils
from keras.src.losses.loss import scale_loss_for_distribution
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.saving import saving_lib, serialization_lib
from keras.src.trainers.data_adapters import data_adapter
from keras.src.utils import rng_utils

from kmodels.core.types import InitializerLike, Tensor, Tree

# === Keras' optional import of TensorFlow, left to those who use it ===

# To write or read a config, Keras asks whether an object is one of TensorFlow's types, and imports
# TensorFlow for that question if it is installed: seconds, a gigabyte and lines of log in a process
# that computes with another backend. No public name turns that off. An object of a package that
# nobody has imported cannot exist, so the answer is the same without the import.

# They ask `tf.available and isinstance(obj, tf.<type>)`, and nothing else of it.
ASKING = (serialization_lib, json_utils)


class OnceImported:
    """A module that Keras imports lazily, as available only after somebody else imported it."""

    def __init__(self, lazy: Any):
        self.lazy = lazy

    @property
    def available(self) -> bool:
        """Whether it is imported, and can be."""
        return self.lazy.name in sys.modules and self.lazy.available

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lazy, name)


def leave_unimported() -> None:
    """Has Keras' questions about types import nothing; on Keras' own backend it stays as it is."""
    for module in ASKING:
        if module.tf.name != keras.backend.backend() and not isinstance(module.tf, OnceImported):
            module.tf = OnceImported(module.tf)


def set_random_seed(seed: int) -> None:
    """Calls `keras.utils.set_random_seed` without its import of TensorFlow."""
    lazy = rng_utils.tf
    rng_utils.tf = OnceImported(lazy)
    try:
        keras.utils.set_random_seed(seed)
    finally:
        rng_utils.tf = lazy


# === Layers: their sublayers, their calls, and other variables for built ones ===


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


# === The graph of a functional model ===


def symbolic_calls(layer: "keras.Layer") -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Returns keyword arguments and outputs of each call of a layer that is part of a graph."""
    for node in layer._inbound_nodes:
        yield node.arguments.kwargs, node.outputs


class ClonedAs:
    """A functional model that `keras.models.clone_model` makes another graph of.

    Keras asks no config of a functional model, and walks its graph with new layers instead. The
    result is a plain functional model.
    """

    def clone_graph(self, inputs: Tree, clone: Callable[..., Any], call: Callable[..., Any]) -> Any:
        """Outputs of the clone.

        Args:
            inputs: inputs of the clone, in the structure of the model's own.
            clone: gives the new layer for one of this model, always the same.
            call: `call(layer, *args, **kwargs)`, which may add others.
        """
        return super()._run_through_graph(inputs, operation_fn=clone, call_fn=call)  # type: ignore[misc]

    def _run_through_graph(self, inputs: Tree, *args: Any, **kwargs: Any) -> Any:
        if kwargs.keys() != {"operation_fn", "call_fn"}:  # Only `clone_model` names both.
            return super()._run_through_graph(inputs, *args, **kwargs)  # type: ignore[misc]
        call = kwargs["call_fn"] or (lambda layer, *args, **kwargs: layer(*args, **kwargs))
        return self.clone_graph(inputs, kwargs["operation_fn"], call)


def through_graph(
    model: "keras.Model", inputs: Tree, clone: Callable[..., Any], call: Callable[..., Any]
) -> Any:
    """Runs the graph of a model with other layers, see `ClonedAs.clone_graph`."""
    return model._run_through_graph(inputs, operation_fn=clone, call_fn=call)


def standardized(model: "keras.Model", inputs: Tree) -> list[Any]:
    """Returns the inputs of a functional model as tensors of the dtype and rank that it has."""
    return model._standardize_inputs(inputs)


def give_shape(tensor: "keras.KerasTensor", shape: Sequence[int | None]) -> None:
    """Gives a KerasTensor another shape, in all graphs that it is part of."""
    tensor._shape = tuple(shape)


def warn_of_inputs(model: "keras.Model", inputs: Tree) -> None:
    """Keras' warning that a functional model is given other inputs than its graph has."""
    model._maybe_warn_inputs_struct_mismatch(inputs)


# === Variables: their first values, the dtype in which they are read, and where they lie ===

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
    """Sets the initializer of a variable, and applies it at once if the variable has a value."""
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
    """Returns the function by which the distribution places arrays of the host, or None."""
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
    """Returns a variable's value, directly if no scope would change it.

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
    """Returns whether no open scope changes the value of a variable.

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


# === The seeds of Keras: the process's own, and how often something was drawn since it was set ===


class _Seed(int):
    """The seed of `set_random_seed`, with what was counted since.

    Setting a seed, the same one too, puts a plain int in its place, and with that ends the count.
    """

    counts: Counter[str]


_counts_without_seed: Counter[str] = Counter()


def random_seed() -> int | None:
    """Returns the seed given to `keras.utils.set_random_seed`, or None where none was."""
    seed = rng_utils.get_random_seed()
    return None if seed is None else int(seed)


def count_since_seed(what: str) -> int:
    """Returns how many times this function was called with `what` before, since the seed was set.

    Where no seed was set it counts from the beginning of the process.
    """
    seed = rng_utils.get_random_seed()
    if seed is None:
        counts = _counts_without_seed
    else:
        if not isinstance(seed, _Seed):
            seed = _Seed(seed)
            seed.counts = Counter()
            global_state.set_global_attribute(rng_utils.GLOBAL_RANDOM_SEED, seed)
        counts = seed.counts
    counts[what] += 1
    return counts[what] - 1


def global_seed() -> Any:
    """Returns the state variable of Keras' global seed generator; None before its use."""
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


_next_of_keras: list[Any] = []


def change_draws(change: Callable[[Any], Any] | None) -> None:
    """Has what every `keras.random.SeedGenerator` gives for a draw go through a function.

    The method is replaced for the whole process, since nothing narrower sees all draws. Layers of
    Keras and of users make generators of their own, at any time, and Keras one for draws without a
    seed; none of them can be given another class, and Keras calls no hook where it draws. The
    state cannot be changed instead: it is saved and compared like weights.

    Args:
        change: takes the state of a draw, (2,) integers, and returns the one to draw from; None
            gives the method back.
    """
    generator: Any = keras.random.SeedGenerator
    if _next_of_keras:
        generator.next = _next_of_keras.pop()
    if change is None:
        return
    draw = generator.next
    _next_of_keras.append(draw)

    def changed(self: Any, ordered: bool = True) -> Any:
        return change(draw(self, ordered))

    generator.next = changed


# === Puts a function in front of the one by which Keras makes tensors of numbers and arrays ===

# What was asked for, Keras' own function, and the one in its place.
_in_force: list[tuple[Callable[..., Any], Any, Any]] = []


def change_conversion(change: Callable[..., Any] | None) -> None:
    """Has what Keras' backend makes a tensor of go through a function first.

    The function is replaced for the whole process and in each module that imported it: layers,
    losses, metrics and optimizers of Keras and of users come to it by many names, and there is no
    hook in it.

    Args:
        change: takes Keras' own function, the value, and the dtype or None for the one that the
            value has, and returns a tensor, or None to have Keras make it; None gives Keras its own
            function back.
    """
    if _in_force:
        former, original, changed = _in_force[0]
        if former is change:
            return
        _in_force.clear()
        _replace(changed, original)
    if change is None:
        return
    original = backend.convert_to_tensor

    def changed(x: object, dtype: object = None, *args: object, **kwargs: object) -> Any:
        made = change(original, x, dtype)
        return original(x, dtype, *args, **kwargs) if made is None else made

    _replace(original, changed)
    _in_force.append((change, original, changed))


def device() -> Any:
    """Returns where Keras puts tensors in this thread, on the backend that has one such place."""
    return backend.core.get_device()


def _replace(old: object, new: object) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("keras.src") and vars(module).get("convert_to_tensor") is old:
            module.convert_to_tensor = new  # type: ignore[attr-defined]


# === The arrays that Keras saves of a model, without a file ===


def saved_arrays(model: keras.Model) -> dict[str, Any]:
    """Returns what Keras would write to a .weights.h5 file, mostly variables, by path."""
    names = _Names()
    saving_lib._save_state(model, names, None, "", set())
    return names.found


class _Names(saving_lib.H5IOStore):
    """Keras' file of weights without a file: it notes what it is asked to write."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: object = None) -> Any:
        return _Entry(f"{path}/vars".lstrip("/"), self.found)


class _Entry(dict):
    def __init__(self, path: str, found: dict[str, Any]):
        super().__init__()
        self._path, self._found = path, found

    def __setitem__(self, name: str, value: object) -> None:
        self._found[f"{self._path}/{name}"] = value


# === The slots of an optimizer, and what it counts and accumulates ===

# Lists of an optimizer that are not slots: all its variables, and the weights themselves.
_NO_SLOTS = ("_variables", "_trainable_variables")


def built_for(optimizer: "keras.Optimizer") -> list[Any]:
    """Returns the variables that an optimizer has slots for."""
    return list(optimizer._trainable_variables)


def variable_index(optimizer: "keras.Optimizer", variable: "keras.Variable") -> int:
    """Returns the place of a variable among those that the optimizer was built for."""
    return optimizer._get_variable_index(variable)


def slot_lists(optimizer: "keras.Optimizer") -> Iterator[tuple[str, list[Any]]]:
    """Yields attribute and list of each kind of slot of a built optimizer.

    Keras keeps slots in lists in the order of `built_for`; their names differ from class to class.
    """
    count = len(optimizer._trainable_variables)
    for attribute, held in vars(optimizer).items():
        if isinstance(held, list | tuple) and len(held) == count and attribute not in _NO_SLOTS:
            yield attribute, list(held)


def moving_averages(optimizer: "keras.Optimizer") -> list[tuple[Any, Any]]:
    """Returns each weight of a built optimizer with its moving average; empty without any."""
    held = getattr(optimizer, "_model_variables_moving_average", None)
    return list(zip(optimizer._trainable_variables, held, strict=True)) if held else []


def adam_slots(optimizer: "keras.Optimizer", variable: "keras.Variable") -> tuple[Any, Any, Any]:
    """Returns the first and second moment of a variable in Keras' Adam, and the highest second.

    The last one is None but with `amsgrad`.
    """
    index = optimizer._get_variable_index(variable)
    highest = optimizer._velocity_hats[index] if optimizer.amsgrad else None
    return optimizer._momentums[index], optimizer._velocities[index], highest


def accumulated_gradient(optimizer: "keras.Optimizer", variable: "keras.Variable") -> Any:
    """Returns the variable that holds the sum of a variable's gradients since the last update."""
    return optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]


def batches_seen(optimizer: "keras.Optimizer") -> Any:
    """Returns the count of batches; `iterations` counts updates where gradients are accumulated."""
    return optimizer._iterations


def updates_next(optimizer: "keras.Optimizer") -> Any:
    """Tells whether the next batch is the last one of its update, where gradients accumulate."""
    return (optimizer._iterations + 1) % optimizer.gradient_accumulation_steps == 0


def strategy_of(optimizer: "keras.Optimizer") -> Any:
    """Returns the strategy of replicas under which an optimizer was made."""
    return optimizer._distribution_strategy


def unbuild(optimizer: "keras.Optimizer", restart: bool) -> None:
    """Takes an optimizer's slots away, so that `build` makes others.

    Args:
        optimizer: built; with one inside, as under "mixed_float16", that one, too.
        restart: begins the count of steps again.
    """
    if (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        unbuild(inner, restart)
    kept = {id(optimizer._iterations), id(optimizer._learning_rate)}
    for variable in list(optimizer._variables):
        if id(variable) not in kept:
            optimizer._tracker.untrack(variable)
    optimizer._trainable_variables_indices = {}
    optimizer.built = False
    if restart:
        optimizer._iterations.assign(0)


# === Moving averages of the weights under gradient accumulation: one step for each update ===


def average_by_update(optimizer: keras.Optimizer) -> None:
    """Has an optimizer move its averages of the weights where it moves the weights.

    Keras moves an average at every batch, so with `gradient_accumulation_steps=k` it counts each
    state of the weights k times, and `ema_overwrite_frequency` writes it into the model between
    updates too. Its documentation says that an optimizer's variables change only where the weights
    do. After this call they do, and a run equals the one with batches k times as large.

    Args:
        optimizer: an optimizer of any class; one that does not accumulate, or keeps no average,
            stays as it is.
    """
    if (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        average_by_update(inner)
    if not (optimizer.use_ema and optimizer.gradient_accumulation_steps):
        return
    # Methods of the instance, since its class names what a saved model is loaded with.
    optimizer._update_model_variables_moving_average = MethodType(_move_average, optimizer)
    if optimizer.ema_overwrite_frequency:
        optimizer._backend_apply_gradients = MethodType(_apply_and_overwrite, optimizer)


def _move_average(optimizer: keras.Optimizer, variables: Sequence[keras.Variable]) -> None:
    given = optimizer.ema_momentum
    # With 1 an average stays as it is.
    optimizer.ema_momentum = keras.ops.where(updates_next(optimizer), given, 1.0)
    try:
        type(optimizer)._update_model_variables_moving_average(optimizer, variables)
    finally:
        optimizer.ema_momentum = given


def _apply_and_overwrite(
    optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Sequence[keras.Variable]
) -> None:
    given = optimizer.ema_overwrite_frequency
    optimizer.ema_overwrite_frequency = None
    try:
        type(optimizer)._backend_apply_gradients(optimizer, gradients, variables)
    finally:
        optimizer.ema_overwrite_frequency = given
    due = keras.ops.logical_and(updates_next(optimizer), (optimizer.iterations + 1) % given == 0)
    for variable, average in moving_averages(optimizer):
        if average is not None:
            variable.assign(keras.ops.where(due, average.value, variable.value))


# === First bases of optimizers that take part in the steps of Keras' own ===

# A method of a base does what Keras does there, and is called where Keras would do it: a subclass
# overrides it and calls `super()`.


class OwnDecay(keras.optimizers.Optimizer):
    """An optimizer that decays the weights in its own step; Keras' decay before it does nothing."""

    def _apply_weight_decay(self, variables: Sequence[keras.Variable]) -> None:
        """Does nothing: each step decays with the variable's own learning rate."""


class ParallelSteps:
    """The parts of a step over all variables at once, on the backend that has one."""

    def apply_all(self: Any, grads: list[Any], variables: Sequence[keras.Variable]) -> None:
        """Moves all variables by clipped gradients, with accumulation and averages."""
        super()._backend_apply_gradients(grads, variables)  # type: ignore[misc]

    def clip_all(self: Any, grads: list[Any]) -> Any:
        """Returns the gradients clipped as `clipnorm`, `global_clipnorm` or `clipvalue` says."""
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def move_all(
        self: Any, grads: list[Any], variables: Sequence[keras.Variable], learning_rate: Tensor
    ) -> None:
        """Moves variables by the optimizer's formula."""
        super()._parallel_update_step(grads, variables, learning_rate)  # type: ignore[misc]

    def average_all(self: Any, variables: Sequence[keras.Variable]) -> None:
        """Moves the averages of the weights towards the weights."""
        super()._update_model_variables_moving_average(variables)  # type: ignore[misc]

    def _backend_apply_gradients(
        self, grads: list[Any], trainable_variables: Sequence[keras.Variable]
    ) -> None:
        self.apply_all(grads, trainable_variables)

    def _clip_gradients(self, grads: list[Any]) -> Any:
        return self.clip_all(grads)

    def _parallel_update_step(
        self, grads: list[Any], variables: Sequence[keras.Variable], learning_rate: Tensor
    ) -> None:
        self.move_all(grads, variables, learning_rate)

    def _update_model_variables_moving_average(
        self, trainable_variables: Sequence[keras.Variable]
    ) -> None:
        self.average_all(trainable_variables)


class ReplicatedSteps:
    """The parts of a step in which replicas wait for each other, on the backend that has them."""

    def move_replicas(
        self: Any, grads: list[Any], variables: Sequence[keras.Variable], learning_rate: Tensor
    ) -> None:
        """Moves variables, as one of the replicas."""
        super()._backend_update_step(grads, variables, learning_rate)  # type: ignore[misc]

    def move_once(
        self: Any,
        strategy: object,
        pairs: Iterable[tuple[Any, keras.Variable]],
        learning_rate: Tensor,
    ) -> None:
        """Moves variables, for all replicas of a strategy; pairs of (gradient, variable)."""
        self._distributed_tf_update_step(strategy, pairs, learning_rate)

    def add_gradients(self: Any, grads: list[Any], sums: list[Any]) -> None:
        """Adds the gradients of a batch to what is accumulated."""
        super()._backend_increment_gradient_accumulators(grads, sums)  # type: ignore[misc]

    def sum_replicas(self: Any, pairs: Iterable[tuple[Any, keras.Variable]]) -> Any:
        """Returns pairs of (gradient, variable) with the sums over the replicas."""
        return super()._all_reduce_sum_gradients(pairs)  # type: ignore[misc]

    def _backend_update_step(
        self, grads: list[Any], trainable_variables: Sequence[keras.Variable], learning_rate: Tensor
    ) -> None:
        self.move_replicas(grads, trainable_variables, learning_rate)

    def _backend_increment_gradient_accumulators(
        self, grads: list[Any], acc_grads: list[Any]
    ) -> None:
        self.add_gradients(grads, acc_grads)

    def _all_reduce_sum_gradients(
        self, grads_and_vars: Iterable[tuple[Any, keras.Variable]]
    ) -> Any:
        return self.sum_replicas(grads_and_vars)


# === The training loop: steps, losses, metrics and epochs of a model ===


def initial_epoch(model: keras.Model) -> int | None:
    """Returns the epoch that a callback, as Keras' BackupAndRestore, had `fit` begin with."""
    return model._initial_epoch


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Makes the `fit` that is beginning start at this epoch; None takes that back."""
    model._initial_epoch = epoch


def symbolic_build(model: keras.Model, batch: Callable[[], Tree]) -> None:
    """Creates the metrics, losses, slots and layers that the first step of a model needs.

    Args:
        model: compiled.
        batch: returns (x, y, sample_weight), or arrays of the host; called only for shapes and
            dtypes that are needed.
    """
    model._symbolic_build(iterator=((0, 0, [_specs(batch())]) for _ in range(1)))


def _specs(batch: Tree) -> Any:
    return keras.tree.map_structure(lambda x: None if x is None else _spec(x), batch)


def _spec(x: Any) -> keras.KerasTensor:
    name = keras.backend.standardize_dtype(x.dtype)
    if name.endswith("64"):
        # JAX has 32 bits unless it is told otherwise, and warns of each array that should have 64.
        held: Any = keras.ops.convert_to_tensor(np.zeros((), name))
        name = keras.backend.standardize_dtype(held.dtype)
    return keras.KerasTensor(x.shape, name)


def metrics_built(model: keras.Model) -> bool:
    """Returns whether the metrics given to `compile` have their variables."""
    if (built := getattr(model, "metrics_built", None)) is not None:
        return built
    return model._compile_metrics is None or model._compile_metrics.built


def unweighted_metrics(model: keras.Model) -> Any:
    """Returns the `metrics` given to `compile`, which ignore sample weights, or None."""
    given = getattr(model, "_compile_metrics", None)
    return getattr(given, "_user_metrics", None)


def weighted_metrics(model: keras.Model) -> Any:
    """Returns the `weighted_metrics` given to `compile`, or None."""
    given = getattr(model, "_compile_metrics", None)
    return getattr(given, "_user_weighted_metrics", None)


def part_of_loss(mean: Tensor) -> Any:
    """Returns the factor of a replica's mean in the loss: TensorFlow sums their gradients."""
    return scale_loss_for_distribution(mean)


def sync_values(model: keras.Model) -> None:
    """Puts what a running `fit` has computed into the variables, where Keras holds it elsewhere."""
    # Keras' steps on JAX carry the state outside of the variables during an epoch.
    if (sync := getattr(model, "jax_state_sync", None)) is not None:
        sync()


def loss_tracker(model: keras.Model) -> Any:
    """Returns the metric that averages the losses of the steps of a compiled model."""
    return model._loss_tracker


def set_loss_tracker(model: keras.Model, tracker: keras.Metric) -> None:
    """Puts another metric in the place of `loss_tracker`, as `compile` does."""
    # Around Keras' __setattr__, which refuses new state on a built model.
    object.__setattr__(model, "_loss_tracker", tracker)


def build_metrics(model: keras.Model, y: Tree, y_pred: Tree) -> None:
    """Makes the variables of the metrics given to `compile`, where they have none yet."""
    held = model._compile_metrics
    if held is not None and not held.built:
        held.build(y, y_pred)


def forget_metrics(model: keras.Model) -> None:
    """Lets go of the metrics of a `compile`, which Keras keeps where the next one has none."""
    model._compile_metrics = None


def additional_losses(model: keras.Model) -> list[Any]:
    """Returns what `add_loss` and regularizers add to the loss of a step, a scalar each."""
    return [model._aggregate_additional_loss(loss) for loss in model.losses]


def predictions(model: keras.Model, x: Tree, training: bool) -> Any:
    """Returns the outputs of a step; `training` goes to a `call` that has such an argument."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def loss_of(
    model: keras.Model, x: Tree, y: Tree, y_pred: Tree, sample_weight: Tree, training: bool
) -> Any:
    """Returns `compute_loss` of a batch, a scalar; a subclass may define it without `training`."""
    return model._compute_loss(x, y, y_pred, sample_weight, training)


# === The best value of a callback that monitors a metric ===


def preserve_monitor(callback: keras.callbacks.Callback, attributes: Iterable[str]) -> None:
    """Keeps what a callback that watches a number has found, when it first looks at that number.

    It settles then what "better" means, and starts its best again or turns the sign of its
    tolerance.
    """
    if (settle := getattr(callback, "_set_monitor_op", None)) is None:
        return

    def settle_and_keep() -> None:
        kept = {name: getattr(callback, name) for name in attributes}
        settle()
        vars(callback).update(kept)

    callback._set_monitor_op = settle_and_keep


# === The base of data that Keras' own `fit` takes as it is ===

# With the methods that Keras' trainers call on data.
DataAdapter: Any = data_adapter.DataAdapter


leave_unimported()
