"""Trains on both sides, step by step, until they part."""

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from kmodels.core.backend_choice import BACKENDS
from kmodels.core.errors import InputError
from kmodels.tools.bench.environment import environment
from kmodels.tools.children import Child, ChildError, installed, stopped_by_signals
from kmodels.tools.parity.compare import Difference, Stage, stages
from kmodels.tools.parity.options import ParityOptions, Side

WORK = "kmodels.tools.parity.work"
FORMAT = 1
_JOB = ("batch_size", "image_size", "num_classes", "sequence_length", "seed")


def run(options: ParityOptions) -> dict[str, Any]:
    """Compares two sides.

    Args:
        options: what is trained.

    Returns:
        `equal`; `sides`, how they are called; `first` (`step`, `stage` and `tensor`, `text` with
        the values, and `weights`: those of that layer that differed before the step), None where
        they are equal; `stages`, each with `step`, `stage`, `count`, `worst` and `apart` (its
        largest difference over what is allowed), until the first step that differs; `tolerance`.

    Raises:
        InputError: for a backend that is not installed, or settings that a preset does not have;
            where the two are other models, too.
    """
    sides = (options.left, options.right)
    for side in sides:
        if not installed(sys.executable, [side.backend]):
            name = side.backend
            raise InputError(f"{name} is not installed: pip install 'kmodels[{name}]'")
    names = [options.left.told(options.right), options.right.told(options.left)]
    found: list[Stage] = []
    first = None
    with stopped_by_signals(), ExitStack() as stack:
        children = [stack.enter_context(_child(options, side, stack)) for side in sides]
        facts = [_checked(child.started)["facts"] for child in children]
        _check_same(facts, names)
        # Each backend drops other values: what can be compared then is the forward pass without.
        steps, last = (1, "forward") if facts[0]["dropout"] else (options.steps, None)
        for number in range(1, steps + 1):
            answers = [_checked(child.ask, step=number) for child in children]
            left, right = (_arrays(answer) for answer in answers)
            order = dict(answers[0]["order"])
            before = {"before": order.pop("before")}
            if last is not None:
                order = {last: order[last]}
            found += stages(number, order, left, right, options.allowed)
            if first := _first(found):
                start = next(iter(stages(number, before, left, right, options.allowed)))
                break
    return {
        "kind": "kmodels parity",
        "format": FORMAT,
        "sides": names,
        "frameworks": [fact["framework"] for fact in facts],
        "dropout": facts[0]["dropout"],
        "steps": steps,
        "tolerance": options.allowed,
        "equal": first is None,
        "first": None if first is None else _told(first, start),
        "stages": [_summary(stage) for stage in found],
    }


def _child(options: ParityOptions, side: Side, stack: ExitStack) -> Child:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kmodels-parity-"))
    job = {name: getattr(options, name) for name in _JOB}
    generic = "all" if side.ops == "generic" else ""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Child(
        side.backend,
        WORK,
        {**job, "preset": side.preset, "precision": side.precision, "folder": folder},
        environment=environment(side.backend, generic, cpus or 1),
        hidden=[name for name in BACKENDS if name != side.backend],
        limit=options.limit,
    )


def _checked(ask: Callable[..., Any], **request: object) -> dict[str, Any]:
    """Returns an answer; a child that failed becomes an error of one line."""
    try:
        return ask(**request)
    except ChildError as error:
        raise InputError(str(error)) from None


def _check_same(facts: list[dict[str, Any]], names: list[str]) -> None:
    same = ("parameters", "dropout", "image_shape", "kmodels", "keras")
    left, right = facts
    if wrong := [name for name in same if left[name] != right[name]]:
        text = "; ".join(
            f"{name} is {left[name]} on {names[0]} and {right[name]} on {names[1]}"
            for name in wrong
        )
        raise InputError(f"the two sides are not one model: {text}")


def _arrays(answer: dict[str, Any]) -> dict[str, np.ndarray]:
    with np.load(answer["file"]) as held:
        found = {key: held[str(i)] for i, key in enumerate(answer["keys"])}
    Path(answer["file"]).unlink()
    return found


def _first(found: list[Stage]) -> tuple[Stage, Difference] | None:
    for stage in found:
        if stage.first is not None:
            return stage, stage.first
    return None


def _told(first: tuple[Stage, Difference], start: Stage) -> dict[str, Any]:
    stage, tensor = first
    layer = tensor.name if stage.name == "forward" else tensor.name.rpartition("/")[0]
    differing = [found for found in start.differences if found.is_beyond]
    inside = [str(found) for found in differing if f"{found.name}/".startswith(f"{layer}/")]
    return {
        "step": stage.step,
        "stage": stage.name,
        "tensor": tensor.name,
        "text": str(tensor),
        "weights": inside,
    }


def _summary(stage: Stage) -> dict[str, Any]:
    worst = stage.worst
    return {
        "step": stage.step,
        "stage": stage.name,
        "count": len(stage.differences),
        "worst": worst.name,
        "apart": float(f"{worst.largest / worst.allowed:.3g}"),
    }
