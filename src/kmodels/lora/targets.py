"""The layers that the targets of an adapter mean: by name, end of a path, or regular expression.

A pattern such as "(a+)+" may backtrack for years, and `re` holds the interpreter's lock meanwhile,
so no thread can stop it. A pattern with groups or with more than a few repetitions is therefore
matched in a child process with a time limit.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import keras

from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.layers import Dense, GroupedDense
from kmodels.layers.changes import adaptable_layers
from kmodels.layers.embedding import Table

ALL = "all-linear"
# A pattern without groups and with this many repetitions takes at most cubic time.
SIMPLE = 3
SECONDS = 10.0
_CHILD = (
    "import json, re, sys\n"
    "pattern, names = json.load(sys.stdin)\n"
    "print(json.dumps([name for name in names if re.fullmatch(pattern, name)]))"
)


def linear_layers(model: keras.Model) -> dict[str, Dense]:
    """Returns every linear layer of a model by its path."""
    layers = keras_internals.sublayers(model)
    return {layer.path: layer for layer in layers if isinstance(layer, Dense)}


def expert_layers(model: keras.Model) -> dict[str, GroupedDense]:
    """Returns every layer with one kernel per expert by its path."""
    layers = keras_internals.sublayers(model)
    return {layer.path: layer for layer in layers if isinstance(layer, GroupedDense)}


def choose(model: keras.Model, targets: str | Sequence[str]) -> dict[str, Dense | Table]:
    """Returns the linear layers and embedding tables that the targets mean, by path.

    Args:
        model: a built model.
        targets: "all-linear", a name ("query"), the end of a path ("mlp/up"), a regular expression
            for whole paths (r"block_[0-3]/.*"), or several of those.

    Raises:
        InputError: for a target that means no layer.
    """
    found = adaptable_layers(model).items()
    layers = {path: layer for path, layer in found if isinstance(layer, Dense | Table)}
    chosen: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets:
        paths = meant(layers, target)
        if not paths:
            raise InputError(
                f"LoRA target {target!r} is not a linear layer of this model; there are "
                f"{', '.join(ends(layers))}; or give {ALL!r}"
            )
        chosen |= {path for path in paths if target != ALL or layers[path].in_all_linear}
    return {path: layer for path, layer in layers.items() if path in chosen}


def choose_experts(
    model: keras.Model, targets: str | Sequence[str], names: Mapping[str, str]
) -> dict[str, GroupedDense]:
    """Returns the layers of experts that `target_parameters` means, by path.

    Args:
        model: a built model.
        targets: as in `choose`, without "all-linear", or the ends of names in transformers.
        names: names in transformers by path.

    Raises:
        InputError: for a target that means no such layer.
    """
    layers = expert_layers(model)
    chosen: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets:
        paths = {path for path in layers if f".{names.get(path)}".endswith(f".{target}")}
        paths |= meant(layers, target) if target != ALL else set()
        if not paths:
            known = ", ".join(ends(layers))
            there = f"there are {known}" if known else "it has none; leave it out"
            raise InputError(
                f"target_parameters {target!r} is no kernel of experts of this model; {there}"
            )
        chosen |= paths
    return {path: layer for path, layer in layers.items() if path in chosen}


def ends(paths: Iterable[str]) -> list[str]:
    """Returns the last two parts of each path, for a message."""
    return sorted({"/".join(path.split("/")[-2:]) for path in paths})


def meant(paths: Iterable[str], target: str) -> set[str]:
    """Returns the paths that a target means, by name, end of the path, or pattern.

    Raises:
        InputError: for an invalid pattern, or one that takes too long.
    """
    paths = list(paths)
    if target == ALL:
        return set(paths)
    named = {path for path in paths if f"/{path}".endswith(f"/{target}")}
    return named | matching(target, paths)


def matching(pattern: str, names: Iterable[str]) -> frozenset[str]:
    """Returns the names that a regular expression matches as a whole.

    Args:
        pattern: a regular expression of `re`.
        names: paths of layers, or names of modules.

    Raises:
        InputError: for an invalid pattern, or one that takes too long.
    """
    return _matching(pattern, tuple(names))


@lru_cache(maxsize=1024)
def _matching(pattern: str, names: tuple[str, ...]) -> frozenset[str]:
    shown = repr(pattern if len(pattern) <= 80 else f"{pattern[:77]}...")
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as problem:
        raise InputError(f"{shown} is not a pattern: {problem}") from None
    if sum(map(pattern.count, "*+?{")) <= SIMPLE and "(" not in pattern:
        return frozenset(name for name in names if compiled.fullmatch(name))
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=json.dumps([pattern, names]),
            capture_output=True,
            text=True,
            check=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"the pattern {shown} takes more than {SECONDS:.0f} s to match; simplify it: "
            "a repetition inside a repetition, such as (a+)+, takes exponential time"
        ) from None
    except (OSError, subprocess.CalledProcessError) as problem:
        raise InputError(
            f"the pattern {shown} could not be matched in a child process "
            f"({type(problem).__name__}); give names instead"
        ) from None
    return frozenset(json.loads(done.stdout))
