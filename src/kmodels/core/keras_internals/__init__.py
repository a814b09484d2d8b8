"""The only place that looks inside Keras, for what its public interface does not give."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import StatelessScope, in_stateless_scope
from keras.src.backend.common.variables import AutocastScope
from keras.src.callbacks.callback_list import CallbackList
from keras.src.losses.loss import scale_loss_for_distribution
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.saving import saving_lib
from keras.src.trainers.data_adapters import data_adapter_utils, get_data_adapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter as PyDatasetAdapter
from keras.src.utils import rng_utils

_CONTEXT = "current_call_ctx"
_CALLBACK_LIST: Any = CallbackList
_UNINITIALIZED = "uninitialized_variables"


class _Seed(int):
    """The seed of `set_random_seed`, with what was counted since.

    Setting a seed, the same one too, puts a plain int in its place, and with that ends the count.
    """

    counts: Counter[str]


_counts_without_seed: Counter[str] = Counter()


def random_seed() -> int | None:
    """The seed given to `keras.utils.set_random_seed`, or None where none was."""
    seed = rng_utils.get_random_seed()
    return None if seed is None else int(seed)


def count_since_seed(what: str) -> int:
    """How many times this function was called with `what` before, since the seed was set.

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


def saved_arrays(model: Any) -> dict[str, Any]:
    """What Keras would write of a model to a .weights.h5 file, by path there; mostly variables."""
    names = _Names()
    saving_lib._save_state(model, names, None, "", set())
    return names.found


class _Names(saving_lib.H5IOStore):
    """Keras' file of weights without a file: it notes what it is asked to write."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> Any:
        return _Entry(f"{path}/vars".lstrip("/"), self.found)


class _Entry(dict):
    def __init__(self, path: str, found: dict[str, Any]):
        super().__init__()
        self._path, self._found = path, found

    def __setitem__(self, name: str, value: Any) -> None:
        self._found[f"{self._path}/{name}"] = value


def children(layer: Any) -> list[Any]:
    """The layers that are parts of a layer, without theirs."""
    return list(layer._layers)


def made_trainable(layer: Any) -> list[Any]:
    """A layer's own variables that were made to be trained, frozen or not."""
    return list(layer._trainable_variables)


def set_trainable(layer: Any, trainable: bool) -> None:
    """Sets a layer's own flag; its variables, and the layers below it, stay as they are."""
    layer._trainable = trainable


def sublayers(layer: Any) -> list[Any]:
    """The layer itself and all below it, in no order to rely on."""
    return list(layer._flatten_layers())


def symbolic_calls(layer: Any) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Keyword arguments and outputs of each call of a layer that is part of a graph."""
    for node in layer._inbound_nodes:
        yield node.arguments.kwargs, node.outputs


class ClonedAs:
    """A functional model that `keras.models.clone_model` makes another graph of.

    Keras asks no config of a functional model, and walks its graph with new layers instead. What
    it makes is a plain functional model.
    """

    def clone_graph(self, inputs: Any, clone: Any, call: Any) -> Any:
        """Outputs of the clone.

        Args:
            inputs: of the clone, in the structure of the model's own.
            clone: gives the new layer for one of this model, always the same.
            call: `call(layer, *args, **kwargs)`, which may add others.
        """
        return super()._run_through_graph(inputs, operation_fn=clone, call_fn=call)  # type: ignore[misc]

    def _run_through_graph(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.keys() != {"operation_fn", "call_fn"}:  # None but `clone_model` names both.
            return super()._run_through_graph(inputs, *args, **kwargs)  # type: ignore[misc]
        call = kwargs["call_fn"] or (lambda layer, *args, **kwargs: layer(*args, **kwargs))
        return self.clone_graph(inputs, kwargs["operation_fn"], call)


def through_graph(model: Any, inputs: Any, clone: Any, call: Any) -> Any:
    """Runs the graph of a model with other layers, see `ClonedAs.clone_graph`."""
    return model._run_through_graph(inputs, operation_fn=clone, call_fn=call)


def give_shape(tensor: Any, shape: Sequence[int | None]) -> None:
    """Gives a KerasTensor another shape, in all graphs that it is part of."""
    tensor._shape = tuple(shape)


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
        with StatelessScope(initialize_variables=False):
            yield made
    finally:
        made += global_state.get_global_attribute(_UNINITIALIZED, [])[len(waiting) :]
        global_state.set_global_attribute(_UNINITIALIZED, waiting)


def has_value(variable: Any) -> bool:
    """False for a variable made in `without_values` that has got none since."""
    return variable._value is not None


def give_value(variable: Any, value: Any) -> None:
    """Sets the first value of a variable that has none: a tensor of its shape and dtype."""
    variable._initialize(value)
    variable._initializer = None


def draw_values(variables: Iterable[Any]) -> None:
    """Lets each variable that has no value yet draw it.

    Over a mesh on JAX Keras would compile a program that holds the numbers of a large variable as
    constants. There initializers that draw on the host, those with `values`, give each device its
    part.
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
    """What the distribution in force does with arrays of the host; None where it does nothing."""
    return getattr(keras.distribution.distribution(), "place", None)


def draws_later() -> bool:
    """Whether a new variable is better made `without_values`, and drawn by `draw_values`."""
    return _place() is not None and not in_stateless_scope()


@contextmanager
def changing(layer: Any) -> Iterator[None]:
    """Inside the block a built layer takes new variables and seeds."""
    locked = layer._tracker.locked
    layer._tracker.unlock()
    try:
        yield
    finally:
        if locked:
            layer._tracker.lock()


def attach(layer: Any, variables: Iterable[Any]) -> None:
    """Makes variables that exist part of a layer."""
    with changing(layer):
        for variable in variables:
            layer._track_variable(variable)


def detach(layer: Any, variables: Iterable[Any]) -> None:
    """Takes variables out of a layer; they keep their values."""
    for variable in variables:
        layer._untrack_variable(variable)


@contextmanager
def call_context(context: Any) -> Iterator[None]:
    """Inside the block layers see this context, and with it whether they are in training."""
    before = global_state.get_global_attribute(_CONTEXT)
    global_state.set_global_attribute(_CONTEXT, context)
    try:
        yield
    finally:
        global_state.set_global_attribute(_CONTEXT, before)


def current_call_context() -> Any:
    """The context of the call that is running, or None."""
    return global_state.get_global_attribute(_CONTEXT)


def set_rematerialized(layer: Any, active: bool) -> None:
    """Whether Keras asks `rematerialized_call` how to call this layer."""
    layer._remat_mode = active or None


def is_rematerialized(layer: Any) -> bool:
    """Whether `set_rematerialized`, or a scope of Keras' own, made this layer so."""
    return bool(layer._remat_mode)


def no_autocast() -> AutocastScope:
    """A block in which variables have their own dtype."""
    return AutocastScope(None)


def autocast(policy: Any) -> AutocastScope:
    """Variables are read in the policy's compute dtype inside the block, as in a layer's call."""
    # Named where it changes nothing too: under AutocastScope(None) a variable's `dtype` is float32.
    return AutocastScope(policy.compute_dtype)


def global_seed() -> Any:
    """The state variable of the seed that Keras takes where none is given; None before its use."""
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


def fit_callbacks(callback: Any) -> tuple[list[Any], CodeType | None]:
    """The callbacks that the running `fit` calls, and the code of that `fit`.

    Call it inside a hook of the callback. Keras tells a callback its model, never the list that it
    is in, so the list is looked up on the stack.
    """
    if (frame := _frame_of_hook(callback)) is None:
        return [callback], None
    fit = frame.f_back
    return list(frame.f_locals["self"].callbacks), None if fit is None else fit.f_code


def _frame_of_hook(callback: Any) -> FrameType | None:
    """Where Keras' list of callbacks calls this one."""
    frame = sys._getframe(2)
    while frame is not None:
        owner: Any = frame.f_locals.get("self")
        if isinstance(owner, _CALLBACK_LIST) and callback in owner.callbacks:
            return frame
        frame = frame.f_back
    return None


def preserve_monitor(callback: Any, attributes: Iterable[str]) -> None:
    """Keeps what a callback that watches a number has found, when it first looks at that number.

    It settles then what "better" means, and starts its best anew or turns the sign of its
    tolerance.
    """
    if (settle := getattr(callback, "_set_monitor_op", None)) is None:
        return

    def settle_and_keep() -> None:
        kept = {name: getattr(callback, name) for name in attributes}
        settle()
        vars(callback).update(kept)

    callback._set_monitor_op = settle_and_keep


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Makes the `fit` that is beginning start at this epoch; None takes that back."""
    model._initial_epoch = epoch


def data_adapter(x: Any, **settings: Any) -> DataAdapter:
    """What Keras makes of data that it knows; the settings are those of `fit`."""
    return get_data_adapter(x, **settings)


def set_epoch(adapter: Any, epoch: int) -> None:
    """Tells what `data_adapter` gave which epoch comes next.

    Since 3.16 Keras shuffles arrays and the batches of a PyDataset by a count of its own, which
    would begin anew where a run is resumed. Before, it took random generators, and no count.
    """
    if hasattr(adapter, "_epoch"):
        adapter._epoch = epoch + 1  # Keras has counted one when the first begins.


def set_epoch_of_fit(callback: Any, epoch: int) -> None:
    """`set_epoch` for the data of the running `fit`, before its first epoch.

    Call it inside a hook of the callback.
    """
    frame = _frame_of_hook(callback)
    fit = None if frame is None else frame.f_back
    iterator = None if fit is None else fit.f_locals.get("epoch_iterator")
    set_epoch(getattr(iterator, "data_adapter", None), epoch)


def side_by_side(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """So many batches stacked, for Keras' steps of several batches on JAX since 3.16."""
    return data_adapter_utils.super_batch_iterator(batches, count, stack_fn=keras.ops.stack)


def warn_of_inputs(model: Any, inputs: Any) -> None:
    """Keras' warning that a functional model is given other inputs than its graph has."""
    model._maybe_warn_inputs_struct_mismatch(inputs)


def step_output(model: Any) -> Any:
    """An array that the last step of a running `fit` gives, on JAX; None where there is none."""
    state = getattr(model, "_jax_state", None) or {}
    parts = (state.get(f"{name}_variables") for name in ("metrics", "optimizer", "trainable"))
    return next((part[-1] for part in parts if part), None)


def forget_step(model: Any) -> None:
    """Lets go of what a step outside of `fit` left, which Keras would write back on JAX."""
    if getattr(model, "_jax_state", None) is not None:
        model._jax_state = None


def symbolic_build(model: Any, batch: Any) -> None:
    """Makes the variables of metrics and losses, which TensorFlow does in the first step."""
    model._symbolic_build(data_batch=batch)


@contextmanager
def keeping_values(model: Any) -> Iterator[None]:
    """Gives variables their values back where `fit`, `evaluate` or `predict` fails.

    On JAX Keras takes the values from the variables while steps run, and a failing first step would
    leave the model without any. Holding them costs nothing: a step donates what it replaces.
    """
    if not hasattr(model, "jax_state_sync"):
        yield
        return
    held = [(v, v._value) for v in (*model.variables, *model.metrics_variables)]
    try:
        yield
    except BaseException:
        model.jax_state_sync()
        model._jax_state = None
        for variable, value in held:
            if variable._value is None and not getattr(value, "is_deleted", bool)():
                variable._value = value
        raise


def metrics_built(model: Any) -> bool:
    """Whether the metrics given to `compile` have their variables."""
    if (built := getattr(model, "metrics_built", None)) is not None:
        return built
    return model._compile_metrics is None or model._compile_metrics.built


def built_for(optimizer: Any) -> list[Any]:
    """The variables that an optimizer has slots for."""
    return list(optimizer._trainable_variables)


def unbuild(optimizer: Any, restart: bool) -> None:
    """Takes an optimizer's slots away, so that `build` makes others.

    Args:
        optimizer: built; with one inside, as under "mixed_float16", that one, too.
        restart: begins the count of steps anew.
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


def forget_parameters(model: Any) -> None:
    """Has a model list its parameters anew on torch, so that it lets go of those it lost."""
    vars(model).get("_modules", {}).pop("_torch_params", None)


def unweighted_metrics(model: Any) -> Any:
    """The `metrics` given to `compile`, which count rows whatever they weigh; None without."""
    given = getattr(model, "_compile_metrics", None)
    return getattr(given, "_user_metrics", None)


def part_of_loss(mean: Any) -> Any:
    """What a replica's mean counts in the loss: on TensorFlow their gradients are summed."""
    return scale_loss_for_distribution(mean)


def forget_losses(layer: Any) -> None:
    """Lets go of what `add_loss` took in former calls of a layer and those below it."""
    layer._clear_losses()
