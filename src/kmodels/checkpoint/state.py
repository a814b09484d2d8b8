"""The state of a model in a checkpoint: read into host memory, compared, restored."""

import hashlib
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.checkpoint import format, sharded
from kmodels.checkpoint.format import Arrays
from kmodels.checkpoint.layer_numbers import as_counted, from_first
from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.distribution import processes
from kmodels.distribution.processes import all_or_raise
from kmodels.weights import gather

# Keras numbers seed generators by how many the process has made.
_NUMBERED_SEED = re.compile(r"\bseed_generator_\d+")
_SHOWN = 8


class CheckpointError(InputError):
    """A checkpoint is damaged, or belongs to another model."""


def named(variables: Iterable[Any]) -> dict[str, Any]:
    """Returns variables by path; a second of the same gets `#1`, in the order of creation."""
    found: dict[str, Any] = {}
    for variable in variables:
        found[unique(_NUMBERED_SEED.sub("seed_generator", variable.path), found)] = variable
    return found


def has_adapters(model: keras.Model) -> bool:
    """Returns whether small matrices are trained beside frozen weights (LoRA)."""
    return any(variable.name.startswith("lora_") for variable in model.trainable_variables)


def frozen(model: keras.Model) -> dict[str, Any]:
    """Returns weights that training does not change, by path."""
    moved = {id(variable) for variable in model.trainable_variables}
    return named(variable for variable in model.weights if id(variable) not in moved)


def parts(model: keras.Model, only_trainable: bool) -> dict[str, dict[str, Any]]:
    """Returns the variables of each file of a checkpoint, the optimizer built where needed.

    Args:
        model: compiled.
        only_trainable: leaves the frozen weights out.

    Returns:
        "model", with the states of seeds; "optimizer"; "metrics".
    """
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    if (parallel := getattr(model, "parallel", None)) is not None:
        parallel.settle()
    held = named(model.variables)
    if only_trainable:
        left_out = {id(variable) for variable in frozen(model).values()}
        held = {name: variable for name, variable in held.items() if id(variable) not in left_out}
    metrics = named(model.metrics_variables)
    return {"model": held, "optimizer": slots(model.optimizer), "metrics": metrics}


def in_parts(variable: keras.Variable) -> bool:
    """Returns whether this process cannot see all of its values without the other processes."""
    return processes.count() > 1 and sharded.is_placed(variable)


def copied(variables: Mapping[str, Any], part: str = "model") -> Arrays:
    """Returns this process's part of them, copied to host memory where no step changes it.

    Args:
        variables: by name.
        part: part of the checkpoint to which they belong.

    Returns:
        In a run of one process all of the values. In one of several the parts that it holds, by
        `stored.part_name`, its own of what differs between processes, and the rest in the first
        process alone.
    """
    found: Arrays = {}
    for name, variable in variables.items():
        # Running averages count the rows of their process, accumulated gradients are of them.
        differs = part == "metrics" or "gradient_accumulator" in variable.path
        if in_parts(variable):
            found |= {format.part_name(name, at): held for at, held in sharded.parts(variable)}
        elif differs or processes.is_rank_zero():
            found[format.here(name) if differs else name] = np.array(host_values(variable))
    return found


def whole(variables: Mapping[str, Any]) -> Arrays:
    """Returns all of the values in host memory; variables that lie in parts are gathered by all."""
    return {name: np.array(host_values(variable)) for name, variable in variables.items()}


def host_values(variable: keras.Variable) -> np.ndarray:
    """Returns a variable's values in its own dtype.

    They may share the variable's memory; of a sharded variable all processes gather them.
    """
    return gather.values(variable)


def digest(variables: Mapping[str, Any]) -> str:
    """sha256 over path, dtype, shape and bytes, in the order of the paths."""
    found = hashlib.sha256()
    for path, variable in sorted(variables.items()):
        values = host_values(variable)
        found.update(f"{path} {values.dtype} {values.shape}\n".encode())
        found.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def is_frozen_base(model: keras.Model, sha256: str) -> bool:
    """Returns whether a hash is that of the weights that training does not change.

    Args:
        model: with frozen weights.
        sha256: sha256 of `digest`, over names as the process had them, or as if it had begun with
            them.
    """
    held = frozen(model)
    # Checkpoints of before layers were counted from the first hold the hash of the names as such.
    return any(digest(names) == sha256 for names in (from_first(held), held))


def base_digest(model: keras.Model) -> str:
    """`digest` of the weights that training does not change, by structure."""
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
    """Running averages, started over where one is not finite: they hold a step that was skipped."""
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
        CheckpointError: lists all that does not fit.
    """
    # All is read before anything is assigned, in any of the processes.
    for variable, held in all_or_raise(f"fill from {path.name}", lambda: _fitting(path, wanted)):
        if in_parts(variable):
            sharded.put(variable, held)
        else:
            put(variable, held)


def _fitting(path: Path, wanted: Mapping[str, Mapping[str, Any]]) -> list[tuple[Any, Any]]:
    """Returns variables, with what this process holds of each."""
    found = {part: format.read(path, part, _counted(part, wanted[part])) for part in wanted}
    if any(found[part].keys() != variables.keys() for part, variables in wanted.items()):
        found = as_counted(found, wanted)
    check_fits(path, found, wanted)
    return [
        (
            variable,
            sharded.read(variable, found[part][name])
            if in_parts(variable)
            else found[part][name].read(),
        )
        for part, variables in wanted.items()
        for name, variable in variables.items()
    ]


def _counted(part: str, variables: Mapping[str, Any]) -> list[str]:
    """Returns the names of what counts the rows of this process alone."""
    return [name for name, v in variables.items() if part == "metrics" and not in_parts(v)]


def check_fits(
    path: Path, found: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Mapping[str, Any]]
) -> None:
    """Compares names, shapes and kinds of arrays.

    Args:
        path: path of the checkpoint, for the message.
        found: by part and name, with shape and dtype.
        wanted: variables, likewise.

    Raises:
        CheckpointError: lists all that does not fit.
    """
    wrong = [
        f"{part}: {problem}"
        for part, variables in wanted.items()
        for problem in _misfits(found[part], variables)
    ]
    if wrong:
        more = f"; {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(
            f"{path} belongs to another model or optimizer: {'; '.join(wrong[:_SHOWN])}{more}"
        )


def put(variable: keras.Variable, values: np.ndarray) -> None:
    """Assigns values from the host; integers may be wider on another backend."""
    values = np.ascontiguousarray(values, dtype=_dtype(variable))
    gather.put(variable, values.reshape(variable.shape))


def _misfits(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(set(wanted) - set(found)):
        yield f"{name} is missing"
    for name in sorted(set(found) - set(wanted)):
        yield f"{name} is not in this one"
    for name in sorted(set(found) & set(wanted)):
        if tuple(found[name].shape) != tuple(wanted[name].shape):
            yield f"{name} is {tuple(found[name].shape)}, wanted {tuple(wanted[name].shape)}"
        elif _kind(found[name].dtype) != _kind(_dtype(wanted[name])):
            yield f"{name} is {found[name].dtype}, wanted {wanted[name].dtype}"


def _dtype(variable: keras.Variable) -> np.dtype:
    return np.dtype(keras.backend.standardize_dtype(variable.dtype))


def _kind(dtype: np.dtype) -> str:
    """Of an array; the states of seeds are uint32, int32 or int64, by backend."""
    kind = np.dtype(dtype).kind
    return "i" if kind == "u" else kind


def slots(optimizer: keras.Optimizer) -> dict[str, Any]:
    """Returns every variable of a built optimizer by `weight's path:slot`, or by its own name.

    On torch Keras puts classes of its own behind the public names, and Adafactor calls all its
    variables as their weights are called; so a variable is known by the list of the optimizer that
    it is in, and by its place there.

    Args:
        optimizer: an optimizer of any of Keras' classes; one that scales losses gives its inner
            one's too, and those of several objectives give each one's, after its name.

    Returns:
        For example "iteration", "block_0/mlp/up/kernel:momentum".
    """
    objectives: dict[str, Any] = getattr(optimizer, "by_player", {})
    if objectives:
        return {f"{name}/{k}": v for name, own in objectives.items() for k, v in slots(own).items()}
    inner = getattr(optimizer, "inner_optimizer", None)
    found = {} if inner is None else slots(inner)
    inside = {id(variable) for variable in found.values()}
    weights = keras_internals.built_for(optimizer)
    owners: dict[int, tuple[str, str]] = {}
    for attribute, held in keras_internals.slot_lists(optimizer):
        for weight, variable in zip(weights, held, strict=True):
            path = getattr(weight, "path", weight.name)
            owners.setdefault(id(variable), (path, attribute.strip("_")))
    for variable in optimizer.variables:
        if id(variable) in inside:
            continue
        name = variable.name
        if id(variable) in owners:
            path, attribute = owners[id(variable)]
            prefix = path.replace("/", "_") + "_"
            slot = name.removeprefix(prefix) if name.startswith(prefix) else attribute
            name = f"{path}:{slot}"
        found[unique(name, found)] = variable
    return found


def averages(optimizer: keras.Optimizer) -> list[tuple[Any, Any]]:
    """Returns each weight with its moving average, where a built optimizer keeps one."""
    objectives: dict[str, Any] = getattr(optimizer, "by_player", {})
    if objectives:
        return [pair for own in objectives.values() for pair in averages(own)]
    if (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        return averages(inner)
    return keras_internals.moving_averages(optimizer)


def unique(name: str, taken: Container[str]) -> str:
    """Returns the name, or the first of `name#1`, `name#2` that is free."""
    copies, found = 0, name
    while found in taken:
        copies += 1
        found = f"{name}#{copies}"
    return found
