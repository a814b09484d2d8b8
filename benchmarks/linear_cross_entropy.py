"""Are losses, log-probabilities and divergences without logits faster and leaner than with them?

    KERAS_BACKEND=torch python benchmarks/linear_cross_entropy.py [--write] [--device-name cpu]

Result and gradient by the hidden states with a frozen table: 512 positions, an eighth or half of
them without weight, width 640, 65,536 classes, a quarter of Gemma 3's. Each body runs in its own
process on one thread. Time is CPU time, the median of several steps after one that compiles, in
milliseconds; memory is the peak of resident memory above what the process held before the first
step, in MiB. Ratios are override over generic: below 1 the override wins. The generic body of
`linear_divergence` (--op), whose teacher has the same sizes, computes in parts already, and only
torch has an override; "logits" is the same by whole logits, and the body in use is over it too.
"""

import argparse
import ctypes
import json
import math
import os
import statistics
import time
from pathlib import Path

import record

ROWS, WIDTH, CLASSES = 512, 640, 65536
CASES = [
    (op, dtype, settings, share)
    for op, with_entropy in (
        ("linear_cross_entropy", {}),
        ("linear_log_probs", {}),
        ("linear_log_probs", {"with_entropy": True}),
    )
    for dtype in ("float32", "bfloat16")
    for settings, share in ((with_entropy, 0.875), ({"soft_cap": 30.0, **with_entropy}, 0.5))
] + [
    ("linear_divergence", dtype, {"kind": kind}, share)
    for dtype in ("float32", "bfloat16")
    for kind, share in (("forward_kl", 0.875), ("jsd", 0.5))
]


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
    function = divergence_of_logits if body == "logits" else getattr(getattr(ops, op), body)
    taught = keras.ops.cast(rng.standard_normal((ROWS, WIDTH), "float32"), dtype)

    def loss(x, table):
        if op == "linear_divergence":
            return keras.ops.sum(function(x, table, taught, table, weights, **settings))
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
    before = record.status("VmRSS")
    times, value = [], 0.0
    for _ in range(rounds + 1):
        start = time.process_time()
        value = step()
        times.append(1e3 * (time.process_time() - start))
    return {
        "time": statistics.median(times[1:]),
        "memory": (record.status("VmHWM") - before) / 2**20,
        "result": value / float(np.sum(np.asarray(keras.ops.convert_to_numpy(weights)))),
    }


def divergence_of_logits(x, table, taught, theirs, weights, kind):
    """`ops.linear_divergence` by the logits of all positions."""
    from keras import ops

    log_q, log_p = (
        ops.log_softmax(ops.cast(ops.matmul(x, ops.transpose(table)), "float32"))
        for x, table in ((x, table), (taught, theirs))
    )
    log_p = ops.stop_gradient(log_p)
    if kind == "forward_kl":
        return weights * ops.sum(ops.exp(log_p) * (log_p - log_q), axis=-1)
    log_m = ops.logaddexp(log_p, log_q) - math.log(2)
    parts = (ops.exp(log) * (log - log_m) for log in (log_p, log_q))
    return weights * 0.5 * sum(ops.sum(part, axis=-1) for part in parts)


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


def main() -> None:
    parser = record.flags(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--op", help="of this op alone")
    parser.add_argument("--device-name", default="cpu", help="for the file's name")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*json.loads(options.child))))
        return
    backend = os.environ["KERAS_BACKEND"]
    rows = []
    for op, dtype, settings, share in CASES:
        if op != options.op and (options.op or op == "linear_divergence"):
            continue
        bodies = ["generic", "override"]
        if op == "linear_divergence":
            bodies = ["logits", "generic"] + ["override"] * (backend == "torch")
        found = {}
        for body in bodies:
            job = json.dumps([body, op, dtype, settings, share, options.rounds])
            found[body] = record.child(__file__, backend, "--child", job)
        first, last = bodies[-2:]
        rows.append(
            {
                "override": f"{op}_{backend}" if "override" in bodies else None,
                "case": f"{ROWS}x{WIDTH} on {CLASSES}, {settings}, weighted share {share}",
                "dtype": dtype,
                "time_ms": {body: round(x["time"], 1) for body, x in found.items()},
                "time_ratio": round(found[last]["time"] / found[first]["time"], 3),
                "memory_mb": {body: round(x["memory"], 1) for body, x in found.items()},
                "memory_ratio": round(found[last]["memory"] / found[first]["memory"], 3),
                "result": {body: round(x["result"], 6) for body, x in found.items()},
                "declines": None,
            }
        )
        if "logits" in bodies:
            for name in ("time", "memory"):
                ratio = found[last][name] / found["logits"][name]
                rows[-1][f"{name}_ratio_over_logits"] = round(ratio, 3)
        print(json.dumps(rows[-1]), flush=True)
    if options.write:
        op = options.op or "linear_cross_entropy"
        record.write(
            f"ops_{backend}_{op}_{options.device_name}",
            __doc__,
            ("keras", backend),
            backend=backend,
            clock="process CPU",
            threads=1,
            rounds=options.rounds,
            rows=rows,
        )


if __name__ == "__main__":
    main()
