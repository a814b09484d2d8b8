"""`kmodels parity`: names the first tensor that differs when two backends train one model."""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kmodels.core.environment import BACKENDS, cores
from kmodels.core.errors import InputError
from kmodels.tools.compare_backends.children import (
    Child,
    ChildError,
    environment,
    installed,
    stopped_by_signals,
)
from kmodels.tools.compare_backends.options import ParityOptions, Side

__all__ = ["Difference", "ParityOptions", "Side", "Stage", "run"]

FORMAT = 1
# A tensor is compared at no less than this share of the largest of its stage: the gradient of a
# key's bias, for example, is 0 except for rounding.
FLOOR = 1e-2


@dataclass(frozen=True)
class Difference:
    """The largest difference of a tensor.

    Attributes:
        name: name of the tensor.
        largest: largest of the absolute differences.
        allowed: largest difference that this tensor may have.
        index: index of the element, () for a scalar.
        values: both values of that element; None if the shapes differ.
    """

    name: str
    largest: float
    allowed: float
    index: tuple[int, ...]
    values: tuple[float, float] | None

    @property
    def is_beyond(self) -> bool:
        """True if the difference is larger than allowed, or NaN."""
        return not self.largest <= self.allowed

    def __str__(self) -> str:
        if self.values is None:
            return f"{self.name}: the shapes differ"
        at = ", ".join(map(str, self.index))
        return (
            f"{self.name}: differs by {self.largest:.3g} at ({at}), {self.values[0]:.6g} and "
            f"{self.values[1]:.6g}; {self.allowed:.3g} is allowed"
        )


@dataclass(frozen=True)
class Stage:
    """A part of a step: "forward", "loss", "gradients" or "weights".

    Attributes:
        step: from 1.
        name: name of the part.
        differences: one of each tensor, in the order of computation.
    """

    step: int
    name: str
    differences: tuple[Difference, ...]

    @property
    def first(self) -> Difference | None:
        """The first tensor that differs too much."""
        return next((one for one in self.differences if one.is_beyond), None)

    @property
    def worst(self) -> Difference:
        """The tensor with the largest difference relative to its tolerance."""
        return max(self.differences, key=lambda one: one.largest / one.allowed)


def difference(
    name: str, left: np.ndarray, right: np.ndarray, tolerance: float, scale: float
) -> Difference:
    """Compares two arrays; `tolerance` is a share of the largest value, at least of `scale`."""
    left, right = np.asarray(left, "float64"), np.asarray(right, "float64")
    largest = float(np.max(np.abs(left), initial=0.0))
    allowed = tolerance * max(largest if np.isfinite(largest) else 0.0, scale, 1e-30)
    if left.shape != right.shape:
        return Difference(name, float("nan"), allowed, (), None)
    with np.errstate(invalid="ignore"):
        apart = np.abs(left - right)
    # Infinities of one sign are equal; NaN differs from everything.
    apart = np.where(left == right, 0.0, np.where(np.isnan(apart), np.inf, apart))
    flat = int(np.argmax(apart)) if apart.size else 0
    index = tuple(int(i) for i in np.unravel_index(flat, apart.shape)) if apart.size else ()
    values = (float(left[index]), float(right[index])) if apart.size else (0.0, 0.0)
    return Difference(name, float(apart[index]) if apart.size else 0.0, allowed, index, values)


def stages(
    step: int,
    order: Mapping[str, Sequence[str]],
    left: Mapping[str, Any],
    right: Mapping[str, Any],
    tolerance: float,
) -> Iterator[Stage]:
    """Yields the stages of one step, of arrays by "stage:name".

    An array that the second side lacks counts as of another shape.

    Yields:
        The stages in the order of computation.
    """
    for name, tensors in order.items():
        arrays = [np.asarray(left[f"{name}:{tensor}"]) for tensor in tensors]
        largest = [float(np.max(np.abs(array), initial=0.0)) for array in arrays]
        scale = FLOOR * max([value for value in largest if np.isfinite(value)], default=0.0)
        differences = (
            difference(tensor, array, right.get(f"{name}:{tensor}", ()), tolerance, scale)
            for tensor, array in zip(tensors, arrays, strict=True)
        )
        yield Stage(step, name, tuple(differences))


def run(options: ParityOptions) -> dict[str, Any]:
    """Trains on both sides, step by step, until they differ.

    Args:
        options: the sides and steps.

    Returns:
        `equal`; `sides`, their names; `first` (`step`, `stage` and `tensor`, `text` with the
        values, and `weights`: those of that layer that differed before the step), None if they
        are equal; `stages`, each with `step`, `stage`, `count`, `worst` and `apart` (its
        largest difference over the tolerance), until the first step that differs; `tolerance`.

    Raises:
        InputError: if a backend is not installed, a preset does not have a setting, or the sides
            are different models.
    """
    sides = (options.left, options.right)
    for side in sides:
        if not installed(sys.executable, [side.backend]):
            name = side.backend
            raise InputError(f"{name} is not installed: pip install 'kmodels[{name}]'")
    names = [options.left.label(options.right), options.right.label(options.left)]
    compared: list[Stage] = []
    first = None
    with stopped_by_signals(), ExitStack() as stack:
        children = [stack.enter_context(_child(options, side, stack)) for side in sides]
        facts = [_checked(child.started)["facts"] for child in children]
        _check_same(facts, names)
        # Each backend drops other values, so only the forward pass without dropout is compared.
        steps, last = (1, "forward") if facts[0]["dropout"] else (options.steps, None)
        for number in range(1, steps + 1):
            answers = [_checked(child.ask, step=number) for child in children]
            left, right = (_arrays(answer) for answer in answers)
            order = dict(answers[0]["order"])
            before = {"before": order.pop("before")}
            if last is not None:
                order = {last: order[last]}
            compared += stages(number, order, left, right, options.allowed)
            differing = ((stage, stage.first) for stage in compared if stage.first is not None)
            if (first := next(differing, None)) is not None:
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
        "first": None if first is None else _first_difference(first, start),
        "stages": [_summary(stage) for stage in compared],
    }


def _child(options: ParityOptions, side: Side, stack: ExitStack) -> Child:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kmodels-parity-"))
    generic = "all" if side.ops == "generic" else ""
    return Child(
        side.backend,
        "kmodels.tools.compare_backends.work",
        {
            **options.job,
            "command": "parity",
            "optimizer": "gradients",
            "compile": "auto",
            "lora": False,
            "rank": 4,
            "preset": side.preset,
            "precision": side.precision,
            "folder": folder,
        },
        environment=environment(side.backend, generic, cores()),
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
    with np.load(answer["file"]) as archive:
        arrays = {key: archive[str(i)] for i, key in enumerate(answer["keys"])}
    Path(answer["file"]).unlink()
    return arrays


def _first_difference(first: tuple[Stage, Difference], start: Stage) -> dict[str, Any]:
    stage, tensor = first
    layer = tensor.name if stage.name == "forward" else tensor.name.rpartition("/")[0]
    differing = [one for one in start.differences if one.is_beyond]
    inside = [str(one) for one in differing if f"{one.name}/".startswith(f"{layer}/")]
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
