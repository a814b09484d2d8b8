"""Files from elsewhere: mutated, handmade and hostile. Only our error comes out, nothing is run.

    python benchmarks/faults/foreign.py [--quick] [--write]

Prints counts.
"""

import io
import json
import pickle
import random
import resource
import struct
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tally

from kmodels.core.errors import InputError
from kmodels.weights import read_npz, read_safetensors
from kmodels.weights.files import INDEX, PICKLED

CANARY = "kmodels_canary"
_watched: dict[str, Any] = {"inside": None, "found": []}


def _watch(event: str, arguments: tuple) -> None:
    inside = _watched["inside"]
    if inside is None:
        return
    if event in ("os.system", "subprocess.Popen", "socket.connect", "os.exec", "os.posix_spawn"):
        _watched["found"].append((event, str(arguments)[:100]))
    if event == "open" and isinstance(arguments[0], str) and CANARY in arguments[0]:
        _watched["found"].append((event, arguments[0]))


class Watched:
    """Notes what is run or opened inside the block that should not be."""

    def __enter__(self) -> list:
        if not _watched.get("on"):
            sys.addaudithook(_watch)
            _watched["on"] = True
        _watched.update(inside=True, found=[])
        return _watched["found"]

    def __exit__(self, *_: object) -> None:
        _watched["inside"] = None


def attempt(read: Callable[[Path], Any], path: Path, counts: dict[str, Any]) -> None:
    """Reads all tensors of a file, and counts how that ended."""
    start = time.perf_counter()
    try:
        for tensor in read(path).values():
            tensor.read()
        counts["loaded"] += 1
    except InputError as error:
        counts["refused"] += 1
        counts["more than a line"] += "\n" in str(error)
    except Exception as error:
        counts["other errors"] += 1
        counts.setdefault("names", set()).add(type(error).__name__)
    counts["slowest s"] = max(counts["slowest s"], round(time.perf_counter() - start, 3))


def start() -> dict[str, Any]:
    """Counts of nothing."""
    names = ("loaded", "refused", "more than a line", "other errors")
    return {**dict.fromkeys(names, 0), "slowest s": 0.0}


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Bytes turned, cut, doubled or put in."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        place = draw.randrange(len(changed) + 1)
        kind = draw.randrange(5)
        if kind == 0:
            changed[place : place + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            del changed[place : place + draw.randrange(1, 20)]
        elif kind == 2:
            changed[place:place] = changed[place : place + 16]
        elif kind == 3:
            changed[place:place] = draw.choice((b"9", b"-1", b"[", b'"', b"\xff", b"}", b"e400"))
        else:
            changed[:8] = struct.pack("<Q", draw.choice((0, 1, 2**20, 2**40, 2**63, len(changed))))
        if not changed:
            break
    return bytes(changed)


def file(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file of any description."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    """The description of one tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HANDMADE: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "huge header": struct.pack("<Q", 2**63 - 1) + b"{}",
    "header past the end": struct.pack("<Q", 100) + b"{}",
    "header of 200 MB": struct.pack("<Q", 200_000_000) + b"{}",
    "not JSON": file(b"{{{{"),
    "a list": file([1]),
    "a text": file("x"),
    "bad UTF-8": file(b'{"\xff": 1}'),
    "deep": file(b"[" * 100_000),
    "no offsets": file({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8),
    "offsets reversed": file({"a": tensor(offsets=(8, 0))}, b"\0" * 8),
    "offsets negative": file({"a": tensor(offsets=(-8, 0))}, b"\0" * 8),
    "offsets as text": file({"a": tensor(offsets=("0", "8"))}, b"\0" * 8),
    "offsets past the end": file({"a": tensor(offsets=(0, 80))}, b"\0" * 8),
    "overlap": file({"a": tensor(), "b": tensor(offsets=(4, 12))}, b"\0" * 12),
    "hole": file({"a": tensor(), "b": tensor(offsets=(16, 24))}, b"\0" * 24),
    "more data": file({"a": tensor()}, b"\0" * 80),
    "less data": file({"a": tensor()}, b"\0" * 4),
    "shape and size differ": file({"a": tensor(shape=(3,))}, b"\0" * 8),
    "shape overflows": file({"a": tensor(shape=(2**40, 2**40))}, b"\0" * 8),
    "shape negative": file({"a": tensor(shape=(-2,))}, b"\0" * 8),
    "shape as text": file({"a": {**tensor(), "shape": "2"}}, b"\0" * 8),
    "unknown type": file({"a": tensor(dtype="F33")}, b"\0" * 8),
    "metadata of numbers": file({"__metadata__": {"a": 1}, "a": tensor()}, b"\0" * 8),
    "a hundred thousand of no size": file(
        {f"tensor_{n}": tensor(shape=(0,), offsets=(0, 0)) for n in range(100_000)}
    ),
}


def safetensors(trials: int) -> dict[str, Any]:
    """Handmade files, all to be refused, and mutations of a good one."""
    counts, draw = start(), random.Random(2)
    good = file(
        {
            "a/kernel": tensor(shape=(2, 3), offsets=(0, 24)),
            "b": tensor("BF16", (4,), (24, 32)),
            "c": tensor("I8", (), (32, 33)),
        },
        bytes(range(33)),
    )
    with tempfile.TemporaryDirectory() as name, Watched() as found:
        path = Path(name) / "model.safetensors"
        for content in HANDMADE.values():
            path.write_bytes(content)
            attempt(read_safetensors, path, counts)
        handmade = {"handmade": len(HANDMADE), "of them loaded": counts["loaded"]}
        for _ in range(trials):
            path.write_bytes(mutated(good, draw))
            attempt(read_safetensors, path, counts)
    return {**handmade, "mutated": trials, **tally.plain(counts), "events": len(found)}


def indexes(trials: int) -> dict[str, Any]:
    """Indexes of shards: mutated, and such as point elsewhere."""
    counts, draw = start(), random.Random(3)
    with tempfile.TemporaryDirectory() as name, Watched() as found:
        folder = Path(name) / "model"
        folder.mkdir()
        outside = Path(name) / f"{CANARY}.safetensors"
        content = file({"a": tensor()}, b"\0" * 8)
        outside.write_bytes(content)
        found.clear()
        (folder / "one.safetensors").write_bytes(content)
        good = json.dumps({"weight_map": {"a": "one.safetensors"}}).encode()
        hostile = [f"../{outside.name}", str(outside), f"x/../../{outside.name}", "", ".", "..",
                   "one.safetensors\0", ["one.safetensors"], {"a": 1}, 3, None, INDEX]  # fmt: skip
        for shard in hostile:
            (folder / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
            attempt(read_safetensors, folder, counts)
        loaded = counts["loaded"]
        for _ in range(trials):
            changed = mutated(good, draw)
            if draw.random() < 0.3:
                changed = good.replace(
                    b"one", draw.choice((b"../one", b"/etc/one", b"two", b"\\u0000"))
                )
            (folder / INDEX).write_bytes(changed)
            attempt(read_safetensors, folder, counts)
    return {
        "hostile": len(hostile), "of them loaded": loaded, "mutated": trials,
        **tally.plain(counts), "events": len(found),
    }  # fmt: skip


class Payload:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> tuple:
        import os

        return os.system, (f"touch {tempfile.gettempdir()}/{CANARY}",)


def pickles(trials: int) -> dict[str, Any]:
    """Pickles where weights are expected."""
    counts, draw = start(), random.Random(4)
    payload = pickle.dumps({"a": Payload()})
    array = io.BytesIO()
    np.savez(array, a=np.arange(6.0), b=np.ones((2, 2), "float16"))
    good = array.getvalue()
    objects = io.BytesIO()
    np.savez(objects, a=np.array([Payload()], dtype=object))
    bare = io.BytesIO()
    with zipfile.ZipFile(bare, "w") as archive:
        archive.writestr("model/data.pkl", payload)
        archive.writestr("model/version", "3\n")
    with tempfile.TemporaryDirectory() as name, Watched() as found:
        folder = Path(name)
        npz = folder / "model.npz"
        for content in (objects.getvalue(), payload, b""):
            npz.write_bytes(content)
            attempt(read_npz, npz, counts)
        for content in (payload, bare.getvalue(), pickle.dumps([1, 2]), b"", b"PK\x03\x04"):
            (folder / PICKLED).write_bytes(content)
            attempt(read_safetensors, folder, counts)
        hostile = sum(counts[key] for key in ("loaded", "refused", "other errors"))
        loaded = counts["loaded"]
        for _ in range(trials):
            npz.write_bytes(mutated(good, draw))
            attempt(read_npz, npz, counts)
    return {
        "hostile": hostile, "of them loaded": loaded, "mutated npz": trials,
        **tally.plain(counts), "events": len(found),
    }  # fmt: skip


def _peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    """Runs all and prints the counts."""
    options = tally.arguments(__doc__).parse_args()
    quick, before = options.quick, _peak_mb()
    found: dict[str, Any] = {
        "safetensors": safetensors(300 if quick else 20_000),
        "indexes of shards": indexes(200 if quick else 2_000),
        "pickles and npz": pickles(100 if quick else 2_000),
    }
    found["memory above the start, MB"] = _peak_mb() - before
    tally.report("foreign", found, options)


if __name__ == "__main__":
    main()
