"""Writes the counts: to the screen and, with --write, to benchmarks/results/."""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras

from kmodels.checkpoint.state import versions

RESULTS = Path(__file__).resolve().parents[1] / "results"


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Parses what every script of this folder takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small counts")
    parser.add_argument("--write", action="store_true", help="also write to benchmarks/results/")
    return parser


def report(name: str, found: dict[str, Any], options: argparse.Namespace) -> None:
    """Prints the counts, and writes them where that is asked for."""
    backend = keras.backend.backend()
    content = {"question": name, "backend": backend, "versions": versions(), **found}
    text = json.dumps(content, indent=1) + "\n"
    print(text, end="")
    if options.write and not options.quick:
        file = f"faults_{name}_{backend}_cpu_{time.strftime('%Y-%m-%d')}.json"
        (RESULTS / file).write_text(text)


def damaged(files: list[Path], flips: int, cuts: int, draw: random.Random) -> Iterator[None]:
    """Turns one bit, or cuts one file, at a time; the file is whole again after each turn."""
    for number in range(flips + cuts):
        file = files[number % len(files)]
        content = file.read_bytes()
        if number < flips:
            place = draw.randrange(len(content) * 8)
            changed = bytearray(content)
            changed[place // 8] ^= 1 << place % 8
        else:
            changed = content[: draw.randrange(len(content))]
        file.write_bytes(changed)
        yield
        file.write_bytes(content)


def plain(counts: dict[str, Any]) -> dict[str, Any]:
    """Returns a value as JSON takes it."""
    return {key: sorted(v) if isinstance(v, set) else v for key, v in counts.items()}
