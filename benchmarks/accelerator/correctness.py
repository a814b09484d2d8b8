"""Values and gradients on the device against the CPU, within the tolerances of the tests.

A process that sees no accelerator computes the reference beside this one: each op's own body and
each family's smallest model, in float32 with the highest matmul precision. The device computes the
op as it is called, override or not, and the same models, in float32 and in bfloat16. Both draw
equal weights. torch is also asked whether an op or a step waits for the device, which none may.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from accelerator import clock, waits
from accelerator.pieces import SMALL

DTYPES = ("float32", "bfloat16")
Found = Iterator[tuple[str, list[np.ndarray]]]


@cache
def op_cases(few: bool) -> list[Any]:
    """The cases of the tests, drawn once: each further call would draw other numbers."""
    import op_cases

    if SMALL:
        return op_cases.few_cases()[::6]
    return op_cases.few_cases() if few else op_cases.cases()


def ops_found(few: bool, dtype: str, reference: bool) -> Found:
    """Output and gradients of each case."""
    import keras

    from gradients import to_numpy, value_and_grad
    from kmodels import ops

    for name, label, arrays, keywords in op_cases(few):
        op = getattr(ops, name)
        body = op.generic if reference else op
        held = [to_numpy(keras.ops.convert_to_tensor(x, dtype)) for x in arrays]

        def first(*x: Any, body: Any = body, keywords: Any = keywords) -> Any:
            output = body(*x, **keywords)
            return output[0] if isinstance(output, tuple) else output

        value, gradients = value_and_grad(
            first,
            *held,
            dtype="float32" if reference else dtype,
            compiled=clock.backend() == "jax",
        )
        yield f"{name}: {label}", [to_numpy(value), *gradients]


def models_found(families: list[str] | None, dtype: str) -> Found:
    """The mean cube of each smallest model's output, and its gradients."""
    import keras

    from gradients import trainable_gradients
    from public_models import CASES

    wanted = ("Gemma3Backbone",) if SMALL else families
    for cls, (make, data) in CASES.items():
        if (wanted and cls.__name__ not in wanted) or "CausalLM" in cls.__name__:
            continue
        keras.utils.set_random_seed(0)
        model = make(dtype="mixed_bfloat16" if dtype == "bfloat16" else dtype)
        x = keras.tree.map_structure(keras.ops.convert_to_tensor, data)
        loss, gradients = trainable_gradients(model)(x)
        yield f"model: {cls.__name__}", [np.asarray(loss), *gradients.values()]


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.npz"


@contextmanager
def references(settings: dict[str, Any]) -> Iterator[Callable[[str], list[np.ndarray]]]:
    """Starts a process without an accelerator; gives a function that waits for one of its results.

    It writes a file for each, in the order in which they are needed.
    """
    from accelerator.child import ROOT

    roots = [str(ROOT / name) for name in ("src", "benchmarks", "tests")]
    paths = os.pathsep.join([*roots, os.environ.get("PYTHONPATH", "")])
    hidden = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    with tempfile.TemporaryDirectory() as name, Path(name, "log").open("w+") as log:
        folder = Path(name)
        command = [sys.executable, "-m", "accelerator.correctness", name, json.dumps(settings)]
        environment = {**os.environ, **hidden}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

        def reference(case: str) -> list[np.ndarray]:
            path = file_of(folder, case)
            while not path.exists():
                if process.poll() is not None and not path.exists():
                    log.seek(0)
                    raise RuntimeError(f"the reference failed: {log.read().splitlines()[-1:]}")
                time.sleep(0.01)
            with np.load(path) as arrays:
                return [arrays[key] for key in arrays.files]

        try:
            yield reference
        finally:
            process.kill()
            process.wait()


def write_references(folder: Path, settings: dict[str, Any]) -> None:
    """Writes what `references` waits for."""
    few, families = settings["few"], settings["families"]
    parts = (
        ("float32", ops_found(few, "float32", reference=True)),
        ("models", models_found(families, "float32")),
        ("bfloat16", ops_found(few, "bfloat16", reference=True)),
    )
    for prefix, found in parts:
        for name, arrays in found:
            path = file_of(folder, f"{prefix}, {name}")
            np.savez(path.with_suffix(".partial.npz"), *arrays)
            path.with_suffix(".partial.npz").replace(path)


def differs(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest difference over the largest value, or over one."""
    if not all(np.isfinite(x).all() for x in found):
        return float("inf")
    return max(
        float(np.abs(x - y).max(initial=0) / max(1.0, np.abs(y).max(initial=0)))
        for x, y in zip(found, expected, strict=True)
    )


def run(settings: dict[str, Any]) -> clock.Parts:
    """Yields a row per op or model and dtype with its difference, and what lies outside."""
    import kmodels
    from tolerances import tolerance

    kmodels.set_matmul_precision("highest")
    few, outside = settings["few"], []
    with references(settings) as reference:
        for dtype in DTYPES:
            parts = (
                (dtype, ops_found(few, dtype, reference=False)),
                ("models", models_found(settings["families"], dtype)),
            )
            for prefix, found in parts:
                for name, arrays in found:
                    kind = "logits" if prefix == "models" else name.split(":")[0]
                    allowed = tolerance(kind, dtype)
                    difference = differs(arrays, reference(f"{prefix}, {name}"))
                    case = f"{dtype}, {name}"
                    row = {"case": case, "system": "device", "allowed": allowed}
                    if not difference <= allowed:
                        outside.append(f"{case}: {difference:.2e}, allowed {allowed:.0e}")
                    yield {"rows": [row | {"difference": difference}], "outside": outside}
    for row in waits.rows(few) if clock.backend() == "torch" else ():
        if row["finding"] not in (waits.FREE, waits.NOT_ASKED):
            outside.append(f"{row['case']}: {row['finding']}")
        yield {"rows": [row], "outside": outside}
    yield {"decisions": {name: dict(counts) for name, counts in kmodels.decisions().items()}}


def main(folder: str, settings: str) -> None:
    """The process of the references."""
    from vit_peers.child import hide_others

    hide_others(os.environ["KERAS_BACKEND"])
    import kmodels

    kmodels.set_matmul_precision("highest")
    write_references(Path(folder), json.loads(settings))


if __name__ == "__main__":
    main(*sys.argv[1:])
