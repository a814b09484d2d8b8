"""Are the loss and the log-probabilities without logits faster and leaner than with them?

    KERAS_BACKEND=torch python benchmarks/linear_cross_entropy.py [--write] [--device-name cpu]

Result and gradient by the hidden states with a frozen table: 512 positions, an eighth or half of
them without weight, width 640, 65,536 classes, a quarter of Gemma 3's. Each body runs in its own
process on one thread. Time is CPU time, the median of several steps after one that compiles, in
milliseconds; memory is the peak of resident memory above what the process held before the first
step, in MiB. Ratios are override over generic: below 1 the override wins.
"""

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROWS, WIDTH, CLASSES = 512, 640, 65536
RESULTS = Path(__file__).parent / "results"
CASES = [
    (op, dtype, settings, share)
    for op, with_entropy in (
        ("linear_cross_entropy", {}),
        ("linear_log_probs", {}),
        ("linear_log_probs", {"with_entropy": True}),
    )
    for dtype in ("float32", "bfloat16")
    for settings, share in ((with_entropy, 0.875), ({"soft_cap": 30.0, **with_entropy}, 0.5))
]


def status(name: str) -> float:
    """A line of this process's memory, such as VmHWM, in MiB."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) / 1024


def measure(body: str, op: str, dtype: str, settings: dict, share: float, rounds: int) -> dict:
    """Median time, peak memory and result of one body; runs in a child process."""
    import keras
    import numpy as np

    from kmodels import ops

    rng = np.random.default_rng(0)
    hidden = keras.ops.cast(rng.standard_normal((ROWS, WIDTH), "float32"), dtype)
    table = rng.standard_normal((CLASSES, WIDTH), "float32") * np.float32(WIDTH**-0.5)
    table = keras.ops.cast(table, dtype)
    labels = keras.ops.convert_to_tensor(rng.integers(0, CLASSES, ROWS).astype("int32"))
    weights = (np.arange(ROWS) % 8 < 8 * share).astype("float32")
    weights = keras.ops.convert_to_tensor(weights)
    function = getattr(getattr(ops, op), body)

    def loss(x, table):
        found = function(x, table, labels, weights, **settings)
        if op == "linear_cross_entropy":
            return found[0]
        found = (
            keras.ops.sum(keras.ops.stack(found), axis=0) if settings.get("with_entropy") else found
        )
        return keras.ops.sum(found)

    step = steps()[keras.backend.backend()](loss, hidden, table)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of building the arrays
    before = status("VmRSS")
    times, value = [], None
    for _ in range(rounds + 1):
        start = time.process_time()
        value = step()
        times.append(1e3 * (time.process_time() - start))
    return {
        "time": statistics.median(times[1:]),
        "memory": status("VmHWM") - before,
        "result": value / float(np.sum(np.asarray(keras.ops.convert_to_numpy(weights)))),
    }


def steps() -> dict:
    """Returns by backend a function of (loss, hidden, table) that makes a step."""

    def torch_step(loss, hidden, table):
        import torch

        torch.set_num_threads(1)
        hidden.requires_grad_(True)

        def step():
            value = loss(hidden, table)
            torch.autograd.grad(value, hidden)
            return value.item()

        return step

    def jax_step(loss, hidden, table):
        import jax

        compiled = jax.jit(jax.value_and_grad(loss))

        def step():
            value, gradient = compiled(hidden, table)
            gradient.block_until_ready()
            return float(value)

        return step

    def tensorflow_step(loss, hidden, table):
        import tensorflow as tf

        @tf.function
        def run(x, table):
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = loss(x, table)
            return value, tape.gradient(value, x)

        return lambda: float(run(hidden, table)[0])

    return {"torch": torch_step, "jax": jax_step, "tensorflow": tensorflow_step}


def child(arguments: list) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
    environment["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--op", help="of this op alone")
    parser.add_argument("--device-name", default="cpu", help="for the file's name")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*json.loads(options.child))))
        return
    backend = os.environ["KERAS_BACKEND"]
    rows = []
    for op, dtype, settings, share in CASES:
        if options.op not in (None, op):
            continue
        found = {
            body: child([body, op, dtype, settings, share, options.rounds])
            for body in ("generic", "override")
        }
        generic, override = found["generic"], found["override"]
        rows.append(
            {
                "override": f"{op}_{backend}",
                "case": f"{ROWS}x{WIDTH} on {CLASSES}, {settings}, weighted share {share}",
                "dtype": dtype,
                "time_ms": {body: round(x["time"], 1) for body, x in found.items()},
                "time_ratio": round(override["time"] / generic["time"], 3),
                "memory_mb": {body: round(x["memory"], 1) for body, x in found.items()},
                "memory_ratio": round(override["memory"] / generic["memory"], 3),
                "result": {body: round(x["result"], 6) for body, x in found.items()},
                "declines": None,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    if options.write:
        date = time.strftime("%Y-%m-%d")
        content = {
            "question": __doc__.splitlines()[0],
            "backend": backend,
            "device": platform.processor() or platform.machine(),
            "versions": {name: importlib.metadata.version(name) for name in ("keras", backend)},
            "clock": "process CPU",
            "threads": 1,
            "rounds": options.rounds,
            "date": date,
            "rows": rows,
        }
        RESULTS.mkdir(exist_ok=True)
        name = f"ops_{backend}_linear_cross_entropy_{options.device_name}_{date}.json"
        (RESULTS / name).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
