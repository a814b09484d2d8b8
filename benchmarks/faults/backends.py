"""A run saved on each backend goes on with each: nine pairs, six optimizers.

    python benchmarks/faults/backends.py [--write]

Needs all three backends. The model and the optimizers are those of
tests/loop/checkpoint/run_on_backend.py (test_backends_across.py beside it is the form of this with
bars).
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tally

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("jax", "torch", "tensorflow")


def on(backend: str, *arguments: Any) -> None:
    """Runs Python on a backend."""
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests" / "loop" / "checkpoint")))
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": path}
    subprocess.run([sys.executable, *map(str, arguments)], env=environment, check=True, timeout=280)


def go_on(folder: Path, out: Path) -> None:
    """Prints the differences on this process' backend to what each backend has written, as JSON."""
    import run_on_backend as runs

    from kmodels.training import load_keras_file

    found: dict[str, dict[str, Any]] = {name: {} for name in BACKENDS}
    for optimizer in runs.OPTIMIZERS:
        model = runs.make_model(optimizer)
        for name in BACKENDS:
            with tempfile.TemporaryDirectory() as other:
                here = Path(other) / "run"
                shutil.copytree(folder / name / optimizer, here)
                runs.Checkpoint(here).prepare(model)
                got, expected = (
                    runs.values(model),
                    np.load(folder / name / f"{optimizer}_saved.npz"),
                )
                runs.keras.utils.set_random_seed(3)
                losses = runs.fit(model, here)[runs.SAVED % runs.STEPS :]
            wanted = json.loads((folder / name / f"{optimizer}.json").read_text())[runs.SAVED :]
            arrays = [key for key in expected if key != "outputs"]
            differ = [
                key
                for key in arrays
                if got[key].astype(expected[key].dtype).tobytes() != expected[key].tobytes()
            ]
            counts: dict[str, Any] = {
                "arrays": len(arrays),
                "of them not bit-equal": len(differ),
                "largest difference of outputs": _largest(got["outputs"], expected["outputs"]),
                "losses": len(losses),
                "largest difference of losses": _largest(losses, wanted),
            }
            if optimizer != "ours":  # .keras files are Keras' own optimizers'.
                load_keras_file(folder / name / f"{optimizer}.keras", model)
                last = np.load(folder / name / f"{optimizer}.npz")
                outputs = runs.values(model)["outputs"]
                more = runs.more(model)
                counts |= {
                    ".keras: largest difference of outputs": _largest(outputs, last["outputs"]),
                    ".keras: largest difference of losses": _largest(more, last["losses"]),
                }
            found[name][optimizer] = counts
    out.write_text(json.dumps(found))


def _largest(got: Any, expected: Any) -> float:
    return float(f"{np.abs(np.asarray(got) - np.asarray(expected)).max():.2e}")


def main() -> None:
    """Runs all pairs and prints what differs."""
    parser = tally.arguments(__doc__)
    parser.add_argument("--go-on", type=Path, nargs=2, help="used by itself")
    options = parser.parse_args()
    if options.go_on:
        go_on(*options.go_on)
        return
    pairs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for backend in BACKENDS:
            (folder / backend).mkdir()
            on(
                backend,
                ROOT / "tests" / "loop" / "checkpoint" / "run_on_backend.py",
                folder / backend,
            )
        for backend in BACKENDS:
            out = folder / f"{backend}.json"
            on(backend, __file__, "--go-on", folder, out)
            for former, counts in json.loads(out.read_text()).items():
                pairs[f"{former} to {backend}"] = counts
    every = [counts for found in pairs.values() for counts in found.values()]
    found = {
        "pairs of backends": len(pairs),
        "runs": len(every),
        "arrays not bit-equal": sum(counts["of them not bit-equal"] for counts in every),
        "largest difference of outputs": max(c["largest difference of outputs"] for c in every),
        "largest difference of losses": max(c["largest difference of losses"] for c in every),
        "by pair and optimizer": pairs,
    }
    tally.report("backends", found, options)


if __name__ == "__main__":
    main()
