"""All accelerator tables, in pieces that resume.

    make accelerator [ARGS='--only vit attention --minutes 9']

Each piece is a process of its own and leaves one JSON file in `--out`. A piece whose file is there,
of the same source and settings, does not run again, whether it succeeded or failed (`--retry` runs
those that failed). No piece starts whose estimate does not fit into `--minutes`: call again to
continue. The exit code is 0 if all chosen pieces ran and found nothing outside its tolerance.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from accelerator.child import ROOT, key, source, write
from accelerator.pieces import SMALL, Piece, pieces

RESULTS = ROOT / "benchmarks" / "results"
MINUTES = 9.0  # a piece that takes longer is stopped


def device() -> str:
    """A name for the folder of results: that of the first GPU, or cpu."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "cpu"
    name = done.stdout.splitlines()[0] if done.stdout.strip() else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def chosen(only: list[str], parser: argparse.ArgumentParser) -> list[Piece]:
    """The pieces whose name, table or backend is named."""
    found = pieces()
    known = {word for piece in found for word in (piece.name, piece.table, piece.backend)}
    if unknown := [word for word in only if word not in known]:
        parser.error(f"no piece is called {', '.join(unknown)}; --list names all")
    if not only:
        return found
    return [x for x in found if {x.name, x.table, x.backend} & set(only)]


def result(out: Path, piece: Piece, digest: str) -> dict[str, Any] | None:
    """The result of a piece, where it still holds."""
    path = out / f"{piece.name}.json"
    if not path.is_file():
        return None
    found = json.loads(path.read_text())
    return found if found["key"] == key(piece, digest) else None


def start(group: list[Piece], out: Path, digest: str, minutes: float) -> None:
    """Runs pieces of one backend in one process; a process that dies is a failure of its pieces.

    One that is stopped although it had less than its nine minutes is left for the next call.
    """
    path = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "KERAS_BACKEND": group[0].backend,
        "PYTHONPATH": path.rstrip(os.pathsep),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "accelerator.child", str(out), *(x.name for x in group)]
    log = out / f"{group[0].name}.log"
    with log.open("w") as stream:
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdout=stream,
                stderr=stream,
                timeout=60 * minutes,
                check=False,
            )
            code = f"the process ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            if minutes < MINUTES:
                return
            code = f"the process was stopped after {minutes:.0f} minutes"
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for piece in group:
        if result(out, piece, digest) is None:
            error = f"{code}: {said[-1] if said else ''}"[:300]
            write(out, piece, digest, state="failed", error=error, rows=[])


def groups(waiting: list[Piece]) -> list[list[Piece]]:
    """One piece a process; small pieces of a backend share one, since imports take longest."""
    if not SMALL:
        return [[piece] for piece in waiting]
    backends = dict.fromkeys(piece.backend for piece in waiting)
    return [[x for x in waiting if x.backend == name] for name in backends]


def say(number: int, total: int, piece: Piece, found: dict[str, Any]) -> None:
    if found:
        text = found.get("error") or f"{len(found['rows'])} rows in {found['seconds']:.0f} s"
    else:
        text = "the time was up"
    state = found.get("state", "left")
    print(f"[{number}/{total}] {piece.name:<28} {state:<7} {text}", flush=True)


def summary(found: dict[str, dict[str, Any]]) -> list[str]:
    """Lines of a table: kmodels' time beside that of the fastest other system of each case."""
    lines = []
    for name, content in found.items():
        by_case: dict[str, dict[str, float]] = {}
        for row in content["rows"]:
            if "median_ms" in row:
                by_case.setdefault(row["case"], {})[row["system"]] = row["median_ms"]
        for case, times in by_case.items():
            ours = {system: x for system, x in times.items() if system.startswith("kmodels")}
            others = {system: x for system, x in times.items() if system not in ours}
            cells = [
                f"{min(table, key=table.__getitem__)} {min(table.values()):.3f} ms" if table else ""
                for table in (ours, others)
            ]
            lines.append(f"{name:<28} {case:<44} {cells[0]:<34} {cells[1]}")
        if content.get("absent"):
            lines.append(f"{name:<28} not installed: {', '.join(content['absent'])}")
        lines += [f"{name:<28} OUTSIDE {text}" for text in content.get("outside", [])]
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="default: results/accelerator-DEVICE")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="pieces, tables")
    parser.add_argument("--minutes", type=float, help="start nothing that would take longer")
    parser.add_argument("--list", action="store_true", help="name the pieces and their estimates")
    parser.add_argument("--retry", action="store_true", help="run pieces that failed again")
    parser.add_argument("--pictures", action="store_true", help="only draw what is there")
    options = parser.parse_args(arguments)
    out = (options.out or RESULTS / f"accelerator-{device()}").resolve()
    wanted, digest = chosen(options.only, parser), source()
    found = {piece.name: result(out, piece, digest) for piece in wanted}
    if options.list:
        for piece in wanted:
            state = (found[piece.name] or {"state": "waits"})["state"]
            print(f"{piece.name:<28} {piece.minutes:4.1f} min (estimate)  {state}")
        print(f"{sum(piece.minutes for piece in wanted):.1f} minutes in all, by estimates")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    done = 0 if options.pictures else run_all(wanted, found, out, digest, options)
    there = {name: content for name, content in found.items() if content is not None}
    from accelerator import pictures

    for path in pictures.draw(there, out) if done or options.pictures else ():
        print(path)
    print(*summary(there), sep="\n")
    left = [name for name, content in found.items() if content is None]
    failed = [name for name, content in there.items() if content["state"] == "failed"]
    outside = sum(len(content.get("outside", [])) for content in there.values())
    good = len(there) - len(failed)
    print(f"{done} ran now, {good} done, {len(failed)} failed, {len(left)} left")
    if left:
        print(f"left: {', '.join(left)}; call again to continue")
    for name in failed:
        print(f"failed: {name}: {there[name]['error']}")
    return int(bool(left or failed or outside))


def run_all(
    wanted: list[Piece], found: dict[str, Any], out: Path, digest: str, options: argparse.Namespace
) -> int:
    """Runs what waits, as long as there is time; returns how many pieces ran."""
    begun, number = time.monotonic(), 0
    waiting = [
        piece
        for piece in wanted
        if found[piece.name] is None
        or (options.retry and (found[piece.name] or {})["state"] == "failed")
    ]
    for group in groups(waiting):
        spent = (time.monotonic() - begun) / 60
        needed = sum(piece.minutes for piece in group)
        if options.minutes is not None and spent + needed > options.minutes:
            break
        for piece in group:
            (out / f"{piece.name}.json").unlink(missing_ok=True)
            found[piece.name] = None
        left = MINUTES if options.minutes is None else options.minutes - spent
        start(group, out, digest, min(MINUTES, left))
        for piece in group:
            number += 1
            found[piece.name] = result(out, piece, digest)
            say(number, len(waiting), piece, found[piece.name] or {})
    return number
