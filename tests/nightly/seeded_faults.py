"""Seeds forty faults into src and looks which tests notice them.

    KERAS_BACKEND=torch .venv/torch/bin/python tests/nightly/seeded_faults.py

A wrong sign, an index that is off by one, a dropped mask, swapped names, a check that is left out:
each is put alone into a copy of the repository, where the tests nearest to it run on torch, those
of `make test-quick` first. All are to be caught by `make test` and thirty by `make test-quick`. It
runs in the environment whose Python starts it.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("tests/unit", "tests/numerics", "tests/families")
WEIGHTS = ("tests/unit/weights",)
TABLE = ("tests/families/test_families.py",)
TEXT = ("tests/unit/text", "tests/loop/data")
# Beginnings of paths below src/kmodels, and the tests nearest to them; the first match counts.
NEAREST = {
    # On torch an op is its override, which is compared with the generic body.
    "ops": ("tests/numerics/ops", "tests/numerics/overrides"),
    "overrides": ("tests/numerics/overrides",),
    "weights/rules": (*WEIGHTS, *TABLE),
    "weights/engine": ("tests/families/weights/test_engine.py", *TABLE),
    "weights/positions": (*WEIGHTS, *TABLE),
    "weights/native": ("tests/families/weights/test_presets.py",),
    "weights": WEIGHTS,
    "models/vit/weights": TABLE,
    "training/optimizers": (
        *("tests/numerics/test_optimizer.py", "tests/loop/training"),
        "tests/programs/recipes/test_vit.py",
    ),
    "training": ("tests/numerics/losses",),
    "checkpoint": ("tests/loop/checkpoint",),
    "distribution/engines": ("tests/loop/distribution/test_ranks_torch.py",),
    "data/rows": TEXT,
    "data/pipeline": ("tests/loop/data",),
    "data": ("tests/unit/data",),
    "text": TEXT,
}
# A file, a text that it has once, and what replaces the text.
FAULTS = {
    "ops and overrides": [
        ("ops/norms.py", "square(y)) + epsilon", "square(y)) - epsilon"),
        ("ops/rotary_embedding.py", "nate([first * cosine - ", "nate([first * cosine + "),
        ("ops/norms.py", "y = ops.add(y, ops.cast(b", "y = ops.subtract(y, ops.cast(b"),
        ("ops/activations.py", "(gate, approximate=True), up", "(up, approximate=True), gate"),
        ("ops/attention.py", "start + (keys - length)", "start"),
        ("ops/attention.py", "round(rate * WORD)", "round((1 - rate) * WORD)"),
        (
            "overrides/attention_torch.py",
            "torch.where(some, output, output.new_zeros(()))",
            "output",
        ),
        (
            "overrides/attention_torch.py",
            "causal and not hides and query.shape[1] == key.shape[1]",
            "causal and not hides",
        ),
        ("overrides/norms_torch.py", "slope.sub_(y.mul_(", "slope.add_(y.mul_("),
        ("overrides/norms_torch.py", "((width * epsilon) **", "((epsilon) **"),
    ],
    "weights": [
        ("weights/rules.py", "(x, (2, 3, 1, 0))", "(x, (3, 2, 1, 0))"),
        ("weights/rules.py", "lambda x: x[:, rows:]", "lambda x: x[:, :-rows]"),
        ("weights/positions.py", "(rows + 0.5) * scale", "rows * scale"),
        ("weights/positions.py", "_cubic(distance, -0.75)", "_cubic(distance, -0.5)"),
        ("weights/engine.py", "zip(targets, parts, strict", "zip(targets, parts[::-1], strict"),
        ("weights/engine.py", "for path in by_path if path in wanted - taken]", "for path in ()]"),
        (
            "weights/engine.py",
            "np.concatenate(parts, axis=rule.axis)",
            "np.concatenate(parts[::-1], axis=rule.axis)",
        ),
        ("weights/native.py", 'elif stamp(file)["sha256"] != entry.get("sha256"):', "elif False:"),
        ("weights/files.py", "if dtype.hasobject:", "if False:"),
        (
            "models/vit/weights/dinov2.py",
            '"block_{i}/attention_scale/scale"',
            '"block_{i}/mlp_scale/scale"',
        ),
    ],
    "training and checkpoints": [
        ("training/optimizers.py", "self.peak * (step + 1.0)", "self.peak * step"),
        ("training/optimizers.py", "0.5 * (1.0 + ops.cos", "0.5 * (1.0 - ops.cos"),
        ("training/optimizers.py", "self.decay_vectors or len(v.shape) > 1", "True"),
        ("training/optimizers.py", "self.skipped.assign_add(1)", "self.skipped.assign_add(2)"),
        ("training/losses.py", "(1.0 - 2.0 * own)", "(2.0 * own - 1.0)"),
        ("checkpoint/manager.py", "older[max(keep, 1) - 1 :]", "older[max(keep, 1) :]"),
        (
            "checkpoint/manager.py",
            'pick = min if mode == "min" else max',
            'pick = max if mode == "min" else min',
        ),
        ("checkpoint/manager.py", "[1]), reverse=True)", "[1]))"),
        (
            "checkpoint/state.py",
            "        if not _is_finite(values):\n            raise",
            "        if False:\n            raise",
        ),
        ("distribution/engines/ddp_torch.py", "torch.distributed.all_reduce(flat)", "pass"),
    ],
    "data and text": [
        (
            "data/rows.py",
            "(room, (left - sizes[example], row))",
            "(room, (left - sizes[example] + 1, row))",
        ),
        ("data/rng.py", "(0, key, 0, 0)", "(key, 0, 0, 0)"),
        ("data/images/augment.py", "images[:, :, ::-1], images)", "images[:, ::-1], images)"),
        ("data/images/augment.py", "stays, 1 - cut)", "stays, cut)"),
        ("data/images/batches.py", "labels[mirrored] = labels[mirrored][:, :, ::-1]", "pass"),
        ("data/images/augment.py", "(drawn[:, 2] < 0.5)", "(drawn[:, 2] > 2)"),
        (
            "text/templates.py",
            'Part(prompt, False), Part(record["response"], True)',
            'Part(prompt, True), Part(record["response"], True)',
        ),
        ("text/loader.py", "* self._scale\n        weights[count:] = 0.0", "* self._scale"),
        ("data/pipeline/indexed.py", "over = batch >= self.batches", "over = batch > self.batches"),
        (
            "text/templates.py",
            'system + content), False))\n                system = ""',
            "system + content), False))",
        ),
    ],
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


def caught_by(folder: Path, file: str, old: str, new: str) -> str:
    """Returns which command notices a fault: "quick", "test", or "nothing near it"."""
    path = folder / "src" / "kmodels" / file
    near = next(tests for start, tests in NEAREST.items() if file.startswith(start))
    text = path.read_text()
    assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
    path.write_text(text.replace(old, new))
    try:
        quick = [test for test in near if test.startswith(QUICK)]
        if quick and fails(folder, quick):
            return "quick"
        others = [test for test in near if test not in quick]
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
            for file, old, new in faults:
                if only not in file:
                    continue
                begun = time.monotonic()
                by = caught_by(folder, file, old, new)
                found[by] += 1
                seconds, line = time.monotonic() - begun, old.splitlines()[0].strip()
                print(f"{by:<16}{seconds:4.0f} s  {group}: {file}: {line}", flush=True)
    print(", ".join(f"{number} by {by}" for by, number in sorted(found.items())))
    return 0 if not found["nothing near it"] and (only or found["quick"] >= 30) else 1


if __name__ == "__main__":
    sys.exit(main())
