"""All accelerator tables, in pieces that resume.

    make accelerator [ARGS='--only vit attention --minutes 9']
    make accelerator QUARTER=1; make accelerator QUARTER=2

Each piece is a process of its own and leaves one JSON file in `--out`. A piece whose file is there,
of the same source and settings, does not run again, whether it succeeded, failed or was cut at its
limit (`--retry` runs those that failed or were cut). No piece starts whose estimate does not fit
into `--minutes`: call again to continue. `--quarter` runs the most telling pieces in two commands,
each of which ends within 8.5 minutes. The exit code is 0 if all chosen pieces ran to their end and
found nothing outside its tolerance.
"""

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from accelerator.child import ROOT, key, source, write
from accelerator.pieces import SMALL, Piece, pieces, quarter

RESULTS = ROOT / "benchmarks" / "results"


def device() -> str:
    """A name for the folder of results: that of the first GPU, or cpu."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "cpu"
    name = done.stdout.splitlines()[0] if done.stdout.strip() else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def chosen(only: list[str], command: int | None, parser: argparse.ArgumentParser) -> list[Piece]:
    """The pieces of a run, or of a command of the quarter, that `--only` names."""
    found = pieces() if command is None else quarter(command)
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


def start(group: list[Piece], out: Path, digest: str, seconds: float) -> None:
    """Runs pieces: those of a backend in one process, backends side by side.

    When the time is over, what still runs is killed. Its piece keeps the rows that it has written
    and is "cut"; that of a process that died has failed. The pieces after it are left.
    """
    until = time.monotonic() + seconds
    names = dict.fromkeys(piece.backend for piece in group)
    parts = [[piece for piece in group if piece.backend == name] for name in names]
    processes: list[subprocess.Popen[bytes]] = []
    codes: list[int | None] = []
    try:
        for part in parts:
            processes.append(launch(part, out))
        for process in processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
            codes.append(process.poll())
    finally:
        for process in processes:
            try:  # with the processes that it started
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    for part, code in zip(parts, codes, strict=True):
        for piece in part:
            content = result(out, piece, digest) or {"state": "cut", "rows": []}
            if content["state"] != "cut":
                continue
            if code is None:
                content["error"] = f"stopped after {seconds:.0f} s"
            else:
                said = log_of(part, out).read_text(errors="replace").split("\n")
                last = next((line for line in reversed(said) if line.strip()), "")
                content["state"] = "failed"
                content["error"] = f"the process ended with {code}: {last}"[:300]
            write(out, piece, digest, content)
            break


def launch(part: list[Piece], out: Path) -> "subprocess.Popen[bytes]":
    """Starts the process of pieces of one backend."""
    path = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "KERAS_BACKEND": part[0].backend,
        "PYTHONPATH": path.rstrip(os.pathsep),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "accelerator.child", str(out), *(x.name for x in part)]
    with log_of(part, out).open("w") as stream:
        return subprocess.Popen(
            command, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )


def log_of(part: list[Piece], out: Path) -> Path:
    return out / f"{part[0].name}.log"


def groups(waiting: list[Piece], command: int | None) -> list[list[Piece]]:
    """One piece a process, but small pieces of a backend share one, since imports take longest.

    In a quarter each piece has its limit, and the correctness of both backends is one group.
    """
    if command is not None:
        together = [piece for piece in waiting if piece.table == "correctness"]
        return [together] * bool(together) + [[x] for x in waiting if x not in together]
    if not SMALL:
        return [[piece] for piece in waiting]
    backends = dict.fromkeys(piece.backend for piece in waiting)
    return [[x for x in waiting if x.backend == name] for name in backends]


def say(number: int, total: int, piece: Piece, found: dict[str, Any]) -> None:
    rows = "the time was up"
    if found:
        rows = f"{len(found['rows'])} rows in {found.get('seconds', 0):.0f} s"
    text = f"{rows}, {found['error']}" if "error" in found else rows
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
    parser.add_argument("--quarter", type=int, choices=(1, 2), help="a command of the quarter hour")
    parser.add_argument("--minutes", type=float, help="start nothing that would take longer")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="cut pieces after these")
    parser.add_argument("--list", action="store_true", help="name the pieces and their estimates")
    parser.add_argument(
        "--retry", action="store_true", help="run pieces again that failed or were cut"
    )
    parser.add_argument("--pictures", action="store_true", help="only draw what is there")
    parser.add_argument("--page", action="store_true", help="only write docs/gpu.md")
    options = parser.parse_args(arguments)
    if options.page:
        from accelerator import page, pictures

        for folder, contents in page.quarters(page.RESULTS).items():
            pictures.draw({content["piece"]: content for content in contents}, folder)
        page.PAGE.write_text(page.text(page.RESULTS))
        return 0
    out = (options.out or RESULTS / f"accelerator-{device()}").resolve()
    wanted, digest = chosen(options.only, options.quarter, parser), source()
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

    # The time of a quarter is for measuring; --pictures draws later.
    if options.pictures or (done and options.quarter is None):
        print(*pictures.draw(there, out), sep="\n")
    print(*summary(there), sep="\n")
    left = [name for name, content in found.items() if content is None]
    by_state = {
        state: [name for name, content in there.items() if content["state"] == state]
        for state in ("done", "failed", "cut")
    }
    counts = [f"{len(names)} {state}" for state, names in by_state.items()]
    print(f"{done} ran now, {', '.join(counts)}, {len(left)} left")
    if left:
        print(f"left: {', '.join(left)}; call again to continue")
    for state in ("failed", "cut"):
        for name in by_state[state]:
            print(f"{state}: {name}: {there[name]['error']}")
    outside = sum(len(content.get("outside", [])) for content in there.values())
    return int(bool(left or by_state["failed"] or by_state["cut"] or outside))


def run_all(
    wanted: list[Piece], found: dict[str, Any], out: Path, digest: str, options: argparse.Namespace
) -> int:
    """Runs what waits, as long as there is time; returns how many pieces ran."""
    begun, number, until = time.monotonic(), 0, 0.0
    waiting = [
        piece
        for piece in wanted
        if found[piece.name] is None or (options.retry and found[piece.name]["state"] != "done")
    ]
    for group in groups(waiting, options.quarter):
        spent = time.monotonic() - begun
        needed = 60 * sum(piece.minutes for piece in group)
        if options.minutes is not None and spent + needed > 60 * options.minutes:
            break
        for piece in group:
            (out / f"{piece.name}.json").unlink(missing_ok=True)
            found[piece.name] = None
        limit = min(group[0].limit, options.limit or math.inf)
        until += limit
        if options.quarter is not None:
            limit = until - spent  # with what the pieces before did not need
        elif options.minutes is not None:
            limit = min(limit, 60 * options.minutes - spent)
        start(group, out, digest, limit)
        for piece in group:
            number += 1
            found[piece.name] = result(out, piece, digest)
            say(number, len(waiting), piece, found[piece.name] or {})
    return number
