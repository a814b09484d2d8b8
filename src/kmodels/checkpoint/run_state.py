"""RunState: all that a checkpoint knows of a run beside weights, slots and averages."""

import importlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from kmodels.checkpoint import format
from kmodels.checkpoint.format import Arrays
from kmodels.core.errors import InputError
from kmodels.distribution import processes

# What `state.json` does not hold, but arrays of the part "other".
_IN_ARRAYS = ("data", "rng", "callback_arrays")
_JSON = "json"
_ARRAY, _BYTES, _TENSOR, _TUPLE, _ITEMS = "array", "bytes", "tensor", "tuple", "items"
_MARKS = {_ARRAY, _BYTES, _TENSOR, _TUPLE, _ITEMS}
_DATA, _RNG, _CALLBACKS = "data/", "random/", "callbacks/"


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
        logs: of the epoch, where it has its end; None for a number that is not finite.
        log_names: of the logs of a step.
        base: hash and origin of frozen weights that are not in the checkpoint.
        optimizer: class and name.
        order: what the order of the data goes by.
        schedule: config of the learning rate's.
        numbers: of the optimizer, as the user gave them; None where that was not written down.
        settings: plain values that a resumed run must share.
        backend: that it ran on.
        versions: of packages.
        callbacks: what they had learnt, by callback and attribute.
        ahead: whether batches were made before the steps that take them.
        data: state of the loader, in this process; None where it has none.
        rng: states of the random generators and learning rates of this process: "now", and at the
            begin of the "epoch".
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
        own = {f"{_DATA}{name}": array for name, array in arrays_of_data(self.data).items()}
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
        data = data_of_arrays(_within(arrays, _DATA))
        kept = {name: values for name, values in arrays.items() if name.startswith(_CALLBACKS)}
        return replace(self, data=data, rng=rng, callback_arrays=kept)


def _is_plain(name: str) -> bool:
    return name not in _IN_ARRAYS


def _within(arrays: Arrays, prefix: str) -> Arrays:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def arrays_of_data(state: Any) -> Arrays:
    """Returns arrays by name, one of them the text of the whole; {} for None.

    Raises:
        InputError: for a value that is no number, string, bytes, array or nest of them.
    """
    if state is None:
        return {}
    arrays: Arrays = {}
    text = json.dumps(_encode(state, arrays))
    return {**arrays, _JSON: np.frombuffer(text.encode(), np.uint8)}


def data_of_arrays(arrays: Mapping[str, np.ndarray]) -> Any:
    """Returns what `arrays_of_data` was given."""
    if _JSON not in arrays:
        return None
    return _decode(json.loads(arrays[_JSON].tobytes()), arrays)


def _encode(value: Any, arrays: Arrays) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [_encode(part, arrays) for part in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_encode(part, arrays) for part in value]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not _MARKS & set(value):
            return {key: _encode(part, arrays) for key, part in value.items()}
        return {_ITEMS: [[_encode(k, arrays), _encode(v, arrays)] for k, v in value.items()]}
    name = str(len(arrays))
    if isinstance(value, bytes):
        arrays[name] = np.frombuffer(value, np.uint8)
        return {_BYTES: name}
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "fiubV":
            arrays[name] = value
            return {_ARRAY: name}
        raise InputError(
            f"the state of the data holds an array of {value.dtype}; have state_dict() give numbers"
        )
    package = type(value).__module__.partition(".")[0]
    if hasattr(value, "detach") and importlib.util.find_spec(_module(package)):
        arrays[name] = np.array(value.detach().cpu())
        return {_TENSOR: [name, package]}
    raise InputError(
        f"the state of the data holds a {type(value).__name__}; have state_dict() give numbers, "
        "strings, bytes, arrays, lists and dictionaries"
    )


def _decode(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_decode(part, arrays) for part in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not _MARKS & set(value):
        return {key: _decode(part, arrays) for key, part in value.items()}
    ((mark, held),) = value.items()
    if mark == _TUPLE:
        return tuple(_decode(part, arrays) for part in held)
    if mark == _ITEMS:
        return {_decode(k, arrays): _decode(v, arrays) for k, v in held}
    if mark == _TENSOR:
        name, package = held
        return importlib.import_module(_module(package)).from_array(arrays[name])
    return arrays[held].tobytes() if mark == _BYTES else arrays[held]


def _module(package: str) -> str:
    """Returns the module for tensors of a package, which need not be the backend's."""
    return f"kmodels.data.tensors_{package}"
