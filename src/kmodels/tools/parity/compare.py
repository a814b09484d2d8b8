"""Two traces of the same training, value by value in the order in which they were computed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# How far rounding may take one side from the exact result, as a share of a tensor's largest value.
TOLERANCES = {"float32": 1e-4, "tf32": 1e-2, "mixed_bfloat16": 5e-2, "bfloat16": 5e-2}
# A tensor counts as at least this share of the largest of its stage: the gradient of a key's bias,
# say, is 0 except for rounding.
FLOOR = 1e-2


@dataclass(frozen=True)
class Difference:
    """The largest difference of a tensor.

    Attributes:
        name: name of the tensor.
        largest: largest of the absolute differences.
        allowed: for that tensor.
        index: number of the element, () for a scalar.
        values: there, of both sides; None where the shapes differ.
    """

    name: str
    largest: float
    allowed: float
    index: tuple[int, ...]
    values: tuple[float, float] | None

    @property
    def is_beyond(self) -> bool:
        """True if that is more than is allowed, or no number."""
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
        return next((found for found in self.differences if found.is_beyond), None)

    @property
    def worst(self) -> Difference:
        """The tensor that differs most, measured by what is allowed."""
        return max(self.differences, key=lambda found: found.largest / found.allowed)


def difference(
    name: str, left: np.ndarray, right: np.ndarray, tolerance: float, scale: float
) -> Difference:
    """Compares two arrays.

    Args:
        name: name of the tensor.
        left: value of the first side.
        right: value of the second side.
        tolerance: share of the larger of `scale` and the largest value.
        scale: what the tensor counts as at least.
    """
    left, right = np.asarray(left, "float64"), np.asarray(right, "float64")
    largest = float(np.max(np.abs(left), initial=0.0))
    allowed = tolerance * max(largest if np.isfinite(largest) else 0.0, scale, 1e-30)
    if left.shape != right.shape:
        return Difference(name, float("nan"), allowed, (), None)
    with np.errstate(invalid="ignore"):
        apart = np.abs(left - right)
    # Infinities of one sign are equal; what is not a number differs from everything.
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
    """Yields the stages of one step.

    Args:
        step: its number.
        order: names of the tensors by stage.
        left: arrays by "stage:name", of the first side.
        right: those of the second side; one that is missing has another shape.
        tolerance: see `difference`.

    Yields:
        Returns the stages in the order of computation.
    """
    for name, tensors in order.items():
        arrays = [np.asarray(left[f"{name}:{tensor}"]) for tensor in tensors]
        largest = [float(np.max(np.abs(array), initial=0.0)) for array in arrays]
        scale = FLOOR * max([value for value in largest if np.isfinite(value)], default=0.0)
        found = (
            difference(tensor, array, right.get(f"{name}:{tensor}", ()), tolerance, scale)
            for tensor, array in zip(tensors, arrays, strict=True)
        )
        yield Stage(step, name, tuple(found))
