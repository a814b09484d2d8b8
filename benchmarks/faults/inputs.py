"""Damaged training data: pictures and lines of text. One line names the file, or the line.

python benchmarks/faults/inputs.py [--quick] [--write]
"""

import io
import json
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tally
from PIL import Image

from kmodels.core.errors import InputError
from kmodels.data import ImageLoader, open_dataset
from kmodels.text import read_records

LINES = (
    {"instruction": "Say it.", "context": "", "response": "It."},
    {"prompts": "a", "responses": "b"},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"text": "ä b ☃"},
)


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Bytes turned, cut, doubled or put in."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 2, 6))):
        place = draw.randrange(len(changed) + 1)
        kind = draw.randrange(4)
        if kind == 0:
            changed[place : place + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            del changed[place : place + draw.randrange(1, 30)]
        elif kind == 2:
            changed[place:place] = changed[place : place + 16]
        else:
            changed[place:place] = draw.choice((b"9", b"[", b'"', b"\xff", b"}", b"\n", b"null"))
    return bytes(changed)


def attempt(read: Callable[[], object], named: str, counts: dict[str, Any]) -> None:
    """Reads, and counts how that ended."""
    start = time.perf_counter()
    try:
        read()
        counts["read"] += 1
    except InputError as error:
        counts["told in a line"] += "\n" not in str(error) and named in str(error)
        counts["told badly"] += "\n" in str(error) or named not in str(error)
    except Exception as error:
        counts["other errors"] += 1
        counts.setdefault("names", set()).add(f"{type(error).__name__}: {error}"[:80])
    counts["slowest s"] = max(counts["slowest s"], round(time.perf_counter() - start, 3))


def start(trials: int) -> dict[str, Any]:
    """Counts of nothing."""
    names = ("read", "told in a line", "told badly", "other errors")
    return {"trials": trials, **dict.fromkeys(names, 0), "slowest s": 0.0}


def pictures(trials: int) -> dict[str, Any]:
    """Mutated PNG, JPEG, GIF and BMP files in a folder per class."""
    counts, draw = start(trials), random.Random(8)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 20, 3), "uint8"))
    good = []
    for kind in ("png", "jpg", "bmp"):
        stream = io.BytesIO()
        image.save(stream, "jpeg" if kind == "jpg" else kind)
        good.append((kind, stream.getvalue()))
    with tempfile.TemporaryDirectory() as name:
        for label in ("a", "b"):
            (Path(name) / label).mkdir()
            image.save(Path(name) / label / "good.png")
        for number in range(trials):
            kind, content = good[number % len(good)]
            file = Path(name) / "b" / f"bad.{kind}"
            file.write_bytes(mutated(content, draw))

            def read() -> None:
                size = (16, 16)
                data = open_dataset(f"folder:{name}", image_size=size, validation_split=0.0)
                loader = ImageLoader(data.train, 4, image_size=size, channels=3)
                for index in range(len(loader)):
                    loader[index]

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's, of pictures that it mends
                attempt(read, file.name, counts)
            file.unlink()
    return tally.plain(counts)


def lines(trials: int) -> dict[str, Any]:
    """Mutated lines between good ones."""
    counts, draw = start(trials), random.Random(9)
    good = [json.dumps(line, ensure_ascii=False).encode() for line in LINES]
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "data.jsonl"
        for number in range(trials):
            bad = mutated(good[number % len(good)], draw)
            file.write_bytes(b"\n".join([good[0], bad, good[1]]) + b"\n")
            attempt(lambda: read_records(file), f"{file.name} line", counts)
    return tally.plain(counts)


def main() -> None:
    """Runs both and prints the counts."""
    options = tally.arguments(__doc__).parse_args()
    found = {
        "pictures": pictures(60 if options.quick else 500),
        "lines": lines(100 if options.quick else 1000),
    }
    tally.report("inputs", found, options)


if __name__ == "__main__":
    sys.exit(main())
