"""A whole run of recipes/vit.py that is killed, or asked to stop, at random moments.

    python benchmarks/faults/runs.py [--kills 20] [--signals 20] [--write]

A run that was interrupted is started again until it is done, then the next one begins. Prints
counts, for the backend of KERAS_BACKEND.
"""

import json
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import tally
from processes import Run

from kmodels.checkpoint import manager
from kmodels.core.errors import InputError

FLAGS = (
    *("--preset", "vit_debug", "--data", "synthetic:96", "--batch-size", "8", "--epochs", "12"),
    *("--dropout", "0.1", "--ema", "0.9", "--accumulate", "2", "--mixup", "0.2", "--flip"),
    *("--checkpoint-every", "3", "--log-every", "2"),
)


def result(out: Path) -> dict[str, Any]:
    """Returns what must be equal."""
    found = json.loads((out / "result.json").read_text())
    rows = [row.split(",") for row in (out / "history.csv").read_text().splitlines()[1:]]
    return {
        "weights": found["weights_digest"],
        "losses": found["step_losses"],
        "metrics": found["metrics"],
        # A row has each once: its kind, epoch, step, loss, accuracy, validation.
        "rows": [row[:7] for row in rows],
    }


def saved(out: Path, said: str, steps: int) -> bool:
    """Returns whether the newest checkpoint is whole, and of the step that the run stopped at."""
    # A run that is past its last step has nothing more to save.
    stopped = int(said.partition("stopped at step ")[2].partition(" ")[0] or steps)
    try:
        found = manager.newest(out / "checkpoints")
    except InputError:
        return False
    return found is not None and not found[2] and found[1].step == stopped


def interrupted(signums: tuple[int, ...], wanted: int, early: float) -> dict[str, Any]:
    """Sends so many signals, and counts how the runs ended all the same.

    Args:
        signums: sent in turn.
        wanted: how many.
        early: share of them that comes before the first step of the process.
    """
    draw = random.Random(5)
    counts = Counter({"signals": 0, "before the first step": 0, "right exit codes": 0, "saved": 0})
    slowest = {True: 0.0, False: 0.0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = Run("vit", folder / "whole", *FLAGS)
        start = whole.to_step()
        whole.to_end()
        duration = time.perf_counter() - whole.started - start
        expected = result(folder / "whole")
        while counts["signals"] < wanted:
            out = folder / f"run{counts['runs']}"
            while True:
                run = Run("vit", out, *FLAGS)
                is_early = draw.random() < early
                if counts["signals"] >= wanted:
                    run.to_end()
                    break
                if not is_early:
                    run.to_step()
                # Several times in a run, up to its very end.
                if run.to_end(draw.uniform(0, start if is_early else duration / 3)):
                    break
                signum = signums[counts["signals"] % len(signums)]
                seconds, code = run.interrupt(signum), run.code
                if code == 0:
                    break  # It was over.
                # Nothing waits for a step after the training, nor is there anything to save.
                training = "stopped at step" in run.said
                slowest[training] = max(slowest[training], seconds)
                counts["after the training"] += not training
                counts["signals"] += 1
                counts["before the first step"] += is_early
                # A shell says 143 too where SIGTERM met no handler, as after the training.
                counts["right exit codes"] += code in (128 + signum, -signum)
                counts["saved"] += saved(out, run.said, len(expected["losses"]))
            if run.code:
                raise SystemExit(f"the run failed:\n{run.said}")
            counts["runs"] += 1
            counts["bit-equal runs"] += result(out) == expected
    seconds = {
        "slowest s after its step": round(slowest[True], 2),
        "slowest s after the training": round(slowest[False], 2),
    }
    return {**counts, **seconds}


def main() -> None:
    """Runs both and prints the counts."""
    parser = tally.arguments(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--signals", type=int, default=20)
    options = parser.parse_args()
    if options.kills:
        found = interrupted((signal.SIGKILL,), options.kills, 0.2)
        # SIGKILL lets nobody save.
        kept = ("before the first step", "runs", "bit-equal runs")
        counts = {"kills": found["signals"], **{name: found[name] for name in kept}}
        tally.report("runs_killed", counts, options)
    if options.signals:
        found = interrupted((signal.SIGTERM, signal.SIGINT), options.signals, 0.0)
        tally.report("runs_stopped", found, options)


if __name__ == "__main__":
    main()
