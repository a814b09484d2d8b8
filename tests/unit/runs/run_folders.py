"""Folders of runs as recipes leave them, for tests of pages."""

import csv
import json

import numpy as np

from kmodels.data import ArraySource
from kmodels.runs import results
from kmodels.runs.history import COLUMNS

LONG = "/data/" + "a" * 300
CLASSES = ("ankle boot", "pullover", "trouser", "a very long name of a class", "bag")
SETTINGS = {"recipe": "vit", "preset": "vit_debug", "data": LONG, "mesh": None, "seed": 3}
DEFAULTS = {"preset": "vit_debug", "data": "digits", "mesh": None, "seed": 0, "out": None}
RESULT = {
    "recipe": "vit", "backend": "jax", "device": "cpu x1", "precision": "float32",
    "preset": "vit_debug", "parameters": 1234567, "trainable_parameters": 1000,
    "steps": 30, "epochs": 3,
    "metrics": {"loss": 0.5, "val_accuracy": 0.5, "val_loss": None, "test_accuracy": 0.91237},
    "samples_per_s": 1411.04, "step_ms_median": 12.5, "peak_memory_mb": 505.2,
    "wait_for_data_share": 0.1088, "overrides": {"attention": "override"},
    "versions": {"keras": "3.15.1"},
}  # fmt: skip
NOTES = {
    "recipe": "vit", "defaults": DEFAULTS, "model": "vit_debug",
    "data": {
        "source": LONG, "unit": "images", "train": 1437, "validation": 180, "test": 120,
        "classes": list(CLASSES),
    },
    "best": "val_accuracy",
    "parts": [
        {"command": "kmodels vit", "started": "2026-11-23T14:46:47+00:00", "seconds": 100.0},
        {"command": "kmodels vit --resume", "started": "2026-11-24T10:00:00", "seconds": 40.0},
    ],
}  # fmt: skip
SAMPLES = [
    {"prompt": "<script>alert(1)</script>", "before": "", "after": "b" * 400},
    {"prompt": "Which is larger?", "before": "No.", "after": "The sun.\nIt is a star."},
]
# By epoch; the second is the best one.
ACCURACIES = (0.25, 0.75, 0.5)


def write(folder, settings=SETTINGS, result=RESULT, notes=None, scale=1.0):
    """A folder with a history of losses times `scale`, and with the files that are not None."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {"config.json": settings, "result.json": result, "run.json": notes}
    for name, content in named.items():
        if content:
            (folder / name).write_text(json.dumps(content))
    rows = []
    for step in range(1, 31):
        row = {"row": "step", "epoch": (step - 1) // 10 + 1, "step": step}
        rows.append(row | {"loss": scale * 2.0 / step, "learning_rate": 1e-3 / step})
        if step % 10 == 0:
            epoch = step // 10
            row = {"row": "epoch", "epoch": epoch, "step": step, "loss": scale * 2.0 / epoch}
            row |= {"val_accuracy": ACCURACIES[epoch - 1], "samples_per_s": 100.0 * epoch}
            rows.append(row)
    with (folder / "history.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    scores = {"task": "multiple_choice", "records": 40, "before": {"acc": 0.25}}
    evaluations = {"held.jsonl": {**scores, "after": {"acc": 0.5, "acc_stderr": 0.08}}}
    (folder / "evaluations.json").write_text(json.dumps(evaluations))
    return folder


def images(folder, classes=CLASSES, count=120):
    """A run of a classifier, a third of whose answers are wrong."""
    write(folder, notes=NOTES)
    generator = np.random.default_rng(0)
    pictures = generator.integers(0, 256, (count, 80, 80, 3)).astype("uint8")
    labels = np.arange(count) % len(classes)
    shares = generator.dirichlet(np.ones(len(classes)), count)
    for row in np.flatnonzero(np.arange(count) % 3 > 0):
        shares[row] = 0.2 / (len(classes) - 1)
        shares[row, labels[row]] = 0.8
    source = ArraySource(pictures, labels)
    content = results.predictions("test", source, shares, classes)
    (folder / "predictions.json").write_text(json.dumps(content))
    return folder, labels, shares


def texts(folder, **changes):
    """A run of a language model, with answers before and after."""
    settings = {**SETTINGS, "recipe": "gemma_lora", **changes}
    data = {"source": "lines.jsonl", "unit": "examples", "train": 495, "validation": 55}
    notes = {**NOTES, "recipe": "gemma_lora", "data": data, "best": "val_accuracy"}
    result = {**RESULT, "recipe": "gemma_lora", "samples": SAMPLES}
    result["before"] = {"loss": 4.25, "accuracy": 0.125, "answers": ["", "No."]}
    return write(folder, settings, result, notes, scale=0.5)
