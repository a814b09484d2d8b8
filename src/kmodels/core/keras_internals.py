"""The private names of Keras that kmodels uses; no other file uses any.

`tests/numerics/core/test_keras_internals.py` has a contract test for each private name in it.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras.src import backend
from keras.src.backend.common import global_state, stateless_scope
from keras.src.backend.common.variables import AutocastScope, get_autocast_scope
from keras.src.layers.layer import CallContext
from keras.src.legacy.saving import json_utils
from keras.src.losses.loss import scale_loss_for_distribution
from keras.src.models.functional import Functional
from keras.src.models.model import inject_functional_model_class
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.saving import saving_lib, serialization_lib
from keras.src.trainers.data_adapters import data_adapter
from keras.src.utils import rng_utils

from kmodels.core.types import InitializerLike, Tensor, Tree

# === Keras' optional import of TensorFlow ===

# To write or read a config, Keras tests if an object has one of TensorFlow's types, and imports
# TensorFlow for that if it is installed: seconds, a gigabyte and lines of log in a process that
# computes with another backend. No public name turns that off. An object of a package that was not
# imported cannot exist, so the result is the same without the import.

# These modules evaluate `tf.available and isinstance(obj, tf.<type>)`, and nothing else of `tf`.
ASKING = (serialization_lib, json_utils)


class OnceImported:
    """A lazily imported module of Keras that is available only after another import of it."""

    def __init__(self, lazy: Any):
        self.lazy = lazy

    @property
    def available(self) -> bool:
        """True if the module was imported."""
        return self.lazy.name in sys.modules and self.lazy.available

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lazy, name)


def leave_unimported() -> None:
    """Keeps Keras' tests of types from importing TensorFlow, unless that is the backend."""
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
    """Returns the direct sublayers of a layer."""
    return list(layer._layers)


def made_trainable(layer: keras.Layer) -> list[Any]:
    """Returns a layer's own variables that were made trainable, even if frozen now."""
    return list(layer._trainable_variables)


def own_variables(layer: keras.Layer) -> list[Any]:
    """Returns a layer's own variables in the order in which Keras writes them to a file."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def weights_below(layer: keras.Layer) -> list[Any]:
    """Returns `layer.weights` by one flat walk, without a list for each layer."""
    weights: dict[int, Any] = {}
    waiting = [layer]
    while waiting:
        part = waiting.pop()
        for variable in (*part._trainable_variables, *part._non_trainable_variables):
            weights[id(variable)] = variable
        waiting += part._layers[::-1]
    return list(weights.values())


def has_losses(layer: keras.Layer) -> bool:
    """Returns False if `layer.losses` is empty: without `add_loss` values and regularizers."""
    if in_stateless_scope():
        return True
    return any(
        part._losses or any(v.regularizer is not None for v in part._trainable_variables)
        for part in layer._flatten_layers()
    )


def set_trainable(layer: keras.Layer, trainable: bool) -> None:
    """Sets a layer's own flag, but not those of its variables and sublayers."""
    layer._trainable = trainable


def sublayers(layer: keras.Layer) -> list[Any]:
    """Returns the layer and all layers below it, in an undefined order."""
    return list(layer._flatten_layers())


def has_mask(mask: Any) -> bool:
    """Returns True if a mask is given: for inputs by name Keras passes their names with None."""
    return mask is not None and any(part is not None for part in keras.tree.flatten(mask))


@contextmanager
def changing(layer: keras.Layer) -> Iterator[None]:
    """Allows a built layer new variables and seeds in the block."""
    locked = layer._tracker.locked
    layer._tracker.unlock()
    try:
        yield
    finally:
        if locked:
            layer._tracker.lock()


def attach(layer: keras.Layer, variables: Iterable[Any]) -> None:
    """Adds existing variables to a layer."""
    with changing(layer):
        for variable in variables:
            layer._track_variable(variable)


def detach(layer: keras.Layer, variables: Iterable[Any]) -> None:
    """Removes variables from a layer; they keep their values."""
    for variable in variables:
        layer._untrack_variable(variable)
        # A framework that tracks attributes itself would keep what an attribute was before.
        tracked = getattr(layer, "_unconditional_dependency_names", {})
        for name in [name for name, part in tracked.items() if part is variable]:
            layer._delete_tracking(name)


def keep_keywords(layer: keras.Layer) -> None:
    """Keeps Keras from converting the arguments of a layer's calls, see `converted`."""
    layer._convert_input_args = False


def converted(layer: keras.Layer, args: tuple) -> tuple:
    """Returns arguments as Keras converts them for a layer: tensors in the dtype of its inputs."""
    policy = layer.dtype_policy
    return tuple(policy.convert_input(x, layer.autocast, layer.input_dtype) for x in args)


_CONTEXT = "current_call_ctx"


class call_context:
    """Sets the context of layers' calls in the block, which says if they are in training."""

    def __init__(self, context: Any):
        self.context = context

    def __enter__(self) -> Any:
        self.former = global_state.get_global_attribute(_CONTEXT)
        global_state.set_global_attribute(_CONTEXT, self.context)
        return self.context

    def __exit__(self, *_: object) -> None:
        global_state.set_global_attribute(_CONTEXT, self.former)


def entering(model: keras.Model) -> call_context:
    """Opens the context of a call of a model that no layer is calling, as Keras does."""
    return call_context(CallContext(model))


def current_call_context() -> Any:
    """Returns the context of the running call, or None."""
    return global_state.get_global_attribute(_CONTEXT)


def losses_of(layer: keras.Layer) -> list[Any]:
    """Returns the list of a layer's `add_loss` calls, always the same list object."""
    return layer._losses


# Attributes that `needs_keras_call` reads.
CALL_ATTRIBUTES = (
    "built",
    "autocast",
    "activity_regularizer",
    "_remat_mode",
    "_input_spec",
    "_dtype_policy",
)


def needs_keras_call(layer: keras.Layer) -> str | None:
    """Returns why a layer needs `keras.layers.Layer.__call__` (a clause), or None.

    Only the layer is tested, not its arguments, nor the dtype in which it reads its variables.
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
    """Returns True if a layer's variables are read in its compute dtype at this point."""
    scope = get_autocast_scope()
    if scope is None:
        return layer.variable_dtype == compute_dtype
    return scope.dtype == compute_dtype


def set_rematerialized(layer: keras.Layer, active: bool) -> None:
    """Sets if Keras calls this layer through `rematerialized_call`."""
    layer._remat_mode = active or None


def is_rematerialized(layer: keras.Layer) -> bool:
    """Returns True if `set_rematerialized`, or Keras' own scope, was applied to this layer."""
    return bool(layer._remat_mode)


def keep_part(layer: keras.Layer, name: str, value: object) -> None:
    """Speeds up reading a part of a layer, which torch looks up last and in Python."""
    if isinstance(value, keras.Layer) and "_modules" in vars(layer):
        vars(layer)[name] = value


def forget_part(layer: keras.Layer, name: str) -> None:
    """Undoes `keep_part` before a part is replaced or deleted."""
    attributes = vars(layer)
    if name in attributes and name in attributes.get("_modules", ()):
        del attributes[name]


def forget_parameters(model: keras.Model) -> None:
    """Rebuilds a model's list of parameters on torch, without parameters that were removed."""
    vars(model).get("_modules", {}).pop("_torch_params", None)


def forget_losses(layer: keras.Layer) -> None:
    """Clears the `add_loss` values of earlier calls of a layer and those below it."""
    layer._clear_losses()


# === The graph of a functional model ===


def symbolic_calls(layer: "keras.Layer") -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Returns keyword arguments and outputs of each call of a layer that is part of a graph."""
    for node in layer._inbound_nodes:
        yield node.arguments.kwargs, node.outputs


class ClonedAs:
    """A functional model that can change the graph which `keras.models.clone_model` makes.

    Keras does not read the config of a functional model, but walks its graph with new layers. The
    result is a plain functional model.
    """

    def clone_graph(self, inputs: Tree, clone: Callable[..., Any], call: Callable[..., Any]) -> Any:
        """Returns the outputs of the clone for inputs in the structure of the model's own.

        `clone` returns the new layer of a layer; `call(layer, *args, **kwargs)` may add others.
        """
        return super()._run_through_graph(inputs, operation_fn=clone, call_fn=call)  # type: ignore[misc]

    def _run_through_graph(self, inputs: Tree, *args: Any, **kwargs: Any) -> Any:
        if kwargs.keys() != {"operation_fn", "call_fn"}:  # Only `clone_model` names both.
            return super()._run_through_graph(inputs, *args, **kwargs)  # type: ignore[misc]
        call = kwargs["call_fn"] or (lambda layer, *args, **kwargs: layer(*args, **kwargs))
        return self.clone_graph(inputs, kwargs["operation_fn"], call)


def make_functional(cls: "type[keras.Model]") -> None:
    """Makes a class of models functional, once.

    Keras does so with the first model of the class, and fails if the class of this model inherits
    from it in two ways.
    """
    if Functional not in cls.__mro__:
        inject_functional_model_class(cls)


def through_graph(
    model: "keras.Model", inputs: Tree, clone: Callable[..., Any], call: Callable[..., Any]
) -> Any:
    """Runs the graph of a model with other layers, see `ClonedAs.clone_graph`."""
    return model._run_through_graph(inputs, operation_fn=clone, call_fn=call)


def standardized(model: "keras.Model", inputs: Tree) -> list[Any]:
    """Returns inputs as tensors of the dtype and rank of a functional model's inputs."""
    return model._standardize_inputs(inputs)


def give_shape(tensor: "keras.KerasTensor", shape: Sequence[int | None]) -> None:
    """Sets the shape of a KerasTensor, in all graphs that it is part of."""
    tensor._shape = tuple(shape)


def warn_of_inputs(model: "keras.Model", inputs: Tree) -> None:
    """Issues Keras' warning if the structure of inputs differs from the model's graph."""
    model._maybe_warn_inputs_struct_mismatch(inputs)


# === Variables: their first values, the dtype in which they are read, and where they lie ===

_UNINITIALIZED = "uninitialized_variables"


@contextmanager
def without_values() -> Iterator[list[Any]]:
    """Models built in this block have shapes, paths and layers, but no values.

    Keras would initialize such variables when the next such block ends, so they are removed from
    its list. The yielded list holds them after the block, for `give_value` and `draw_values`.
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
    """Returns False for a variable made in `without_values` that has no value yet."""
    return variable._value is not None


def give_value(variable: keras.Variable, value: Tensor) -> None:
    """Sets the first value of a variable: a tensor of its shape and dtype."""
    variable._initialize(value)
    variable._initializer = None


def begin_with(variable: keras.Variable, initializer: Any) -> None:
    """Sets the initializer of a variable, and applies it at once if the variable has a value."""
    if has_value(variable):
        variable.assign(initializer(tuple(variable.shape), variable.dtype))
    else:
        variable._initializer = initializer


def draw_values(variables: Iterable[Any]) -> None:
    """Initializes each variable that has no value yet.

    Over a mesh on JAX Keras would compile a program with the values of a large variable as
    constants. With initializers that draw on the host, those with `values`, each device gets its
    part instead.
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
    """Returns the distribution's function that places arrays of the host, or None."""
    return getattr(keras.distribution.distribution(), "place", None)


def in_stateless_scope() -> bool:
    """Returns True if variables are read from and written to a `keras.StatelessScope`."""
    return stateless_scope.in_stateless_scope()


def draws_later() -> bool:
    """Returns True if variables are made `without_values` and drawn by `draw_values`."""
    return _place() is not None and not in_stateless_scope()


class _Reading(threading.local):
    """A thread's flag: after `read_stored` no scope changes the values of variables."""

    def __init__(self):
        self.stored = False  # not on the class: see `kmodels.core.dispatch._Settled`


_reading = _Reading()


def value_of(variable: keras.Variable, cast: bool = True) -> Any:
    """Returns a variable's value, directly if no scope would change it.

    Keras tests for scopes, devices and symbolic tensors first, which takes as long as a small
    matrix product. With `cast` the value has the dtype of the layer's autocast, else its own.
    """
    if type(variable) is keras.Variable and (
        _reading.stored or _gives_stored(variable._dtype if cast else None)
    ):
        stored = variable._value
        return variable.value if stored is None else stored
    if cast:
        return variable.value
    with no_autocast():
        return variable.value


def _gives_stored(dtype: str | None) -> bool:
    """Returns True if no open scope changes the value of a variable.

    `dtype` is the variable's, or any name that is not a dtype for all variables; None without
    autocast.
    """
    # The scopes of this thread; Keras' own look-up takes several times as long.
    scopes = vars(global_state.GLOBAL_STATE_TRACKER)
    if scopes.get("stateless_scope") is not None or scopes.get("torch_device") is not None:
        return False
    scope = None if dtype is None else scopes.get("autocast_scope")
    return scope is None or scope.dtype is None or scope.dtype == dtype


def read_stored() -> bool:
    """Makes `value_of` skip the tests for scopes, if none is open; returns True if it does.

    It holds in this thread until `read_through_scopes`; no scope may be opened before.
    """
    _reading.stored = _gives_stored("every")
    return _reading.stored


def read_through_scopes() -> None:
    """Undoes `read_stored`."""
    _reading.stored = False


def no_autocast() -> AutocastScope:
    """Returns a block in which variables have their own dtype."""
    return AutocastScope(None)


def autocast(policy: keras.DTypePolicy) -> AutocastScope:
    """Returns a block in which variables are read in the compute dtype, as in a layer's call."""
    # Also if it is float32: under AutocastScope(None) a variable's `dtype` is float32.
    return AutocastScope(policy.compute_dtype)


def autocasts(variable: keras.Variable) -> bool:
    """Returns True if a layer reads this variable in its compute dtype."""
    return variable._autocast


def layout_of(variable: keras.Variable) -> Any:
    """Returns the layout that `keras.distribution` gave a variable, or None."""
    return getattr(variable, "_layout", None)


def change_class(variable: keras.Variable, kind: type) -> None:
    """Changes the class of a variable to a subclass of `keras.Variable`, in place.

    Layers and optimizers make their variables themselves and hold them by identity, so a variable
    that should read or assign values differently cannot be replaced by a new one.
    """
    variable.__class__ = kind


def let_value_go(variable: keras.Variable) -> None:
    """Removes the tensor of a variable, for a class that stores its value elsewhere."""
    vars(variable).pop("_value", None)


def first_value(variable: keras.Variable, shape: Sequence[int]) -> Any:
    """Returns the values of a shape from the initializer of a variable without a value."""
    return variable._initializer(tuple(shape), dtype=variable.dtype)


class OwnAssign(keras.Variable):
    """A variable that is assigned by `take`, which a subclass defines."""

    def take(self, value: Tensor) -> None:
        """Assigns a value of the variable's whole shape."""
        raise NotImplementedError

    @property
    def held(self) -> Any:
        """The tensor in the dtype of the variable, independent of scopes, or None."""
        return self._value

    def _direct_assign(self, value: Tensor) -> None:
        self.take(value)


class ValueElsewhere(OwnAssign):
    """A variable that reads its tensor by `found`, which a subclass defines."""

    def found(self) -> Any:
        """Returns the tensor, or None before there is one."""
        raise NotImplementedError

    def has_taken(self) -> None:
        """Notes that the variable has a value, so its initializer is not called any more."""
        self._initializer = None

    @property
    def _value(self) -> Any:  # type: ignore[override]
        return self.found()

    def _initialize(self, value: Tensor) -> None:
        self.take(value)

    def _initialize_with_initializer(self, initializer: InitializerLike) -> None:
        # On the host: a device may lack the memory for the whole value.
        with keras.device("cpu"):
            super()._initialize_with_initializer(initializer)


# === Seeds: the global seed, draws since it was set, and a change of all draws ===


class _Seed(int):
    """The seed of `set_random_seed`, with counts.

    Setting a seed again, even the same one, replaces it by a plain int and so ends the counts.
    """

    counts: Counter[str]


_counts_without_seed: Counter[str] = Counter()


def random_seed() -> int | None:
    """Returns the seed of `keras.utils.set_random_seed`, or None if none was set."""
    seed = rng_utils.get_random_seed()
    return None if seed is None else int(seed)


def count_since_seed(what: str) -> int:
    """Returns the number of earlier calls with `what` since the seed was set.

    If no seed was set, it counts from the start of the process.
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
    """Returns the state variable of Keras' global seed generator; None before its first use."""
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


_next_of_keras: list[Any] = []


def change_draws(change: Callable[[Any], Any] | None) -> None:
    """Passes the state of every draw of a `keras.random.SeedGenerator` through a function.

    The state is (2,) integers; None restores the method. It is replaced for the whole process:
    layers of Keras and of users make generators at any time, and Keras has no hook for draws. The
    state cannot be changed instead: it is saved and compared like weights.
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


# === Conversion of numbers and arrays to tensors ===

# Keras 3.16 moves the functions of a backend from `backend.core` to `backend.ops.core`.
CORE: Any = getattr(backend, "ops", backend).core
# The change in force, Keras' own function, and its replacement.
_in_force: list[tuple[Callable[..., Any], Any, Any]] = []


def change_conversion(change: Callable[..., Any] | None) -> None:
    """Puts a function in front of the backend's `convert_to_tensor`; None takes it away.

    It gets Keras' function, the value and the dtype or None, and returns a tensor, or None to leave
    the conversion to Keras. That is replaced for the whole process and in each module that imported
    it: layers, losses, metrics and optimizers use it by many names, and it has no hook.
    """
    if _in_force:
        former, original, changed = _in_force[0]
        if former is change:
            return
        _in_force.clear()
        _replace(changed, original)
    if change is None:
        return
    original = CORE.convert_to_tensor

    def changed(x: object, dtype: object = None, *args: object, **kwargs: object) -> Any:
        made = change(original, x, dtype)
        return original(x, dtype, *args, **kwargs) if made is None else made

    _replace(original, changed)
    _in_force.append((change, original, changed))


def device() -> Any:
    """Returns the device on which Keras puts tensors in this thread, if the backend has one."""
    return CORE.get_device()


def _replace(old: object, new: object) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("keras.src") and vars(module).get("convert_to_tensor") is old:
            module.convert_to_tensor = new  # type: ignore[attr-defined]


# === The arrays of a .weights.h5 file, without the file ===


def saved_arrays(model: keras.Model) -> dict[str, Any]:
    """Returns the values that Keras would write to a .weights.h5 file by path, mostly variables."""
    names = _Names()
    saving_lib._save_state(model, names, None, "", set())
    return names.found


class _Names(saving_lib.H5IOStore):
    """A store that collects the values that Keras writes."""

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


# === Slots, counts and accumulated gradients of an optimizer ===

# Lists of an optimizer that are not slots: all its variables, and the weights.
_NO_SLOTS = ("_variables", "_trainable_variables")


def built_for(optimizer: "keras.Optimizer") -> list[Any]:
    """Returns the variables that an optimizer has slots for."""
    return list(optimizer._trainable_variables)


def variable_index(optimizer: "keras.Optimizer", variable: "keras.Variable") -> int:
    """Returns the index of a variable in `built_for`."""
    return optimizer._get_variable_index(variable)


def slot_lists(optimizer: "keras.Optimizer") -> Iterator[tuple[str, list[Any]]]:
    """Yields attribute name and list of each kind of slot of a built optimizer.

    The lists have the order of `built_for`; their names differ between classes.
    """
    count = len(optimizer._trainable_variables)
    for attribute, slots in vars(optimizer).items():
        if isinstance(slots, list | tuple) and len(slots) == count and attribute not in _NO_SLOTS:
            yield attribute, list(slots)


def moving_averages(optimizer: "keras.Optimizer") -> list[tuple[Any, Any]]:
    """Returns pairs of (weight, moving average) of a built optimizer; empty without averages."""
    averages = getattr(optimizer, "_model_variables_moving_average", None)
    return list(zip(optimizer._trainable_variables, averages, strict=True)) if averages else []


def adam_slots(optimizer: "keras.Optimizer", variable: "keras.Variable") -> tuple[Any, Any, Any]:
    """Returns a variable's first, second and highest second moment in Keras' Adam.

    The last one is None without `amsgrad`.
    """
    index = optimizer._get_variable_index(variable)
    highest = optimizer._velocity_hats[index] if optimizer.amsgrad else None
    return optimizer._momentums[index], optimizer._velocities[index], highest


def accumulated_gradient(optimizer: "keras.Optimizer", variable: "keras.Variable") -> Any:
    """Returns the variable with the sum of a variable's gradients since the last update."""
    return optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]


def batches_seen(optimizer: "keras.Optimizer") -> Any:
    """Returns the count of batches; with gradient accumulation `iterations` counts updates."""
    return optimizer._iterations


def updates_next(optimizer: "keras.Optimizer") -> Any:
    """Returns True if the next batch is the last of its update, with gradient accumulation."""
    return (optimizer._iterations + 1) % optimizer.gradient_accumulation_steps == 0


def strategy_of(optimizer: "keras.Optimizer") -> Any:
    """Returns the strategy of replicas under which an optimizer was made."""
    return optimizer._distribution_strategy


def unbuild(optimizer: "keras.Optimizer", restart: bool) -> None:
    """Removes an optimizer's slots, so that `build` makes new ones; may restart its count."""
    if (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        unbuild(inner, restart)
    no_slots = {id(optimizer._iterations), id(optimizer._learning_rate)}
    for variable in list(optimizer._variables):
        if id(variable) not in no_slots:
            optimizer._tracker.untrack(variable)
    optimizer._trainable_variables_indices = {}
    optimizer.built = False
    if restart:
        optimizer._iterations.assign(0)


def remove_variable(optimizer: "keras.Optimizer", variable: "keras.Variable") -> None:
    """Removes a variable from an optimizer's own."""
    optimizer._tracker.untrack(variable)


# === Moving averages of the weights under gradient accumulation: one step for each update ===


def average_by_update(optimizer: keras.Optimizer) -> None:
    """Makes an optimizer update its moving averages only together with the weights.

    Keras updates an average at every batch, so with `gradient_accumulation_steps=k` it counts each
    state of the weights k times, and `ema_overwrite_frequency` writes it into the model between
    updates too. After this call a run equals the one with batches k times as large.
    """
    if (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        average_by_update(inner)
    if not (optimizer.use_ema and optimizer.gradient_accumulation_steps):
        return
    # Methods of the instance, since a saved model names the class.
    optimizer._update_model_variables_moving_average = MethodType(_move_average, optimizer)
    if optimizer.ema_overwrite_frequency:
        optimizer._backend_apply_gradients = MethodType(_apply_and_overwrite, optimizer)


def _move_average(optimizer: keras.Optimizer, variables: Sequence[keras.Variable]) -> None:
    momentum = optimizer.ema_momentum
    # With 1 an average stays as it is.
    optimizer.ema_momentum = keras.ops.where(updates_next(optimizer), momentum, 1.0)
    try:
        type(optimizer)._update_model_variables_moving_average(optimizer, variables)
    finally:
        optimizer.ema_momentum = momentum


def _apply_and_overwrite(
    optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Sequence[keras.Variable]
) -> None:
    frequency = optimizer.ema_overwrite_frequency
    optimizer.ema_overwrite_frequency = None
    try:
        type(optimizer)._backend_apply_gradients(optimizer, gradients, variables)
    finally:
        optimizer.ema_overwrite_frequency = frequency
    last = (optimizer.iterations + 1) % frequency == 0
    due = keras.ops.logical_and(updates_next(optimizer), last)
    for variable, average in moving_averages(optimizer):
        if average is not None:
            variable.assign(keras.ops.where(due, average.value, variable.value))


# === The first base of optimizers that change parts of Keras' steps ===

# The names under which a subclass overrides a part, and Keras' own.
_PARTS = {
    # All take gradients first; (gradients, variables) makes an update, or adds to the next one.
    "apply_all": "_backend_apply_gradients",
    "clip_all": "_clip_gradients",  # (gradients)
    "decay_all": "_apply_weight_decay",  # (variables)
    "update_all": "_backend_update_step",  # (gradients, variables, learning rate)
    "move_all": "_parallel_update_step",  # the same by the optimizer's formula, on torch
    "average_all": "_update_model_variables_moving_average",  # (variables)
    "add_gradients": "_backend_increment_gradient_accumulators",  # (gradients, sums)
    # On TensorFlow: for the replicas of (strategy, pairs of gradient and variable, learning rate),
    # and the sums over replicas of such pairs.
    "move_once": "_distributed_tf_update_step",
    "sum_replicas": "_all_reduce_sum_gradients",
}


class OwnSteps(keras.optimizers.Optimizer if TYPE_CHECKING else object):
    """An optimizer that overrides parts of Keras' step by the names in `_PARTS`.

    Keras calls the part that a subclass defines; there `super()` calls Keras' own.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def may_decay(self, variable: keras.Variable) -> bool:
        """Returns False for what `exclude_from_weight_decay` names."""
        return self._use_weight_decay(variable)

    def accumulate_all(
        self: Any, grads: list[Any], variables: Sequence[keras.Variable], is_last: bool
    ) -> None:
        """Same as `apply_all` with gradient accumulation; Keras reads `is_last` from the device."""
        sums = [accumulated_gradient(self, variable) for variable in variables]
        if is_last:
            steps = self.gradient_accumulation_steps
            grads = [(g + total) / steps for g, total in zip(grads, sums, strict=True)]
            grads = self._clip_gradients(grads)
            self._apply_weight_decay(variables)
            self._backend_update_step(grads, variables, self.learning_rate)
            self._backend_reset_gradient_accumulators()
        else:
            self._backend_increment_gradient_accumulators(grads, sums)
        if self.use_ema:
            self._update_model_variables_moving_average(self._trainable_variables)


def _override(part: str, of_keras: str) -> None:
    def called_by_keras(self: Any, *args: Any) -> Any:
        return getattr(self, part)(*args)

    def own(self: Any, *args: Any) -> Any:
        return getattr(super(OwnSteps, self), of_keras)(*args)

    setattr(OwnSteps, of_keras, called_by_keras)
    setattr(OwnSteps, part, own)


for _part, _of_keras in _PARTS.items():
    _override(_part, _of_keras)


# === The training loop: steps, losses, metrics and epochs of a model ===


def initial_epoch(model: keras.Model) -> int | None:
    """Returns the first epoch of `fit` that a callback such as BackupAndRestore has set."""
    return model._initial_epoch


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Sets the first epoch of the running `fit`; None undoes that."""
    model._initial_epoch = epoch


def symbolic_build(model: keras.Model, batch: Callable[[], Tree]) -> None:
    """Creates the metrics, losses, slots and layers that the first step of a model needs.

    `batch` returns (x, y, sample_weight), of which shapes and dtypes count; it may stay uncalled.
    """
    model._symbolic_build(
        iterator=((0, 0, [keras.tree.map_structure(_spec, batch())]) for _ in range(1))
    )


def _spec(x: Any) -> keras.KerasTensor | None:
    if x is None:
        return None
    name = keras.backend.standardize_dtype(x.dtype)
    if name.endswith("64"):
        # JAX has 32 bits unless it is told otherwise, and warns of each array that should have 64.
        tensor: Any = keras.ops.convert_to_tensor(np.zeros((), name))
        name = keras.backend.standardize_dtype(tensor.dtype)
    return keras.KerasTensor(x.shape, name)


def metrics_built(model: keras.Model) -> bool:
    """Returns True if the metrics given to `compile` have their variables."""
    if (built := getattr(model, "metrics_built", None)) is not None:
        return built
    return model._compile_metrics is None or model._compile_metrics.built


def unweighted_metrics(model: keras.Model) -> Any:
    """Returns the `metrics` given to `compile`, which ignore sample weights, or None."""
    metrics = getattr(model, "_compile_metrics", None)
    return getattr(metrics, "_user_metrics", None)


def weighted_metrics(model: keras.Model) -> Any:
    """Returns the `weighted_metrics` given to `compile`, or None."""
    metrics = getattr(model, "_compile_metrics", None)
    return getattr(metrics, "_user_weighted_metrics", None)


def part_of_loss(mean: Tensor) -> Any:
    """Returns the factor of a replica's mean in the loss: TensorFlow sums their gradients."""
    return scale_loss_for_distribution(mean)


def sync_values(model: keras.Model) -> None:
    """Writes the state of a running `fit` of Keras into the variables."""
    # Keras' steps on JAX carry the state outside of the variables during an epoch.
    if (sync := getattr(model, "jax_state_sync", None)) is not None:
        sync()


def loss_tracker(model: keras.Model) -> Any:
    """Returns the metric that averages the losses of the steps of a compiled model."""
    return model._loss_tracker


def output_losses(model: keras.Model) -> list[Any]:
    """Returns the metrics that average the loss of each of several outputs."""
    return getattr(model._compile_loss, "metrics", [])


def set_loss_tracker(model: keras.Model, tracker: keras.Metric) -> None:
    """Replaces `loss_tracker`, as `compile` does."""
    # Around Keras' __setattr__, which refuses new state on a built model.
    object.__setattr__(model, "_loss_tracker", tracker)


def build_metrics(model: keras.Model, y: Tree, y_pred: Tree) -> None:
    """Makes the variables of the metrics given to `compile`, if they have none yet."""
    metrics = model._compile_metrics
    if metrics is not None and not metrics.built:
        metrics.build(y, y_pred)


def forget_metrics(model: keras.Model) -> None:
    """Removes the metrics of a `compile`, which Keras keeps if the next one has none."""
    model._compile_metrics = None


def with_additional_losses(model: keras.Model, loss: Tensor) -> Any:
    """Returns the loss of a step plus the terms of `add_loss` and regularizers."""
    for extra in model.losses:
        loss = loss + keras.ops.cast(model._aggregate_additional_loss(extra), loss.dtype)
    return loss


def results_of(metrics: Iterable[Any]) -> dict[str, Any]:
    """Returns the results of metrics by name; a metric may have several."""
    results: dict[str, Any] = {}
    for metric in metrics:
        result = metric.result()
        results |= result if isinstance(result, dict) else {metric.name: result}
    return results


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
    """Keeps attributes of a callback that monitors a metric when it first reads that metric.

    It then chooses the direction of "better", and resets its best or changes the sign of its
    tolerance.
    """
    if (settle := getattr(callback, "_set_monitor_op", None)) is None:
        return

    def settle_and_keep() -> None:
        values = {name: getattr(callback, name) for name in attributes}
        settle()
        vars(callback).update(values)

    callback._set_monitor_op = settle_and_keep


# === The base of data that Keras' own `fit` takes as it is ===

# With the methods that Keras' trainers call on data.
DataAdapter: Any = data_adapter.DataAdapter


leave_unimported()
