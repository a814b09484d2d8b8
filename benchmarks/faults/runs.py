"""A whole run of recipes/vit.py that is killed, or asked to stop, at random moments.

    python benchmarks/faults/runs.py [--kills 20] [--signals 20] [--write]

Prints counts, for the backend of KERAS_BACKEND.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tally

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = (
    *("--preset", "vit_debug", "--data", "synthetic:96", "--batch-size", "8", "--epochs", "12"),
    *("--dropout", "0.1", "--ema", "0.9", "--accumulate", "2", "--mixup", "0.2", "--flip"),
    *("--checkpoint-every", "3", "--log-every", "2"),
)
# Steps take milliseconds here; without a pause a run would be over before it is killed.
PAUSE = "0.02"


def command(out: Path) -> list[str]:
    """The run, slowed down; `--resume` starts where there is no checkpoint."""
    slow = (
        "import sys, time, runpy; from kmodels.training import runner;"
        "real = runner.Runner.on_train_batch_end;"
        "runner.Runner.on_train_batch_end = "
        f"lambda *a, **k: (time.sleep({PAUSE}), real(*a, **k))[1];"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    recipe = str(ROOT / "recipes" / "vit.py")
    return [sys.executable, "-c", slow, recipe, *ARGUMENTS, "--resume", "--out", str(out)]


def begin(out: Path) -> subprocess.Popen:
    """Starts a run and returns once it trains, or is over."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    log = (out.parent / f"{out.name}.log").open("a")
    before = _size(out)
    child = subprocess.Popen(command(out), env=environment, stdout=log, stderr=log)
    while child.poll() is None and _size(out) == before:
        time.sleep(0.02)
    return child


def _size(out: Path) -> tuple[float, int]:
    file = out / "history.csv"
    try:
        found = file.stat()
    except OSError:
        return 0.0, 0
    return found.st_mtime, found.st_size


def result(out: Path) -> dict[str, Any]:
    """What must be equal."""
    found = json.loads((out / "result.json").read_text())
    rows = (out / "history.csv").read_text().splitlines()
    steps = [row.split(",")[2] for row in rows if row.startswith("step")]
    return {
        "weights": found["weights_digest"],
        "losses": found["step_losses"],
        "metrics": found["metrics"],
        "each step once": steps == [str(n + 1) for n in range(found["steps"])],
    }


def kills(wanted: int) -> dict[str, Any]:
    """SIGKILL at random moments, started again until done; compared with a run left alone."""
    draw = random.Random(5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begin(folder / "whole").wait()
        expected = result(folder / "whole")
        counts: dict[str, Any] = {"kills": 0, "runs": 0, "bit-equal runs": 0}
        while counts["kills"] < wanted:
            out = folder / f"run{counts['runs']}"
            while True:
                child = begin(out)
                time.sleep(draw.uniform(0.0, 1.5))
                if counts["kills"] >= wanted or child.poll() is not None:
                    child.wait()
                    break
                child.kill()
                child.wait()
                counts["kills"] += 1
            counts["runs"] += 1
            counts["bit-equal runs"] += result(out) == expected
        return counts


def signals(wanted: int) -> dict[str, Any]:
    """SIGTERM and SIGINT in turn at random moments: saved, gone soon, the right exit code."""
    draw = random.Random(6)
    counts: dict[str, Any] = {
        "signals": wanted,
        "right exit codes": 0,
        "saved": 0,
        "slowest s": 0.0,
    }
    with tempfile.TemporaryDirectory() as name:
        folder, done = Path(name), 0
        while done < wanted:
            out = folder / f"run{done}"
            child = begin(out)
            time.sleep(draw.uniform(0.0, 2.0))
            if child.poll() is not None:
                continue
            signum = (signal.SIGTERM, signal.SIGINT)[done % 2]
            start = time.perf_counter()
            child.send_signal(signum)
            code = child.wait()
            counts["slowest s"] = max(counts["slowest s"], round(time.perf_counter() - start, 2))
            counts["right exit codes"] += code == 128 + signum
            said = (folder / f"{out.name}.log").read_text()
            step = said.partition("stopped at step ")[2].partition(" ")[0]
            counts["saved"] += (out / "checkpoints" / f"step_{int(step or 0):08d}").is_dir()
            done += 1
    return counts


def main() -> None:
    """Runs both and prints the counts."""
    parser = tally.arguments(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--signals", type=int, default=20)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.kills:
        found["kill -9 of a whole run"] = kills(options.kills)
    if options.signals:
        found["SIGTERM and SIGINT"] = signals(options.signals)
    tally.report("runs", found, options)


if __name__ == "__main__":
    main()
