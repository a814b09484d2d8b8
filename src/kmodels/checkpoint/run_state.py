"""The state of a run beside weights, slots and averages, and the identity that it goes by.

`RunState` is all that a checkpoint knows of that. The settings among it are compared on resume.
"""

import importlib.metadata
import math
import platform
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np

from kmodels.checkpoint import extra_state, format
from kmodels.checkpoint.format import Arrays
from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.core.file_shapes import NUMBER, Shape
from kmodels.distribution import processes

# What `state.json` does not hold, but arrays of the part "other".
_IN_ARRAYS = ("data", "rng", "callback_arrays")
_DATA, _RNG, _CALLBACKS = "data/", "random/", "callbacks/"
_SAID = 8
_SET_RATES = (keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)
_FIRST_RATES: WeakKeyDictionary[Any, dict[str, float]] = WeakKeyDictionary()

# The types of what `to_json` gives, see `RunState`.
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
}


@dataclass(frozen=True)
class RunState:
    """The state of a run besides its variables: its position, RNG states, callbacks, identity.

    A checkpoint of before a field was there has its default.

    Args:
        step: finished batches of all.
        epoch: finished epochs.
        batch: finished batches of the running epoch.
        steps_per_epoch: batches of an epoch, where known.
        in_validation: whether it was saved within the validation of the epoch.
        ended: whether a callback has ended the run.
        logs: logs of the epoch, where it has its end; None for a number that is not finite.
        log_names: names of the logs of a step.
        base: hash and origin of frozen weights that are not in the checkpoint.
        optimizer: class and name.
        order: what the order of the data goes by.
        schedule: config of the learning rate's.
        numbers: numbers of the optimizer, as the user gave them; None where that was not written
            down.
        settings: plain values that a resumed run must share.
        backend: that it ran on.
        versions: versions of packages.
        callbacks: what they had learnt, by callback and attribute.
        ahead: whether batches were made before the steps that take them.
        data: state of the loader, in this process; None where it has none.
        rng: states of the random generators and learning rates of this process: "now", and at the
            beginning of the "epoch".
        callback_arrays: what stands in `callbacks` by name.
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
    data: Any = None
    rng: Mapping[str, Arrays] = field(default_factory=dict)
    callback_arrays: Arrays = field(default_factory=dict)

    @property
    def validated(self) -> bool:
        """Whether the epoch, cut or not, had its end."""
        return bool(self.logs)

    def to_json(self) -> dict[str, Any]:
        """Returns the plain values, for `state.json`."""
        return {one.name: getattr(self, one.name) for one in fields(self) if _is_plain(one.name)}

    def to_arrays(self) -> Arrays:
        """Returns the arrays that this process writes, for the part "other"."""
        own = {f"{_DATA}{name}": array for name, array in format.arrays_of_data(self.data).items()}
        for moment, held in self.rng.items():
            own |= {f"{_RNG}{moment}/{name}": array for name, array in held.items()}
        shared = self.callback_arrays if processes.is_rank_zero() else {}
        return {**shared, **{format.here(name): array for name, array in own.items()}}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "RunState":
        """Returns the state without its arrays; of values that it does not know it takes none."""
        known = {one.name for one in fields(cls) if _is_plain(one.name)}
        values: dict[str, Any] = {name: found[name] for name in known & found.keys()}
        values["log_names"] = tuple(values.get("log_names", ()))
        return cls(**values)

    def with_arrays(self, path: Path) -> "RunState":
        """Returns the state with the arrays that this process finds in a checkpoint."""
        arrays = {name: array.read() for name, array in format.read(path, "other").items()}
        rng: dict[str, Arrays] = {}
        for name, values in _within(arrays, _RNG).items():
            moment, _, kind = name.partition("/")
            rng.setdefault(moment, {})[kind] = values
        data = format.data_of_arrays(_within(arrays, _DATA))
        kept = {name: values for name, values in arrays.items() if name.startswith(_CALLBACKS)}
        return replace(self, data=data, rng=rng, callback_arrays=kept)


def _is_plain(name: str) -> bool:
    return name not in _IN_ARRAYS


def _within(arrays: Arrays, prefix: str) -> Arrays:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def describe(
    optimizer: keras.Optimizer, settings: Mapping[str, Any], numbers: Mapping[str, Any], epoch: int
) -> dict[str, Any]:
    """Plain values that are the same in all parts of one run, and what else explains it.

    Args:
        optimizer: an optimizer of the model.
        settings: that the user wants compared.
        numbers: numbers of the optimizer, as the user gave them.
        epoch: that the order of the data goes by.
    """
    return {
        "optimizer": _name(optimizer),
        "order": {"seed": keras_internals.random_seed(), "epoch": epoch},
        "schedule": _schedule(optimizer),
        "numbers": dict(numbers),
        "settings": dict(settings),
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
        optimizer: an optimizer of the model.
        settings: settings of this run.
        steps: batches of an epoch, where known.

    Raises:
        InputError: names all that differs.
    """
    kept = run.settings
    wrong = [name for name, value in settings.items() if kept.get(name) != value]
    said = [f"{name} was {kept.get(name)!r}" for name in wrong]
    # A checkpoint of before this was written down has no name.
    name, saved = _name(optimizer), run.optimizer
    if None not in (name, saved) and name != saved:
        said.append(f"the optimizer was {saved}, not {name}")
    seed, former = keras_internals.random_seed(), run.order.get("seed")
    if None not in (seed, former) and seed != former:
        said.append(f"the random seed was {former}")
    count = run.steps_per_epoch
    if None not in (steps, count) and steps != count:
        said.append(f"an epoch had {count} batches, not {steps}")
    if said:
        raise InputError(
            f"{path} is of another run: {', '.join(said)}; give the same settings or another "
            "directory"
        )


def _name(optimizer: keras.Optimizer) -> str:
    """Class and name; Keras numbers the names that it gives by how many the process has made."""
    name = re.sub(r"_\d+$", "", optimizer.name)
    found = f"{type(optimizer).__name__} {name!r}"
    inner = getattr(optimizer, "inner_optimizer", None)
    return found if inner is None else f"{found} around {_name(inner)}"


def _schedule(optimizer: keras.Optimizer) -> Any:
    try:
        # What scales losses has its rate from the optimizer inside.
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        rate = inner.get_config().get("learning_rate")
    except NotImplementedError:  # A user's own schedule need not have a config.
        return None
    return rate if isinstance(rate, dict) else None


def given_numbers(optimizer: keras.Optimizer, beside: Iterable[Any] = ()) -> dict[str, Any]:
    """Returns the numbers that the user gave an optimizer, by names such as "beta_1".

    Args:
        optimizer: built; nothing has been restored into it yet.
        beside: callbacks. Where they set the learning rate, one that this process has trained with
            is theirs, so the given one is that of its first time.

    Returns:
        Plain values; for example "learning_rate.decay_steps" for a schedule's. The rates alone
        where a user's own schedule has no config.
    """
    try:
        config = dict(_flat("", optimizer.get_config()))
    except NotImplementedError:
        config = {}
    # Rates are read by slot below, since those of several objectives have names of their own.
    found = {k: v for k, v in config.items() if not (_is_rate(k) and isinstance(v, float))}
    rates = _rates(optimizer)
    first = _FIRST_RATES.setdefault(optimizer, rates)
    return found | (first if any(isinstance(c, _SET_RATES) for c in beside) else rates)


def changed_numbers(
    run: RunState, given: Mapping[str, Any], optimizer: keras.Optimizer
) -> dict[str, tuple[Any, Any]]:
    """Returns what the user has changed since the run began, with the former value and the new one.

    Args:
        run: state of the checkpoint.
        given: what `given_numbers` found before the checkpoint was restored.
        optimizer: with the learning rates of the checkpoint, which callbacks may have changed.
    """
    kept, rates = run.numbers, _rates(optimizer)
    if kept is None:  # Checkpoints of before this was written down.
        return {}
    found = {}
    for name in sorted({*kept, *given}):
        former, new = kept.get(name), given.get(name)
        now = rates.get(name, former)
        if not _equal(former, new) and not _equal(now, new):
            found[name] = now, new
    return found


def still_given(run: RunState, given: Mapping[str, Any], changed: Container[str]) -> dict[str, Any]:
    """Returns the numbers for the next checkpoint: as given, where callbacks changed them."""
    kept = run.numbers or {}
    return {k: v if k in changed else kept.get(k, v) for k, v in given.items()}


def say_changed(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Returns one line that names each changed number with both values."""
    parts = [f"{name} was {former}, is {new}" for name, (former, new) in changed.items()]
    more = f"; {len(parts) - _SAID} more" if len(parts) > _SAID else ""
    return (
        f"the optimizer was changed since the checkpoint, and the new values are used: "
        f"{'; '.join(parts[:_SAID])}{more}"
    )


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
    held = extra_state.rates(extra_state.capture_rates(optimizer))
    return {name: float(value) for name, value in held.items()}


def _is_rate(name: str) -> bool:
    return name.rpartition(".")[2] == "learning_rate"


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        # A rate is a variable in float32, and a JSON file keeps float64.
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that decide the numbers."""
    found = {"python": platform.python_version()}
    for package in ("kmodels", "keras", "numpy", keras.backend.backend()):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            from kmodels import __version__

            found[package] = __version__ if package == "kmodels" else "unknown"
    return found
