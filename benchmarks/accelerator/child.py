"""The process of one piece, or in small form of several: `python -m accelerator.child OUT NAME...`.

Each piece leaves one JSON file: its rows, or one line that says why there are none. The file is
written after each part of a table, as "cut" until the last part is there: a piece that is killed
keeps the rows before. The file says which source and settings it belongs to, so that a later run
knows whether it still holds.
"""

import hashlib
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerator.pieces import SMALL, Piece, pieces, quarter

ROOT = Path(__file__).resolve().parents[2]
# Names of pieces, or "all": tests let them raise at once, or hang after their first part.
BROKEN, HANGING = "KMODELS_ACCELERATOR_BREAK", "KMODELS_ACCELERATOR_HANG"


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


def write(out: Path, piece: Piece, digest: str, content: dict[str, Any]) -> None:
    """Writes the file of a piece, whole or not at all."""
    target = out / f"{piece.name}.json"
    temporary = target.with_suffix(".partial")
    whole = {**content, "piece": piece.name, "key": key(piece, digest)}
    temporary.write_text(json.dumps(whole, indent=1) + "\n")
    temporary.replace(target)


def told(variable: str, piece: Piece) -> bool:
    """Returns True if a variable names the piece."""
    return bool({piece.name, "all"} & set(os.environ.get(variable, "").split(",")))


def run(piece: Piece, save: Callable[[dict[str, Any]], None]) -> None:
    """Saves the result of a piece after each part of its table."""
    begun = time.perf_counter()
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    content: dict[str, Any] = {}

    def save_as(state: str, **more: Any) -> None:
        content.update(more, state=state, seconds=round(time.perf_counter() - begun, 1))
        save({**content, "rows": list(rows.values())})

    save_as("cut")
    try:
        if told(BROKEN, piece):
            raise RuntimeError("this piece was told to break")
        from accelerator import clock

        content["hardware"] = clock.hardware()
        for part in importlib.import_module(f"accelerator.{piece.table}").run(piece.settings):
            rows |= {(row["case"], row["system"]): row for row in part.pop("rows", ())}
            save_as("cut", **part)
            while rows and told(HANGING, piece):
                time.sleep(1.0)
    except Exception as error:
        from accelerator.clock import one_line

        last = traceback.format_exc().splitlines()[-12:]
        save_as("failed", error=one_line(error), traceback=last)
        return
    failed = [f"{case} {system}" for (case, system), row in rows.items() if "failed" in row]
    ours = [name for name in failed if name.split()[-1].startswith("kmodels")]
    if ours:
        save_as("failed", error=f"{len(ours)} of our rows failed: {', '.join(ours)}"[:300])
    else:
        save_as("done")


def main(out: str, *names: str) -> None:
    """Runs pieces one after the other, each on its own."""
    from vit_peers.child import hide_others
    from vit_peers.results import revision

    hide_others(os.environ["KERAS_BACKEND"])
    sys.path.insert(1, str(ROOT / "src"))
    sys.path.append(str(ROOT / "tests"))
    digest = source()
    known = {piece.name: piece for piece in (*pieces(), *quarter(1), *quarter(2))}
    about = {"date": time.strftime("%Y-%m-%d"), "revision": revision(ROOT)}
    for piece in map(known.__getitem__, names):
        run(piece, lambda content, piece=piece: write(Path(out), piece, digest, about | content))


if __name__ == "__main__":
    main(*sys.argv[1:])
