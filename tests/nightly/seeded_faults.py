"""Seeds forty faults into src and looks which tests notice them.

    KERAS_BACKEND=torch .venv/torch/bin/python tests/nightly/seeded_faults.py

A wrong sign, an index that is off by one, a dropped mask, swapped names, a check that is left out:
each is put alone into a copy of the repository, where the tests nearest to it run on torch, those
of `make test-quick` first. All are to be caught by `make test` and thirty by `make test-quick`. It
runs in the environment whose Python starts it, and takes about ten minutes.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("tests/unit", "tests/numerics", "tests/families")


@dataclass(frozen=True)
class Fault:
    """A change of one place in a file of src/kmodels, and the tests nearest to it."""

    file: str
    old: str
    new: str
    near: tuple[str, ...]


OPS = ("tests/numerics/ops",)
OVERRIDES = ("tests/numerics/overrides",)
TABLE = ("tests/families/test_families.py",)
ENGINE = ("tests/families/weights/test_engine.py",)
CHECKPOINT = ("tests/loop/checkpoint",)
OPTIMIZER = ("tests/numerics/test_optimizer.py", "tests/loop/training")
IMAGES = ("tests/unit/data",)
TEXT = ("tests/unit/text", "tests/loop/data")
FAULTS = {
    "ops and overrides": (
        Fault("ops/rms_norm.py", "square(y)) + epsilon", "square(y)) - epsilon", OPS),
        Fault("ops/rotary_embedding.py", "cosine - second * sine", "cosine + second * sine", OPS),
        Fault(
            "ops/layer_norm.py", "y = ops.add(y, ops.cast(b", "y = ops.subtract(y, ops.cast(b", OPS
        ),
        Fault(
            "ops/gated_gelu.py", "(gate, approximate=True), up", "(up, approximate=True), gate", OPS
        ),
        Fault("ops/_attention_blockwise.py", "start + (keys - length)", "start", OPS),
        Fault("ops/_attention_blockwise.py", "round(rate * WORD)", "round((1 - rate) * WORD)", OPS),
        Fault(
            "overrides/attention_torch.py",
            "torch.where(some, output, output.new_zeros(()))",
            "output",
            OVERRIDES,
        ),
        Fault(
            "overrides/attention_torch.py",
            "causal and not hides and length == keys",
            "causal and not hides",
            OVERRIDES,
        ),
        Fault("overrides/rms_norm_torch.py", "slope.sub_(y.mul_(", "slope.add_(y.mul_(", OVERRIDES),
        Fault("overrides/rms_norm_torch.py", "((width * epsilon) **", "((epsilon) **", OVERRIDES),
    ),
    "weights": (
        Fault(
            "weights/transforms.py",
            "(x, (2, 3, 1, 0))",
            "(x, (3, 2, 1, 0))",
            ("tests/unit/weights",),
        ),
        Fault(
            "weights/transforms.py",
            "lambda x: x[:, rows:]",
            "lambda x: x[:, :-rows]",
            ("tests/unit/weights", *TABLE),
        ),
        Fault(
            "weights/positions.py", "(rows + 0.5) * scale", "rows * scale", ("tests/unit/weights",)
        ),
        Fault(
            "weights/positions.py",
            "_cubic(distance, -0.75)",
            "_cubic(distance, -0.5)",
            ("tests/unit/weights",),
        ),
        Fault(
            "weights/engine.py",
            "zip(targets, parts, strict",
            "zip(targets, parts[::-1], strict",
            (*ENGINE, *TABLE),
        ),
        Fault(
            "weights/engine.py",
            "for path in held if path in wanted - taken]",
            "for path in ()]",
            ENGINE,
        ),
        Fault(
            "weights/engine.py",
            "np.concatenate(parts, axis=rule.axis)",
            "np.concatenate(parts[::-1], axis=rule.axis)",
            (*ENGINE, *TABLE),
        ),
        Fault(
            "weights/manifest.py",
            "_hash(file) != entry",
            "False and _hash(file) != entry",
            ("tests/families/weights/test_presets.py",),
        ),
        Fault("weights/readers.py", "if dtype.hasobject:", "if False:", ("tests/unit/weights",)),
        Fault(
            "models/vit/weights/dinov2.py",
            '"block_{i}/attention_scale/scale"',
            '"block_{i}/mlp_scale/scale"',
            TABLE,
        ),
    ),
    "training and checkpoints": (
        Fault(
            "training/optim/schedules.py", "self.peak * (step + 1.0)", "self.peak * step", OPTIMIZER
        ),
        Fault(
            "training/optim/schedules.py", "0.5 * (1.0 + ops.cos", "0.5 * (1.0 - ops.cos", OPTIMIZER
        ),
        Fault(
            "training/optim/param_groups.py",
            "len(v.shape) > 1 and not pattern",
            "not pattern",
            OPTIMIZER,
        ),
        Fault(
            "training/optim/param_groups.py",
            "self.skipped.assign_add(1)",
            "self.skipped.assign_add(2)",
            OPTIMIZER,
        ),
        Fault(
            "training/similarity_losses.py",
            "(1.0 - 2.0 * own)",
            "(2.0 * own - 1.0)",
            ("tests/numerics/losses",),
        ),
        Fault(
            "checkpoint/manager.py",
            "older[max(keep, 1) - 1 :]",
            "older[max(keep, 1) :]",
            CHECKPOINT,
        ),
        Fault(
            "checkpoint/manager.py",
            'pick = min if mode == "min" else max',
            'pick = max if mode == "min" else min',
            CHECKPOINT,
        ),
        Fault("checkpoint/manager.py", "[1]), reverse=True)", "[1]))", CHECKPOINT),
        Fault(
            "checkpoint/state.py",
            "        if not _is_finite(values):\n            raise",
            "        if False:\n            raise",
            CHECKPOINT,
        ),
        Fault(
            "distribution/engines/ddp_torch.py",
            "torch.distributed.all_reduce(flat)",
            "pass",
            ("tests/loop/distribution/test_ranks_torch.py",),
        ),
    ),
    "data and text": (
        Fault(
            "data/packing.py",
            "(room, (left - sizes[example], row))",
            "(room, (left - sizes[example] + 1, row))",
            TEXT,
        ),
        Fault("data/rng.py", "(0, key, 0, 0)", "(key, 0, 0, 0)", IMAGES),
        Fault(
            "data/images/augment.py",
            "images[:, :, ::-1], images)",
            "images[:, ::-1], images)",
            IMAGES,
        ),
        Fault("data/images/augment.py", "stays, 1 - box_h * box_w", "stays, box_h * box_w", IMAGES),
        Fault(
            "data/images/masks/loader.py",
            "labels[mirrored] = labels[mirrored][:, :, ::-1]",
            "pass",
            IMAGES,
        ),
        Fault("data/images/augment.py", "(drawn[:, 2] < 0.5)", "(drawn[:, 2] > 2)", IMAGES),
        Fault(
            "text/templates.py",
            'Part(prompt, False), Part(record["response"], True)',
            'Part(prompt, True), Part(record["response"], True)',
            TEXT,
        ),
        Fault(
            "text/loader.py", "* self._scale\n        weights[count:] = 0.0", "* self._scale", TEXT
        ),
        Fault(
            "text/loader.py", "over = batch >= self._batches", "over = batch > self._batches", TEXT
        ),
        Fault(
            "text/templates.py",
            'system + content), False))\n                system = ""',
            "system + content), False))",
            TEXT,
        ),
    ),
}


def copy(folder: Path) -> None:
    """Copies what git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def fails(folder: Path, paths: list[str]) -> bool:
    """Returns whether a test of these paths fails in the copy."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *paths]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest {' '.join(paths)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 1


def caught_by(folder: Path, fault: Fault) -> str:
    """Returns which command notices a fault: "quick", "test", or "nothing near it"."""
    path = folder / "src" / "kmodels" / fault.file
    text = path.read_text()
    assert text.count(fault.old) == 1, (
        f"{fault.file} has {fault.old!r} {text.count(fault.old)} times"
    )
    path.write_text(text.replace(fault.old, fault.new))
    try:
        quick = [test for test in fault.near if test.startswith(QUICK)]
        if quick and fails(folder, quick):
            return "quick"
        others = [test for test in fault.near if test not in quick]
        return "test" if others and fails(folder, others) else "nothing near it"
    finally:
        path.write_text(text)


def main() -> int:
    """Seed each fault, and print what noticed it; 0 if nothing was missed and 30 were by quick."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="faults of files whose path contains this")
    only = parser.parse_args().only
    found: Counter = Counter()
    with tempfile.TemporaryDirectory(prefix="seeded-faults-") as name:
        folder = Path(name)
        copy(folder)
        for group, faults in FAULTS.items():
            for fault in faults:
                if only not in fault.file:
                    continue
                begun = time.monotonic()
                by = caught_by(folder, fault)
                found[by] += 1
                old = fault.old.splitlines()[0].strip()
                print(
                    f"{by:<16}{time.monotonic() - begun:4.0f} s  {group}: {fault.file}: {old}",
                    flush=True,
                )
    print(", ".join(f"{number} by {by}" for by, number in sorted(found.items())))
    return 0 if not found["nothing near it"] and (only or found["quick"] >= 30) else 1


if __name__ == "__main__":
    sys.exit(main())
