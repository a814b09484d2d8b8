"""The table of counts in benchmarks/README.md; benchmarks/report.py puts it there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
BACKENDS = ("torch", "jax", "tensorflow")
Content = dict[str, Any]
FEATURES = (
    *("shuffle", "dropout", "augmentation", "schedule", "LoRA", "EMA", "accumulation"),
    "all of them",
)


def total(content: Any, name: str) -> int:
    """Sums a count over all parts, however deep they lie."""
    if not isinstance(content, dict):
        return 0
    found = content.get(name, 0)
    return (found if isinstance(found, int) else 0) + sum(total(v, name) for v in content.values())


def of(content: Content, part: str, name: str, all_of: str) -> str:
    """Returns text such as "20 of 20"."""
    found = content[part] if part else content
    return f"{found[name]:,} of {found[all_of]:,}"


def resumed(found: Content) -> str:
    """Sums over the features and all cuts."""
    cases = [found[name] for name in FEATURES]
    largest = max(case["largest difference"] for case in cases)
    equal, cuts = (sum(case[name] for case in cases) for name in ("equal", "cuts"))
    return f"{equal} of {cuts}, largest difference {largest}"


def lora(found: Content) -> str:
    """Returns what came of base and adapter."""
    case = found["LoRA run"]
    base = case["base bit-equal in memory and on the disk"]
    equal = case["weights and losses bit-equal to a run left alone"]
    wrong, tensors = case["of them not lora_A or lora_B"], case["tensors of the adapter"]
    return f"base {base}, adapter {equal}; {wrong} of {tensors} tensors".replace("True", "equal")


def damaged(part: str) -> Callable[[Content], str]:
    """Wrong loads of all files that were damaged."""
    return lambda c: f"{c[part]['wrong loads']} of {c[part]['bit flips'] + c[part]['cuts']:,}"


def hostile(found: Content) -> str:
    """Returns the counts of files from elsewhere."""
    files = total(found, "refused") + total(found, "loaded")
    return f"{total(found, 'other errors')} of {files:,}"


# A row has what was done and what is counted, the script's question, and the count.
ROWS: tuple[tuple[str, str, Callable[[Content], str]], ...] = (
    (
        "kill -9 while checkpoints are written: the old or the new state whole",
        "writing",
        lambda c: of(c, "kill -9 while writing", "whole", "trials"),
    ),
    (
        "20 times kill -9 of whole runs of `recipes/vit.py`: runs that end with the same bits",
        "runs_killed",
        lambda c: of(c, "", "bit-equal runs", "runs"),
    ),
    (
        "SIGTERM and SIGINT in whole runs: saved; seconds from the end of the step to the end",
        "runs_stopped",
        lambda c: f"{of(c, '', 'saved', 'signals')}; at most {c['slowest s after its step']} s",
    ),
    (
        "the same: right exit codes",
        "runs_stopped",
        lambda c: of(c, "", "right exit codes", "signals"),
    ),
    (
        "the same: runs that end with the same bits",
        "runs_stopped",
        lambda c: of(c, "", "bit-equal runs", "runs"),
    ),
    (f"runs cut at 5 steps ({', '.join(FEATURES)}): bit-equal", "resume", resumed),
    (
        "EarlyStopping, ReduceLROnPlateau, LearningRateScheduler, ModelCheckpoint: decided alike",
        "resume",
        lambda c: of(c, "callbacks", "same decisions", "cuts"),
    ),
    (
        "a LoRA run of 500 steps killed every 50: bits; tensors of the base in its file",
        "lora",
        lora,
    ),
    (
        "NaN pixel, learning rate 1e6, overflow, from 10 steps on: checkpoints that hold one",
        "nonfinite",
        lambda c: f"{total(c, 'not finite')} of {total(c, 'checkpoints')}",
    ),
    (
        "saved on each backend, gone on with on each (all nine pairs), with six optimizers: arrays "
        "that are not bit-equal; the next 20 losses",
        "backends",
        lambda c: (
            f"{c['arrays not bit-equal']} in {c['runs']} runs; within "
            f"{c['largest difference of losses']}"
        ),
    ),
    (
        "disk full: clear error, former checkpoint intact",
        "writing",
        lambda c: of(c, "full disk", "former intact", "trials"),
    ),
    ("bits turned and cuts in a checkpoint: wrong loads", "writing", damaged("damage")),
    ("bits turned and cuts in an adapter: wrong loads", "adapters", damaged("damage")),
    (
        "reads while another process writes: whole",
        "writing",
        lambda c: of(c, "a reader beside a writer", "whole", "reads"),
    ),
    (
        "a save under strace: files, folder and parent synced in order",
        "writing",
        lambda c: f"{sum(c['one save under strace'].values())} of 3",
    ),
    ("mutated and handmade weight files: errors that are not ours", "foreign", hostile),
    ("hostile archives, GGUF and pickles: errors that are not ours", "hostile", hostile),
    (
        "mutated pictures: errors that are not ours",
        "inputs",
        lambda c: of(c, "pictures", "other errors", "trials"),
    ),
    (
        "mutated lines of JSON: errors that are not ours",
        "inputs",
        lambda c: of(c, "lines", "other errors", "trials"),
    ),
    (
        "wrong settings: told in a line",
        "settings",
        lambda c: of(c, "wrong", "told in a line", "settings"),
    ),
)


def text() -> str:
    """The table; a script that was not run on a backend leaves its place there empty."""
    lines = [f"| | {' | '.join(BACKENDS)} |", "| --- |" + " --- |" * len(BACKENDS)]
    for label, question, count in ROWS:
        cells = []
        for backend in BACKENDS:
            files = sorted(RESULTS.glob(f"faults_{question}_{backend}_cpu_*.json"))
            cells.append(count(json.loads(files[-1].read_text())) if files else "–")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)
