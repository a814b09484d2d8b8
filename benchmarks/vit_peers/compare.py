"""Refuses systems that are not comparable, and compares times and memory of those that are."""

import statistics
from collections.abc import Iterable
from typing import Any

from vit_peers import REFERENCE, SYSTEMS

# Relative; the rounding of 20 float32 steps through 12 blocks.
LOSS_TOLERANCE = 1e-4


def differences(reference: dict, facts: dict, tolerated: Iterable[str] = ()) -> list[str]:
    """Returns what differs between two systems' facts, a sentence each."""
    return [
        f"{name} is {facts.get(name)!r}, {REFERENCE} has {value!r}"
        for name, value in reference.items()
        if facts.get(name) != value and name not in tolerated
    ]


def loss_difference(reference: list[float], losses: list[float]) -> float:
    """Returns the largest relative difference between the losses of the same steps."""
    return max(abs(a - b) / abs(a) for a, b in zip(reference, losses, strict=True))


def finish(name: str, values: dict[str, Any], reference: dict[str, Any]) -> None:
    """Adds the ratios to a row, from rounds in which both took part, or why there are none."""
    beside, times = values.pop("beside", None), values["times"]
    every = differences(reference["facts"], values["facts"])
    refused = differences(reference["facts"], values["facts"], SYSTEMS[name].tolerated)
    values["differs"] = refused
    values["tolerated"] = [text for text in every if text not in refused]
    if beside is None or values["differs"]:
        return
    for clock in ("cpu_s", "wall_s"):
        ratio = statistics.median(times[clock]) / statistics.median(beside[clock])
        values[f"{clock[:-2]}_ratio"] = round(ratio, 3)
    if len(times["cpu_s"]) > 1:
        pairs = [a / b for a, b in zip(times["cpu_s"], beside["cpu_s"], strict=True)]
        low, _, high = statistics.quantiles(pairs, n=4)
        values["cpu_ratio_quartiles"] = [round(low, 3), round(high, 3)]
    values["peak_ratio"] = round(reference["peak_mb"] / values["peak_mb"], 3)


def refuse_unequal(found: dict[str, Any], losses: dict[str, Any]) -> None:
    """Takes the ratios from systems whose losses differ."""
    for name, values in found.items():
        checked = losses.get(name, {})
        if not checked.get("equal", True):
            difference = checked["largest_difference"]
            values["differs"].append(f"losses differ by {difference}, allowed {LOSS_TOLERANCE}")
        if values["differs"]:
            for key in ("cpu_ratio", "wall_ratio", "cpu_ratio_quartiles", "peak_ratio"):
                values.pop(key, None)
