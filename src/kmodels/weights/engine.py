"""Loading and exporting by a table of rules, strict in both directions."""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from kmodels.core import processes, runtime
from kmodels.core.errors import InputError
from kmodels.core.keras_internals import moving_averages
from kmodels.weights import deferred, gather
from kmodels.weights.rules import (
    Rule,
    bind_sources,
    bind_targets,
    identity,
    source_shape,
    split_points,
)
from kmodels.weights.tensors import LazyArray

SHOWN = 8


def variables(model: keras.Model) -> dict[str, Any]:
    """Returns the weights of a model by path; states of seeds and metrics are not weights.

    A mapping is returned as a dictionary, for models of other packages.

    Raises:
        InputError: if two variables share a path, since a file could not tell them apart.
    """
    if isinstance(model, Mapping):
        return dict(model)
    by_path: dict[str, Any] = {}
    for variable in model.weights:
        if variable.path in by_path:
            raise InputError(
                f"two variables are called {variable.path}; give the layers different names"
            )
        by_path[variable.path] = variable
    return by_path


def load(
    model: keras.Model,
    source: Mapping[str, LazyArray],
    rules: Sequence[Rule],
    *,
    skip: Collection[str] = (),
    origin: object = "the file",
) -> int:
    """Fills a built model from a file.

    Names and shapes are compared first; only if every tensor finds its variable and every variable
    its tensor is anything assigned, one tensor in memory at a time.

    Args:
        model: a built Keras model; its variables may have no values yet.
        source: the tensors of the file.
        rules: the table.
        skip: prefixes of variable paths that keep their values; tensors for them are ignored.
        origin: names the file in errors.

    Returns:
        Number of parameters that were filled.

    Raises:
        InputError: lists unused tensors, unfilled variables and wrong shapes, all in one line.
    """
    return bind(model, source, rules, skip=skip, origin=origin)()


def bind(
    model: keras.Model,
    source: Mapping[str, LazyArray],
    rules: Sequence[Rule],
    *,
    skip: Collection[str] = (),
    origin: object = "the file",
) -> Callable[[], int]:
    """Compares model and tensors, and returns a function that fills the model."""
    by_path = variables(model)
    bound, problems = _match(by_path, source, rules, tuple(skip))
    if problems:
        raise InputError(f"{origin} does not fit the model: {'; '.join(problems)}")

    def fill() -> int:
        filled = 0
        # Largest first: each is in memory twice for a moment, at best while little else is.
        for rule in sorted(bound, key=lambda rule: -source[rule.source].nbytes):
            targets = [by_path[path] for path in rule.targets]
            filled += sum(int(np.prod(variable.shape)) for variable in targets)
            _assign(rule, targets, source[rule.source])
        runtime.malloc_trim()
        return filled

    return fill


def _match(
    by_path: Mapping[str, Any],
    source: Mapping[str, LazyArray],
    rules: Sequence[Rule],
    prefixes: tuple[str, ...],
) -> tuple[list[Rule], list[str]]:
    wanted = (
        {path for path in by_path if not path.startswith(prefixes)} if prefixes else set(by_path)
    )
    chosen, unused, shapes, whole = [], [], [], []
    taken: set[str] = set()
    for name, rule in bind_sources(rules, source).items():
        if rule is None:
            unused.append(name)
        elif prefixes and all(path.startswith(prefixes) for path in rule.targets):
            continue
        elif not wanted.issuperset(rule.targets) or not taken.isdisjoint(rule.targets):
            unused.append(name)
        else:
            taken.update(rule.targets)
            if (expected := _source_shape(rule, by_path)) != source[name].shape:
                shapes.append(f"{name} is {source[name].shape}, the model needs {expected}")
            elif source[name].dtype.kind in "iub" and _has_floats(by_path[rule.targets[0]]):
                whole.append(f"{name} is {source[name].dtype}")
            else:
                chosen.append(rule)
    missing = [path for path in by_path if path in wanted - taken]
    return chosen, [
        *_listed("tensors without a variable", unused),
        *_listed("variables without a tensor", missing),
        *_listed("wrong shapes", shapes),
        *_listed("tensors of whole numbers, which may be packed weights", whole),
    ]


def _has_floats(variable: Any) -> bool:
    return "float" in keras.backend.standardize_dtype(variable.dtype)


def _listed(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return [f"{len(items)} {title}: {', '.join(items[:SHOWN])}{more}"]


def _source_shape(rule: Rule, by_path: Mapping[str, Any]) -> tuple[int, ...] | str:
    shapes = [tuple(by_path[path].shape) for path in rule.targets]
    try:
        return source_shape(shapes, rule.transform, rule.axis)
    except ValueError:  # the transform was made for other sizes
        return f"{' and '.join(map(str, shapes))} for {', '.join(rule.targets)}"


def _assign(rule: Rule, targets: Sequence[Any], source: LazyArray) -> None:
    plain = len(targets) == 1 and rule.transform is identity
    if plain and gather.host.fill_directly(targets[0], source):
        return
    shapes = [tuple(variable.shape) for variable in targets]
    parts = [array := source.read()]
    if len(targets) > 1:
        parts = np.split(array, split_points(shapes, rule.transform, rule.axis), axis=rule.axis)
    for variable, part in zip(targets, parts, strict=True):
        value = np.ascontiguousarray(rule.transform.forward(part)).reshape(variable.shape)
        gather.put(variable, value)


def export(
    model: keras.Model, rules: Sequence[Rule], *, without: tuple[str, ...] = ()
) -> dict[str, LazyArray]:
    """Returns the tensors that a file of these rules would hold.

    Args:
        model: a built Keras model, or a layer of one.
        rules: the table that would load the file.
        without: prefixes of paths of variables that another file holds.

    Raises:
        InputError: for variables without a rule.
    """
    deferred.check(model, "saving")
    warn_of_average(model)
    by_path = {path: x for path, x in variables(model).items() if not path.startswith(without)}
    bound = bind_targets(rules, by_path)
    known = {path for rule in bound for path in rule.targets}
    if lost := [path for path in by_path if path not in known]:
        hints = {"/kernel_": "; call dequantize first", "/lora_": "; call merge_lora first"}
        hint = next((x for part, x in hints.items() if any(part in path for path in lost)), "")
        raise InputError(
            f"the format has no place for {'; '.join(_listed('variables', lost))}{hint}"
        )
    if absent := sorted(known - set(by_path)):
        raise InputError(
            f"the format also needs {'; '.join(_listed('variables', absent))}, which are not there"
        )
    return {rule.source: _lazy(rule, [by_path[path] for path in rule.targets]) for rule in bound}


def warn_of_average(model: keras.Model) -> None:
    """Warns of a moving average of the weights that is not in the model, and so in no file."""
    outer: Any = getattr(model, "optimizer", None)
    optimizer = getattr(outer, "inner_optimizer", outer)
    # In several processes each may hold a part of them.
    if processes.count() > 1 or getattr(optimizer, "swapped", False):
        return
    pairs = moving_averages(optimizer)
    if not pairs or not keras.ops.convert_to_numpy(optimizer.iterations):
        return
    if all(bool(keras.ops.all(weight.value == average.value)) for weight, average in pairs):
        return
    own = hasattr(optimizer, "finalize_average")
    call = "finalize_average()" if own else "finalize_variable_values(model.trainable_weights)"
    warnings.warn(
        "the file gets the weights, not the moving average that the optimizer keeps of them; to "
        f"write the average, call optimizer.{call} first",
        stacklevel=2,
    )


def _lazy(rule: Rule, targets: Sequence[Any]) -> LazyArray:
    shapes = [tuple(variable.shape) for variable in targets]
    dtype = np.dtype(keras.backend.standardize_dtype(targets[0].dtype))

    def read() -> np.ndarray:
        parts = [rule.transform.inverse(gather.values(variable)) for variable in targets]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=rule.axis)

    return LazyArray(source_shape(shapes, rule.transform, rule.axis), dtype, read)


def paths_as_names(paths: Iterable[str]) -> list[Rule]:
    """Returns the table of our own files, whose tensors have the names of variables."""
    return [Rule(path, path) for path in paths]
