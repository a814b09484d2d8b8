"""The state of a run: its variables, and everything else that it needs to continue.

Variables are read into host memory by name, compared with a checkpoint, and filled from it.
`RunState` is the rest: the position in the data, random generators, learning rates, the attributes
of the other callbacks, and the settings by which a run is recognized.
"""

import copy
import hashlib
import importlib.metadata
import math
import platform
import random
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import keras
import numpy as np

from kmodels.checkpoint import format
from kmodels.checkpoint.format import Arrays, as_counted, from_first
from kmodels.core import keras_internals, processes
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError
from kmodels.core.processes import all_or_raise
from kmodels.core.schema import NUMBER, Shape
from kmodels.data.pipeline import prefetch
from kmodels.weights import gather
from kmodels.weights.files import Start
from kmodels.weights.gather import values as host_values
from kmodels.weights.tensors import LazyArray

# Keras numbers seed generators by how many the process has made.
_NUMBERED_SEED = re.compile(r"\bseed_generator_\d+")
_SHOWN = 8


class CheckpointError(InputError):
    """A checkpoint is damaged, or belongs to another model."""


class StateBackend(Protocol):
    """Variables that are sharded over processes, and random generators, on one backend."""

    def is_placed(self, variable: keras.Variable) -> bool:
        """Returns True if a process holds only a part of the values."""
        ...

    def parts(self, variable: keras.Variable) -> Iterator[tuple[Start, np.ndarray]]:
        """Yields the start index and a host copy of each part that this process writes.

        A part that several processes hold is written by one of them.
        """
        ...

    def read(self, variable: keras.Variable, array: LazyArray) -> Any:
        """Reads the parts of a tensor in a file that this process holds into host memory."""
        ...

    def put(self, variable: keras.Variable, values: Any) -> None:
        """Assigns the result of `read`."""
        ...

    def generators(self) -> Arrays:
        """Returns the states of random generators besides those of Keras, by name."""
        ...

    def restore_generators(self, states: Mapping[str, np.ndarray]) -> None:
        """Restores the generators of `generators` that are among these states."""
        ...


_native = backend_module("kmodels.checkpoint.state", StateBackend, optional=True)


def sharded(variable: keras.Variable) -> StateBackend | None:
    """Returns the backend's functions for a variable that is sharded over processes, else None."""
    if processes.count() > 1 and _native is not None and _native.is_placed(variable):
        return _native
    return None


def named(variables: Iterable[Any]) -> dict[str, Any]:
    """Returns variables by path; a second of the same path gets `#1`, in order of creation."""
    by_path: dict[str, Any] = {}
    for variable in variables:
        by_path[unique(_NUMBERED_SEED.sub("seed_generator", variable.path), by_path)] = variable
    return by_path


def frozen(model: keras.Model) -> dict[str, Any]:
    """Returns the weights that training does not change, by path."""
    moved = {id(variable) for variable in model.trainable_variables}
    return named(variable for variable in model.weights if id(variable) not in moved)


def built_optimizer(model: keras.Model) -> Any:
    """Returns the optimizer of a model, with its slots.

    Raises:
        InputError: if the model is not compiled.
    """
    if (optimizer := getattr(model, "optimizer", None)) is None:
        raise InputError(f"{model!r} has no optimizer; give a compiled model")
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return optimizer


def parts(model: keras.Model, only_trainable: bool) -> dict[str, dict[str, Any]]:
    """Returns the variables of each file of a checkpoint; builds the optimizer if needed.

    Args:
        model: compiled.
        only_trainable: leaves the frozen weights out.

    Returns:
        "model", with the states of seeds; "optimizer"; "metrics".
    """
    optimizer = built_optimizer(model)
    if (parallel := getattr(model, "parallel", None)) is not None:
        parallel.settle()
    weights = named(model.variables)
    if only_trainable:
        left_out = {id(variable) for variable in frozen(model).values()}
        weights = {
            name: variable for name, variable in weights.items() if id(variable) not in left_out
        }
    metrics = named(model.metrics_variables)
    return {"model": weights, "optimizer": slots(optimizer), "metrics": metrics}


def copied(variables: Mapping[str, Any], part: str = "model") -> Arrays:
    """Copies the values that this process saves to host memory.

    Args:
        variables: by name.
        part: part of the checkpoint to which they belong.

    Returns:
        All values in a run of one process. In a run of several: the parts that this process holds,
        by `format.part_name`; its own values of variables that differ between processes; and all
        other variables on rank zero only.
    """
    arrays: Arrays = {}
    for name, variable in variables.items():
        # Running averages and accumulated gradients are of the rows of their process.
        differs = part == "metrics" or "gradient_accumulator" in variable.path
        if (backend := sharded(variable)) is not None:
            arrays |= {format.part_name(name, at): part for at, part in backend.parts(variable)}
        elif differs or processes.is_rank_zero():
            arrays[format.here(name) if differs else name] = np.array(host_values(variable))
    return arrays


def whole(variables: Mapping[str, Any]) -> Arrays:
    """Copies all values to host memory; all processes gather variables that lie in parts."""
    return {name: np.array(host_values(variable)) for name, variable in variables.items()}


def digest(variables: Mapping[str, Any]) -> str:
    """sha256 over path, dtype, shape and bytes, in the order of the paths."""
    hasher = hashlib.sha256()
    for path, variable in sorted(variables.items()):
        values = host_values(variable)
        hasher.update(f"{path} {values.dtype} {values.shape}\n".encode())
        hasher.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def base_digest(model: keras.Model) -> str:
    """Returns the `digest` of the frozen weights, with layers counted from the first."""
    return digest(from_first(frozen(model)))


def weights_digest(model: keras.Model) -> str:
    """sha256 over path, dtype, shape and bytes of all weights, in the order of the paths."""
    return digest(named(model.weights))


def check_finite(arrays: Mapping[str, np.ndarray]) -> None:
    """Raises `InputError` for a value that is not finite."""
    for name, values in arrays.items():
        if not _is_finite(values):
            raise InputError(
                f"{name} is not finite, so this state is not saved; lower the learning rate, or go "
                "on from the checkpoint before"
            )


def finite_averages(arrays: Arrays) -> Arrays:
    """Returns running averages, zeros if one is not finite because of a step that was skipped."""
    if all(map(_is_finite, arrays.values())):
        return arrays
    return {name: np.zeros_like(values) for name, values in arrays.items()}


def _is_finite(values: np.ndarray) -> bool:
    return values.dtype.kind not in "fV" or bool(np.isfinite(values).all())


def fill(path: Path, wanted: Mapping[str, Mapping[str, Any]]) -> None:
    """Fills variables from the files of a checkpoint, all or none.

    Args:
        path: path of the checkpoint, verified.
        wanted: variables by name, by file, such as {"model": ...}.

    Raises:
        CheckpointError: lists all misfits.
    """
    # All is read before anything is assigned, in any of the processes.
    for variable, values in all_or_raise(f"fill from {path.name}", lambda: _fitting(path, wanted)):
        if (backend := sharded(variable)) is not None:
            backend.put(variable, values)
        else:
            put(variable, values)


def _fitting(path: Path, wanted: Mapping[str, Mapping[str, Any]]) -> list[tuple[Any, Any]]:
    """Returns pairs of a variable and the values of it that this process holds."""
    arrays = {part: format.read(path, part, _counted(part, wanted[part])) for part in wanted}
    if any(arrays[part].keys() != variables.keys() for part, variables in wanted.items()):
        arrays = as_counted(arrays, wanted)
    check_fits(path, arrays, wanted)

    def read(variable: keras.Variable, array: LazyArray) -> Any:
        backend = sharded(variable)
        return array.read() if backend is None else backend.read(variable, array)

    return [
        (variable, read(variable, arrays[part][name]))
        for part, variables in wanted.items()
        for name, variable in variables.items()
    ]


def _counted(part: str, variables: Mapping[str, Any]) -> list[str]:
    """Returns the names of the averages that count the rows of this process alone."""
    return [name for name, v in variables.items() if part == "metrics" and not sharded(v)]


def check_fits(
    path: Path, stored: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Mapping[str, Any]]
) -> None:
    """Compares names, shapes and kinds of arrays.

    Args:
        path: path of the checkpoint, for the message.
        stored: arrays with shape and dtype, by part and name.
        wanted: variables by part and name.

    Raises:
        CheckpointError: lists all misfits.
    """
    wrong = [
        f"{part}: {problem}"
        for part, variables in wanted.items()
        for problem in misfits(stored[part], variables)
    ]
    if wrong:
        raise CheckpointError(f"{path} belongs to another model or optimizer: {shortened(wrong)}")


def put(variable: keras.Variable, values: np.ndarray) -> None:
    """Assigns values from the host; integers may be wider on another backend."""
    dtype = np.dtype(keras.backend.standardize_dtype(variable.dtype))
    values = np.ascontiguousarray(values, dtype=dtype)
    gather.put(variable, values.reshape(variable.shape))


def misfits(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """Yields the differences in name, shape and kind of dtype between arrays and variables."""
    for name in sorted(set(wanted) - set(stored)):
        yield f"{name} is missing"
    for name in sorted(set(stored) - set(wanted)):
        yield f"{name} is not in the model"
    for name in sorted(set(stored) & set(wanted)):
        array, variable = stored[name], wanted[name]
        if tuple(array.shape) != tuple(variable.shape):
            yield f"{name} is {tuple(array.shape)}, the model needs {tuple(variable.shape)}"
        elif _kind(array.dtype) != _kind(variable.dtype):
            yield f"{name} is {array.dtype}, the model needs {variable.dtype}"


def shortened(problems: Sequence[str]) -> str:
    """Returns the first problems in one line, and how many more there are."""
    more = f"; {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more


def _kind(dtype: np.dtype | str) -> str:
    """Returns the kind of an array; states of seeds are uint32, int32 or int64, by backend."""
    # HDF5 stores bfloat16 as two opaque bytes.
    return "f" if dtype == np.dtype("V2") else np.dtype(dtype).kind.replace("u", "i")


def slots(optimizer: keras.Optimizer) -> dict[str, Any]:
    """Returns every variable of a built optimizer by `weight's path:slot`, or by its own name.

    On torch the classes behind Keras' public names are others, and Adafactor names all of its
    variables after their weights; so a variable is identified by the list of the optimizer that
    holds it, and by its index there.

    Args:
        optimizer: of any of Keras' classes. The slots of a LossScaleOptimizer include those of its
            inner optimizer; those of several objectives are prefixed with the objective's name.

    Returns:
        For example "iteration", "block_0/mlp/up/kernel:momentum".
    """
    objectives: dict[str, Any] = getattr(optimizer, "by_player", {})
    if objectives:
        return {f"{name}/{k}": v for name, own in objectives.items() for k, v in slots(own).items()}
    inner = getattr(optimizer, "inner_optimizer", None)
    slots_by_name = {} if inner is None else slots(inner)
    inside = {id(variable) for variable in slots_by_name.values()}
    weights = keras_internals.built_for(optimizer)
    owners: dict[int, tuple[str, str]] = {}
    for attribute, variables in keras_internals.slot_lists(optimizer):
        for weight, variable in zip(weights, variables, strict=True):
            path = getattr(weight, "path", weight.name)
            owners.setdefault(id(variable), (path, attribute.strip("_")))
    own_names = {id(variable): name for name, variable in getattr(optimizer, "by_slot", {}).items()}
    for variable in optimizer.variables:
        if id(variable) in inside:
            continue
        name = own_names.get(id(variable), variable.name)
        if id(variable) in owners:
            path, attribute = owners[id(variable)]
            prefix = path.replace("/", "_") + "_"
            slot = name.removeprefix(prefix) if name.startswith(prefix) else attribute
            name = f"{path}:{slot}"
        slots_by_name[unique(name, slots_by_name)] = variable
    return slots_by_name


def averages(optimizer: keras.Optimizer) -> list[tuple[Any, Any]]:
    """Returns pairs of a weight and its moving average, if a built optimizer has averages."""
    objectives: dict[str, Any] = getattr(optimizer, "by_player", {})
    if objectives:
        return [pair for own in objectives.values() for pair in averages(own)]
    if (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        return averages(inner)
    return keras_internals.moving_averages(optimizer)


def unique(name: str, taken: Container[str]) -> str:
    """Returns the name, or the first of `name#1`, `name#2` that is free."""
    copies, free = 0, name
    while free in taken:
        copies += 1
        free = f"{name}#{copies}"
    return free


# The rest of a run


# Fields of RunState that are arrays of the part "other", and not in state.json.
_IN_ARRAYS = ("data", "rng", "callback_arrays")
_DATA, _RNG, _CALLBACKS = "data/", "random/", "callbacks/"

# The types of the values that `to_json` returns, see `RunState`.
STATE_SHAPE: Shape = {
    "format": int,
    "step": int,
    "epoch": int,
    "batch": int,
    "steps_per_epoch": int,
    "in_validation": bool,
    "logs": {"*": NUMBER},
    "log_names": [str],
    "base": {},
    "optimizer": str,
    "order": {},
    "numbers": {},
    "settings": {},
    "backend": str,
    "versions": {"*": str},
    "callbacks": {"*": {}},
    "ended": bool,
    "ahead": bool,
    "loss_normalization": str,
}


@dataclass(frozen=True)
class RunState:
    """The state of a run besides its variables: its position, RNG states, callbacks, identity.

    Args:
        step: finished batches of all epochs.
        epoch: finished epochs.
        batch: finished batches of the running epoch.
        steps_per_epoch: batches of an epoch, or None if unknown.
        in_validation: True if it was saved within the validation of the epoch.
        ended: True if a callback has ended the run.
        logs: logs of the epoch, if it has ended; None for a number that is not finite.
        log_names: names of the logs of a step.
        base: hash and origin of frozen weights that are not in the checkpoint.
        optimizer: class and name.
        order: random seed and epoch, which determine the order of the data.
        schedule: config of the learning rate schedule, or None.
        numbers: hyperparameters of model and optimizer, as the user gave them.
        settings: plain values that a resumed run must share.
        backend: name of the Keras backend.
        versions: versions of packages.
        callbacks: attributes that changed in training, by callback and name.
        ahead: True if batches were made before the steps that take them.
        loss_normalization: see `kmodels.models.GemmaCausalLM.compile`.
        data: state of the loader, in this process; None if it has none.
        rng: states of the random generators and learning rates of this process: "now", and at the
            beginning of the "epoch".
        callback_arrays: arrays that `callbacks` refers to by name.
    """

    step: int
    epoch: int = 0
    batch: int = 0
    steps_per_epoch: int | None = None
    in_validation: bool = False
    logs: Mapping[str, float | None] = field(default_factory=dict)
    log_names: tuple[str, ...] = ()
    base: Mapping[str, Any] | None = None
    optimizer: str | None = None
    order: Mapping[str, Any] = field(default_factory=dict)
    schedule: Any = None
    numbers: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    backend: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    callbacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ended: bool = False
    ahead: bool = False
    # Checkpoints from before this setting lack it.
    loss_normalization: str = "positions"
    data: Any = None
    rng: Mapping[str, Arrays] = field(default_factory=dict)
    callback_arrays: Arrays = field(default_factory=dict)

    @property
    def validated(self) -> bool:
        """Returns True if the epoch, cut or not, has ended."""
        return bool(self.logs)

    def to_json(self) -> dict[str, Any]:
        """Returns the plain values, for `state.json`."""
        names = [one.name for one in fields(self) if one.name not in _IN_ARRAYS]
        return {name: getattr(self, name) for name in names}

    def to_arrays(self) -> Arrays:
        """Returns the arrays that this process writes, for the part "other"."""
        own = {f"{_DATA}{name}": array for name, array in format.arrays_of_data(self.data).items()}
        for moment, states in self.rng.items():
            own |= {f"{_RNG}{moment}/{name}": array for name, array in states.items()}
        own = {format.here(name): array for name, array in own.items()}
        if processes.is_rank_zero():
            own |= {f"{_CALLBACKS}{name}": array for name, array in self.callback_arrays.items()}
        return own

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RunState":
        """Returns the state without its arrays; unknown names are ignored, missing ones default."""
        known = {one.name for one in fields(cls)} - set(_IN_ARRAYS)
        values = {name: value for name, value in values.items() if name in known}
        return cls(**{**values, "log_names": tuple(values.get("log_names", ()))})

    def with_arrays(self, path: Path) -> "RunState":
        """Returns the state with the arrays of this process from a checkpoint."""
        arrays = {name: array.read() for name, array in format.read(path, "other").items()}
        rng: dict[str, Arrays] = {}
        for name, values in _within(arrays, _RNG).items():
            moment, _, kind = name.partition("/")
            rng.setdefault(moment, {})[kind] = values
        data = format.data_of_arrays(_within(arrays, _DATA))
        return replace(self, data=data, rng=rng, callback_arrays=_within(arrays, _CALLBACKS))


def _within(arrays: Arrays, prefix: str) -> Arrays:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


# Random generators and learning rates
#
# Hooks of callbacks are called again when a run is resumed within an epoch. So generators and rates
# are put back to the beginning of the epoch first, and then to the moment at which it was saved.


def _generators() -> Arrays:
    """Returns the states of Python's generator, NumPy's global one, Keras' and the backend's."""
    if prefetch.running:
        prefetch.settle()
    _, words, gauss = random.getstate()
    _, key, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {
        "python": np.array(words, np.uint32),
        "python_gauss": np.array([] if gauss is None else [gauss], np.float64),
        "numpy": np.array([*key, position, has_gauss], np.uint32),
        "numpy_gauss": np.array([cached], np.float64),
    }
    if (seed := keras_internals.global_seed()) is not None:
        states["keras"] = np.array(host_values(seed))
    return states | ({} if _native is None else _native.generators())


def moment(optimizer: keras.Optimizer) -> Arrays:
    """Returns the states of random generators and the learning rates, by name."""
    return _generators() | rates(optimizer)


def restore_moment(optimizer: keras.Optimizer, states: Mapping[str, np.ndarray]) -> None:
    """Restores the state of `moment`; the generator of another backend is left out."""
    if prefetch.running:
        prefetch.settle()
    gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    *key, position, has_gauss = states["numpy"].tolist()
    cached = float(states["numpy_gauss"][0])
    np.random.set_state(("MT19937", np.array(key, np.uint32), position, has_gauss, cached))
    if "keras" in states and (seed := keras_internals.global_seed()) is not None:
        put(seed, states["keras"])
    if _native is not None:
        _native.restore_generators(states)
    restore_rates(optimizer, states)


def host_generators_are(states: Mapping[str, np.ndarray]) -> bool:
    """Returns True if the generators of Python and NumPy are as in these states."""
    now = _generators()
    names = [name for name in now if name.partition("_")[0] in ("python", "numpy")]
    return all(np.array_equal(now[name], states[name]) for name in names)


def rates(optimizer: keras.Optimizer) -> Arrays:
    """Returns the learning rates that are numbers, by slot; callbacks cannot change a schedule."""
    return whole(_rate_variables(optimizer))


def restore_rates(optimizer: keras.Optimizer, states: Mapping[str, np.ndarray]) -> None:
    """Puts back the learning rates that are among these states."""
    for name, variable in _rate_variables(optimizer).items():
        if name in states:
            put(variable, states[name])


def is_rate(name: str) -> bool:
    """Returns True for the name of a learning rate, that of one objective among several too."""
    return name.rpartition("/")[2] == "learning_rate"


def _rate_variables(optimizer: keras.Optimizer) -> dict[str, Any]:
    return {name: variable for name, variable in slots(optimizer).items() if is_rate(name)}


# What other callbacks know
#
# Keras' callbacks, such as EarlyStopping with its best value and patience, have no way to save
# their state. So it is what training changed among their plain attributes. Settings do not change,
# and those of the resumed run hold.

# By class and number: the callback, and its plain attributes before the `fit`.
Callbacks = Mapping[str, tuple[Any, Mapping[str, Any]]]


def before_fit(callbacks: Iterable[Any]) -> Callbacks:
    """Returns the callbacks of a `fit`, and how they were before it.

    Args:
        callbacks: without the one that saves them. One with a true `saves_itself` is left out.
    """
    states: dict[str, tuple[Any, Mapping[str, Any]]] = {}
    for callback in callbacks:
        # The counts of a progress bar belong to one process.
        is_bar = isinstance(callback, keras.callbacks.ProgbarLogger)
        if not is_bar and not getattr(callback, "saves_itself", False):
            kind = type(callback).__name__
            number = sum(name.startswith(f"{kind}#") for name in states)
            states[f"{kind}#{number}"] = callback, _plain(callback)
    return states


def callback_changes(callbacks: Callbacks, arrays: Arrays) -> dict[str, dict[str, Any]]:
    """Returns the attributes that changed since the `fit` began, by callback and name.

    Args:
        callbacks: of `before_fit`.
        arrays: receives the arrays among them, see `format.encode`.
    """
    return {
        name: {
            attribute: format.encode(value, arrays)
            for attribute, value in _plain(callback).items()
            if attribute not in before or not _same(before[attribute], value)
        }
        for name, (callback, before) in callbacks.items()
    }


def restore_callbacks(callbacks: Callbacks, run: RunState) -> None:
    """Restores the state of `callback_changes`; callbacks that no longer exist are left out."""
    for name, changes in run.callbacks.items():
        callback, _ = callbacks.get(name, (None, {}))
        if callback is None:
            continue
        for attribute, value in changes.items():
            setattr(callback, attribute, format.decode(value, run.callback_arrays))
        if hasattr(callback, "monitor"):
            keras_internals.preserve_monitor(callback, list(changes))


def _plain(callback: keras.callbacks.Callback) -> dict[str, Any]:
    return {
        name: copy.deepcopy(value)
        for name, value in vars(callback).items()
        if name not in ("params", "_params") and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(part) for key, part in value.items())
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "fiubV"
    return value is None or isinstance(value, bool | int | float | str | np.number)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(np.asarray(one), np.asarray(other))
    return type(one) is type(other) and one == other


# The identity of a run, and the hyperparameters of its optimizer

_SET_RATES = (keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)
# A user's own schedule need not have a config, and an optimizer of optax has none.
_NO_CONFIG = (NotImplementedError, InputError)
# Values in the config of a layer that are its own, or are compared otherwise.
_OWN = ("name", "seed", "trainable", "dtype")
_FIRST_RATES: WeakKeyDictionary[Any, dict[str, float]] = WeakKeyDictionary()


def identity(optimizer: keras.Optimizer, epoch: int) -> dict[str, Any]:
    """Returns the fields of `RunState` that are the same in all parts of one run.

    Args:
        optimizer: of the model.
        epoch: epoch that determines the order of the data.
    """
    return {
        "optimizer": _name(optimizer),
        "order": {"seed": keras_internals.random_seed(), "epoch": epoch},
        "schedule": _schedule(optimizer),
        "backend": keras.backend.backend(),
        "versions": versions(),
    }


def check_same(
    path: Path,
    run: RunState,
    optimizer: keras.Optimizer,
    settings: Mapping[str, Any],
    steps: int | None,
) -> None:
    """Compares a checkpoint with the run that is to continue from it.

    Args:
        path: path of the checkpoint.
        run: its state.
        optimizer: of the model.
        settings: settings of this run.
        steps: batches of an epoch, or None if unknown.

    Raises:
        InputError: lists all differences.
    """
    wrong = [
        f"{name} was {run.settings.get(name)!r}" + ("" if name in settings else ", and is missing")
        for name in {**settings, **run.settings}
        if run.settings.get(name) != settings.get(name)
    ]
    if run.optimizer not in (None, name := _name(optimizer)):
        wrong.append(f"the optimizer was {run.optimizer}, not {name}")
    seed, former = keras_internals.random_seed(), run.order.get("seed")
    if None not in (seed, former) and seed != former:
        wrong.append(f"the random seed was {former}")
    if None not in (steps, run.steps_per_epoch) and steps != run.steps_per_epoch:
        wrong.append(f"an epoch had {run.steps_per_epoch} batches, not {steps}")
    if wrong:
        raise InputError(
            f"{path} is of another run: {', '.join(wrong)}; give the same settings or another "
            "directory"
        )


def _name(optimizer: keras.Optimizer) -> str:
    """Class and name, without the number by which Keras counts the optimizers of a process."""
    name = re.sub(r"_\d+$", "", optimizer.name)
    own = f"{type(optimizer).__name__} {name!r}"
    inner = getattr(optimizer, "inner_optimizer", None)
    return own if inner is None else f"{own} around {_name(inner)}"


def _schedule(optimizer: keras.Optimizer) -> Any:
    try:
        # A LossScaleOptimizer has its rate from the optimizer inside.
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        rate = inner.get_config().get("learning_rate")
    except _NO_CONFIG:
        return None
    return rate if isinstance(rate, dict) else None


def given_numbers(model: keras.Model, beside: Iterable[Any] = ()) -> dict[str, Any]:
    """Returns the hyperparameters of a model and its optimizer, by names such as "beta_1".

    Args:
        model: compiled, with a built optimizer; nothing has been restored into it yet.
        beside: callbacks. If they set the learning rate, one that this process has trained with is
            theirs, so the given one is that of its first time.

    Returns:
        Plain values; for example "learning_rate.decay_steps" for a schedule's, and the set of those
        of all layers of a class as "Dropout.rate". The rates alone if the optimizer or its schedule
        has no config.
    """
    optimizer = model.optimizer
    try:
        config = dict(_flat("", optimizer.get_config()))
    except _NO_CONFIG:
        config = {}
    # Rates are read by slot below, since those of several objectives have names of their own.
    numbers = {
        name: value
        for name, value in config.items()
        if name.rpartition(".")[2] != "learning_rate" or not isinstance(value, float)
    }
    now = _rates(optimizer)
    first = _FIRST_RATES.setdefault(optimizer, now)
    numbers |= first if any(isinstance(c, _SET_RATES) for c in beside) else now
    return numbers | _of_layers(model)


def _of_layers(model: keras.Model) -> dict[str, Any]:
    """Returns the plain values in the configs of layers and losses, and the dtype policies."""
    layers = [x for x in keras_internals.sublayers(model) if not isinstance(x, keras.Model)]
    losses = keras.tree.flatten(getattr(model, "loss", None))
    values = {"loss": {getattr(x, "name", None) or getattr(x, "__name__", x) for x in losses}}
    for part in [*layers, *losses]:
        if hasattr(part, "dtype_policy"):
            values.setdefault("dtype", set()).add(part.dtype_policy.name)
        try:
            config = part.get_config()
        except Exception:  # A user's own layer need not have a config.
            continue
        for name, value in config.items():
            if name not in _OWN and isinstance(value, bool | int | float | str):
                values.setdefault(f"{type(part).__name__}.{name}", set()).add(value)
    return {name: ", ".join(sorted(map(str, every))) for name, every in values.items()}


def changed_numbers(
    run: RunState, settings: Mapping[str, Any], optimizer: keras.Optimizer
) -> dict[str, tuple[Any, Any]]:
    """Returns the former and the new value of each number that the user has changed.

    Args:
        run: state of the checkpoint.
        settings: result of `given_numbers` before the checkpoint was restored.
        optimizer: with the learning rates of the checkpoint, which callbacks may have changed.
    """
    if run.numbers is None:
        return {}
    before, current = run.numbers, _rates(optimizer)
    changed = {}
    for name in sorted({*before, *settings}):
        former, new = before.get(name), settings.get(name)
        now = current.get(name, former)
        if not _equal(former, new) and not _equal(now, new):
            changed[name] = now, new
    return changed


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the plain values of a config, nested ones by names with dots."""
    if isinstance(value, Mapping):
        if "class_name" in value and "config" in value:
            yield path, value["class_name"]
            yield from _flat(path, value["config"])
            return
        for name, part in value.items():
            if name == "inner_optimizer":  # Users know its numbers by their own names.
                yield from _flat(path, part["config"])
            elif name != "name":
                yield from _flat(f"{path}.{name}" if path else name, part)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _flat(f"{path}.{number}", part)
    elif isinstance(value, np.generic):
        yield path, value.item()
    elif value is None or isinstance(value, bool | int | float | str):
        yield path, value


def _rates(optimizer: keras.Optimizer) -> dict[str, float]:
    return {name: float(value) for name, value in rates(optimizer).items()}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        # A rate is a variable in float32, and a JSON file keeps float64.
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that determine the numbers."""
    packages = {"python": platform.python_version()}
    for package in ("kmodels", "keras", "numpy", keras.backend.backend()):
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            from kmodels import __version__

            packages[package] = __version__ if package == "kmodels" else "unknown"
    return packages
