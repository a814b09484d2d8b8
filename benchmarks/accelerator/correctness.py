"""Values and gradients on the device against the CPU, within the tolerances of the tests.

A process that sees no accelerator computes the reference: each op's own body and each family's
smallest model, in float32 with the highest matmul precision. The device computes the op as it is
called, override or not, and the same models, in float32 and in bfloat16. Both draw equal weights.
torch is also asked whether an op or a step waits for the device, which none may.
"""

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from accelerator import clock, waits
from accelerator.pieces import SMALL

DTYPES = ("float32", "bfloat16")
FAMILIES = ("Gemma3Backbone",) if SMALL else None


@cache
def op_cases() -> list[Any]:
    """The cases of the tests, drawn once: each further call would draw other numbers."""
    import op_cases

    return op_cases.few_cases()[::6] if SMALL else op_cases.cases()


def ops_found(dtype: str, reference: bool) -> dict[str, list[np.ndarray]]:
    """Output and gradients of each case."""
    import keras

    from gradients import to_numpy, value_and_grad
    from kmodels import ops

    found: dict[str, list[np.ndarray]] = {}
    for name, label, arrays, keywords in op_cases():
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
        found[f"{name}: {label}"] = [to_numpy(value), *gradients]
    return found


def models_found(dtype: str) -> dict[str, list[np.ndarray]]:
    """The mean cube of each smallest model's output, and its gradients."""
    import keras

    from gradients import trainable_gradients
    from public_models import CASES

    found: dict[str, list[np.ndarray]] = {}
    for cls, (make, data) in CASES.items():
        if (FAMILIES and cls.__name__ not in FAMILIES) or "CausalLM" in cls.__name__:
            continue
        keras.utils.set_random_seed(0)
        model = make(dtype="mixed_bfloat16" if dtype == "bfloat16" else dtype)
        x = keras.tree.map_structure(keras.ops.convert_to_tensor, data)
        loss, gradients = trainable_gradients(model)(x)
        found[f"model: {cls.__name__}"] = [np.asarray(loss), *gradients.values()]
    return found


def references() -> dict[str, list[np.ndarray]]:
    """What `main` finds in a process without an accelerator; in this one where there is none."""
    if not clock.on_gpu():
        return computed()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "references.npz"
        hidden = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "accelerator.correctness", str(path)]
        import accelerator.child as child

        roots = [child.ROOT / name for name in ("src", "benchmarks", "tests")]
        paths = os.pathsep.join([*map(str, roots), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            command,
            env={**os.environ, **hidden, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the reference failed: {done.stderr.splitlines()[-1:]}")
        with np.load(path) as arrays:
            found: dict[str, list[np.ndarray]] = {}
            for name in arrays.files:
                found.setdefault(name.rsplit("|", 1)[0], []).append(arrays[name])
        return found


def computed() -> dict[str, list[np.ndarray]]:
    """References by dtype and name."""
    found = {
        f"{dtype}, {name}": arrays
        for dtype in DTYPES
        for name, arrays in ops_found(dtype, reference=True).items()
    }
    return found | {f"models, {name}": x for name, x in models_found("float32").items()}


def differs(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest difference over the largest value, or over one."""
    if not all(np.isfinite(x).all() for x in found):
        return float("inf")
    return max(
        float(np.abs(x - y).max(initial=0) / max(1.0, np.abs(y).max(initial=0)))
        for x, y in zip(found, expected, strict=True)
    )


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns a row per op or model and dtype with its difference, and what lies outside."""
    import kmodels
    from tolerances import tolerance

    kmodels.set_matmul_precision("highest")
    expected = references()
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        for name, arrays in ops_found(dtype, reference=False).items():
            allowed = tolerance(name.split(":")[0], dtype)
            reference = expected[f"{dtype}, {name}"]
            row = {"case": f"{dtype}, {name}", "system": "device", "allowed": allowed}
            rows.append(row | {"difference": differs(arrays, reference)})
        for name, arrays in models_found(dtype).items():
            reference = expected[f"models, {name}"]
            row = {"case": f"{dtype}, {name}", "system": "device"}
            row |= {"allowed": tolerance("logits", dtype)}
            rows.append(row | {"difference": differs(arrays, reference)})
    outside = [
        f"{row['case']}: {row['difference']:.2e}, allowed {row['allowed']:.0e}"
        for row in rows
        if not row["difference"] <= row["allowed"]
    ]
    if clock.backend() == "torch":
        asked = waits.rows()
        outside += [
            f"{row['case']}: {row['finding']}"
            for row in asked
            if row["finding"] not in (waits.FREE, waits.NOT_ASKED)
        ]
        rows += asked
    decisions = {name: dict(counts) for name, counts in kmodels.decisions().items()}
    return {"rows": rows, "outside": outside, "decisions": decisions}


if __name__ == "__main__":
    import kmodels

    kmodels.set_matmul_precision("highest")
    np.savez(
        sys.argv[1],
        **{f"{name}|{i}": x for name, xs in computed().items() for i, x in enumerate(xs)},
    )
