"""The process of one piece, or in small form of several: `python -m accelerator.child OUT NAME...`.

Each piece leaves one JSON file: its rows, or one line that says why there are none. The file says
which source and settings it belongs to, so that a later run knows whether it still holds.
"""

import hashlib
import importlib
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerator.pieces import SMALL, Piece, pieces

ROOT = Path(__file__).resolve().parents[2]
BROKEN = "KMODELS_ACCELERATOR_BREAK"  # tests let one piece raise


def source() -> str:
    """A digest of what is measured: a checkout without git has no commit to tell."""
    digest = hashlib.sha256()
    for folder in (ROOT / "src", ROOT / "benchmarks" / "accelerator"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def key(piece: Piece, digest: str) -> dict[str, Any]:
    """What the result of a piece rests on."""
    return json.loads(json.dumps({"source": digest, "small": SMALL, **asdict(piece)}))


def write(out: Path, piece: Piece, digest: str, **content: Any) -> None:
    """Writes the file of a piece, whole or not at all."""
    target = out / f"{piece.name}.json"
    temporary = target.with_suffix(".partial")
    whole = {"piece": piece.name, "key": key(piece, digest), **content}
    temporary.write_text(json.dumps(whole, indent=1) + "\n")
    temporary.replace(target)


def run(piece: Piece) -> dict[str, Any]:
    """Returns what the table of a piece finds, and on what."""
    from accelerator import clock

    begun = time.perf_counter()
    if piece.name in os.environ.get(BROKEN, "").split(","):
        raise RuntimeError("this piece was told to break")
    found = importlib.import_module(f"accelerator.{piece.table}").run(piece.settings)
    failed = [f"{row.get('case')} {row['system']}" for row in found["rows"] if "failed" in row]
    ours = [name for name in failed if name.split()[-1].startswith("kmodels")]
    result = {"state": "failed" if ours else "done", "seconds": time.perf_counter() - begun}
    if ours:
        result["error"] = f"{len(ours)} of our rows failed: {', '.join(ours)}"[:300]
    return result | {"hardware": clock.hardware()} | found


def main(out: str, *names: str) -> None:
    """Runs pieces one after the other, each on its own."""
    from vit_peers.child import hide_others
    from vit_peers.results import revision

    hide_others(os.environ["KERAS_BACKEND"])
    sys.path.insert(1, str(ROOT / "src"))
    sys.path.append(str(ROOT / "tests"))
    digest, known = source(), {piece.name: piece for piece in pieces()}
    about = {"date": time.strftime("%Y-%m-%d"), "revision": revision(ROOT)}
    for name in names:
        try:
            found = run(known[name])
        except Exception as error:
            from accelerator.clock import one_line

            found = {"state": "failed", "error": one_line(error), "rows": []}
            found["traceback"] = traceback.format_exc().splitlines()[-12:]
        write(Path(out), known[name], digest, **about, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
