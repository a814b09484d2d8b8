"""Checks that rows can be compared: equal settings and losses on equal data and weights."""

from collections.abc import Sequence
from typing import Any

from kmodels.core.errors import InputError

# Relative difference of a loss. TF32 and bfloat16 keep 10 and 7 bits behind the point, and each
# backend rounds in other places; a few steps of an optimizer carry that on.
LOSSES = {"float32": 1e-4, "tf32": 5e-3, "mixed_bfloat16": 2e-2, "bfloat16": 3e-2}
# The facts that all rows share, and those that rows of one precision share beside them.
ALL = (
    *("parameters", "trainable_parameters", "dropout", "image_shape", "optimizer"),
    *("kmodels", "keras", "threads", "text"),
)
OF_PRECISION = ("variables", "compute", "products")


class Refused(InputError):
    """Rows differ in more than what they are to compare.

    Attributes:
        lines: what differs, a line each.
    """

    def __init__(self, lines: Sequence[str]):
        super().__init__("; ".join(lines))
        self.lines = list(lines)


def differences(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns what must be equal and is not.

    Args:
        rows: with `label`, `precision`, `losses` and `facts`; the first one is what the others are
            held against, and among those of a precision the first of these.

    Returns:
        Sentences.
    """
    found = []
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        beside = first.setdefault(row["precision"], row)
        found += _facts(rows[0], row, ALL)
        found += _facts(beside, row, OF_PRECISION)
        found += _losses(beside, row)
    return found


def _facts(beside: dict[str, Any], row: dict[str, Any], names: Sequence[str]) -> list[str]:
    return [
        f"{row['label']}: {name} is {row['facts'].get(name)!r}, "
        f"{beside['label']} has {beside['facts'].get(name)!r}"
        for name in names
        if row["facts"].get(name) != beside["facts"].get(name)
    ]


def _losses(beside: dict[str, Any], row: dict[str, Any]) -> list[str]:
    allowed = LOSSES[row["precision"]]
    pairs = list(zip(_compared(beside), _compared(row), strict=True))
    for step, (theirs, ours) in enumerate(pairs, 1):
        # It does not ask for "more than", which a NaN would pass.
        if not abs(ours - theirs) <= allowed * abs(theirs):
            return [
                f"{row['label']}: the loss of step {step} is {ours:.6g}, {beside['label']} has "
                f"{theirs:.6g}; {allowed:g} of it is allowed between them"
            ]
    return []


def _compared(row: dict[str, Any]) -> list[float]:
    """Returns the first losses; with dropout the one of evaluation, where nothing is dropped."""
    evaluated = row["facts"].get("evaluated")
    return row["losses"] if evaluated is None else [evaluated]


def loss_difference(beside: dict[str, Any], row: dict[str, Any]) -> float:
    """Returns the largest relative difference between the losses of two rows."""
    pairs = zip(_compared(beside), _compared(row), strict=True)
    return max(abs(ours - theirs) / max(abs(theirs), 1e-30) for theirs, ours in pairs)
