"""Losses and times of all systems, each asked in turn."""

import argparse
import statistics
from dataclasses import replace
from typing import Any

from rich.console import Console

from vit_peers import REFERENCE, SYSTEMS
from vit_peers.common import Settings
from vit_peers.compare import LOSS_TOLERANCE, finish, loss_difference
from vit_peers.parent import Child

console = Console(stderr=True)


def check_losses(names: list[str], settings: Settings, steps: int, cpu: int) -> dict[str, Any]:
    """Losses of each system, one after another, in float32 without dropout under SGD."""
    settings = replace(settings, precision="float32", dropout=0.0, optimizer="sgd")
    found: dict[str, Any] = {}
    for name in names:
        if "float32" not in SYSTEMS[name].precisions:
            continue  # the same code as a system that runs in float32
        try:
            child = Child(name, settings, cpu)
            losses = child.steps(steps)["losses"]
            child.stop()
        except RuntimeError as error:
            if name == REFERENCE:
                raise
            console.print(f"[red]{error}")
            found[name] = {"failed": str(error).splitlines()[-1]}
            continue
        found[name] = {"losses": [round(loss, 6) for loss in losses]}
        if name != REFERENCE:
            difference = loss_difference(found[REFERENCE]["losses"], losses)
            found[name]["largest_difference"] = float(f"{difference:.1e}")
            found[name]["equal"] = difference <= LOSS_TOLERANCE
        console.print(f"losses of {name}: {losses[0]:.5f} ... {losses[-1]:.5f}")
    return found


def measure(names: list[str], settings: Settings, options: argparse.Namespace) -> dict[str, Any]:
    """Times of all systems, in groups that fit into the memory; kmodels is in each group."""
    reference = start(REFERENCE, settings, options)
    if reference is None:
        raise SystemExit(f"{REFERENCE} failed, so there is nothing to compare with")
    found: dict[str, Any] = {}
    waiting = [name for name in names if name != REFERENCE]
    while waiting:
        group, largest = [reference], reference[0].peak_mb()
        while waiting:
            child = start(waiting.pop(0), settings, options)
            if child is None:
                continue
            group.append(child)
            peaks = [member.peak_mb() for member, _ in group]
            largest = max(largest, *peaks)
            if sum(peaks) + largest > options.memory_mb:
                break
        found |= measure_group(group, options)
    child, first = reference
    found.setdefault(REFERENCE, row(child, first, [child.steps(1) for _ in range(options.rounds)]))
    found[REFERENCE] |= child.stop()
    for name, values in found.items():
        finish(name, values, found[REFERENCE])
    return found


def start(name: str, settings: Settings, options: argparse.Namespace) -> Any:
    """Returns a child after its first steps, and what the first one took; None if it failed."""
    try:
        child = Child(name, settings, options.cpu)
        first = child.steps(1)
        child.steps(options.warm)
    except RuntimeError as error:
        console.print(f"[red]{error}")
        return None
    console.print(f"{name}: first step {first['wall_s']:.1f} s")
    return child, first


def measure_group(group: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    """One step of each child per round; ends all but the reference."""
    taken: dict[str, list[dict]] = {child.name: [] for child, _ in group}
    for turn in range(options.rounds):
        for i in range(len(group)):
            child, _ = group[(i + turn) % len(group)]
            taken[child.name].append(child.steps(1))
    found = {child.name: row(child, first, taken[child.name]) for child, first in group}
    for child, _ in group[1:]:
        found[child.name] |= child.stop() | {"beside": found[REFERENCE]["times"]}
    return found


def row(child: Child, first: dict, steps: list[dict]) -> dict[str, Any]:
    """Returns what is known of one system."""
    times = {clock: [round(step[clock], 5) for step in steps] for clock in ("cpu_s", "wall_s")}
    return {
        "about": SYSTEMS[child.name].about,
        "cpu_s": round(statistics.median(times["cpu_s"]), 4),
        "wall_s": round(statistics.median(times["wall_s"]), 4),
        "build_cpu_s": round(child.built["cpu_s"], 2),
        "first_step_cpu_s": round(first["cpu_s"], 2),
        "first_step_wall_s": round(first["wall_s"], 2),
        "facts": child.built["facts"],
        "times": times,
    }
