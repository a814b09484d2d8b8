"""The identity of a run: the settings that a checkpoint notes, compared on resume."""

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np

from kmodels.checkpoint import rng
from kmodels.checkpoint.run_state import RunState
from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.core.hardware import versions

_SAID = 8
_SET_RATES = (keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)
_FIRST_RATES: WeakKeyDictionary[Any, dict[str, float]] = WeakKeyDictionary()


def describe(
    optimizer: Any, settings: Mapping[str, Any], numbers: Mapping[str, Any], epoch: int
) -> dict[str, Any]:
    """Plain values that are the same in all parts of one run, and what else explains it.

    Args:
        optimizer: of the model.
        settings: that the user wants compared.
        numbers: of the optimizer, as the user gave them.
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
    optimizer: Any,
    settings: Mapping[str, Any],
    steps: int | None,
) -> None:
    """Compares a checkpoint with the run that is to go on from it.

    Args:
        path: of the checkpoint.
        run: its state.
        optimizer: of the model.
        settings: of this run.
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


def _name(optimizer: Any) -> str:
    """Class and name; Keras numbers the names that it gives by how many the process has made."""
    name = re.sub(r"_\d+$", "", optimizer.name)
    found = f"{type(optimizer).__name__} {name!r}"
    inner = getattr(optimizer, "inner_optimizer", None)
    return found if inner is None else f"{found} around {_name(inner)}"


def _schedule(optimizer: Any) -> Any:
    try:
        # What scales losses has its rate from the optimizer inside.
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        rate = inner.get_config().get("learning_rate")
    except NotImplementedError:  # A user's own schedule need not have a config.
        return None
    return rate if isinstance(rate, dict) else None


def given_numbers(optimizer: Any, beside: Iterable[Any] = ()) -> dict[str, Any]:
    """Returns the numbers that the user gave an optimizer, by names such as "beta_1".

    Args:
        optimizer: built; nothing has been restored into it yet.
        beside: callbacks. Where they set the learning rate, one that this process has trained with
            is theirs, so what was given is that of its first time.

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
    run: RunState, given: Mapping[str, Any], optimizer: Any
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


def _rates(optimizer: Any) -> dict[str, float]:
    held = rng.rates(rng.capture_rates(optimizer))
    return {name: float(value) for name, value in held.items()}


def _is_rate(name: str) -> bool:
    return name.rpartition(".")[2] == "learning_rate"


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        # A rate is a variable in float32, and a JSON file keeps float64.
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other
