"""Is `vmap(grad(f))` of kmodels as fast as the framework's own?

    KERAS_BACKEND=torch python benchmarks/transforms.py [--write] [--device-name cpu]

Gradients per example, of a perceptron and of one layer of self-attention. `own` transforms the same
function of `keras.ops` by `jax.vmap(jax.grad(f))`, `torch.func.vmap(torch.func.grad(f))`, or
`tf.vectorized_map` over a tape; `native` transforms a function of the framework's own operations.
`jit`: all under `jax.jit` or `tf.function`; on torch, kmodels' trace beside its peers as they are.
With `--compile`, on torch, `compiled` is the native one under `torch.compile`; `compile_s` are the
seconds of its first call. They take turns in one process on one thread. Time is CPU time of a call,
the median over the rounds in milliseconds; a ratio is the median over the rounds of kmodels' over a
peer's: below 1 kmodels wins. First the gradients are compared. The heap keeps its pages: whose call
gives them back and takes them again, up to a tenth of its time, is chance.
"""

import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import record

os.environ |= record.ONE_THREAD

import keras
import numpy as np
from keras import ops

from kmodels import transforms

BATCH, WIDTH, HIDDEN, CLASSES, LENGTH = 64, 256, 512, 10, 32
SHAPES = {
    "perceptron": ((WIDTH, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)),
    "attention": ((64, 64), (64, 64), (64, 64), (64, CLASSES)),
}
INPUTS = {"perceptron": (BATCH, WIDTH), "attention": (BATCH, LENGTH, 64)}


def losses() -> dict[str, Callable[..., Any]]:
    """Returns the losses in `keras.ops`."""

    def perceptron(weights: Any, x: Any, label: Any) -> Any:
        first, bias, second, shift = weights
        logits = ops.matmul(ops.tanh(ops.matmul(x, first) + bias), second) + shift
        return ops.logsumexp(logits) - ops.take(logits, label)

    def attention(weights: Any, x: Any, label: Any) -> Any:
        query, key, value, head = weights
        scores = ops.matmul(ops.matmul(x, query), ops.transpose(ops.matmul(x, key)))
        mixed = ops.matmul(ops.softmax(scores / 8.0, axis=-1), ops.matmul(x, value))
        logits = ops.matmul(ops.mean(mixed, axis=0), head)
        return ops.logsumexp(logits) - ops.take(logits, label)

    return {"perceptron": perceptron, "attention": attention}


def own_jax() -> tuple[dict[str, Any], Callable[..., Any], Callable[..., Any]]:
    """Losses, vmap(grad()) and jit of JAX."""
    import jax
    from jax import numpy as jnp

    def perceptron(weights: Any, x: Any, label: Any) -> Any:
        first, bias, second, shift = weights
        logits = jnp.tanh(x @ first + bias) @ second + shift
        return jax.nn.logsumexp(logits) - logits[label]

    def attention(weights: Any, x: Any, label: Any) -> Any:
        query, key, value, head = weights
        scores = (x @ query) @ (x @ key).T
        logits = (jax.nn.softmax(scores / 8.0) @ (x @ value)).mean(0) @ head
        return jax.nn.logsumexp(logits) - logits[label]

    def mapped(loss: Any) -> Any:
        return jax.vmap(jax.grad(loss), (None, 0, 0))

    return {"perceptron": perceptron, "attention": attention}, mapped, jax.jit


def own_torch() -> tuple[dict[str, Any], Callable[..., Any], Callable[..., Any]]:
    """Losses and vmap(grad()) of torch, which has no jit that needs no compiler."""
    import torch

    torch.set_num_threads(1)

    def perceptron(weights: Any, x: Any, label: Any) -> Any:
        first, bias, second, shift = weights
        logits = torch.tanh(x @ first + bias) @ second + shift
        return torch.logsumexp(logits, 0) - logits.gather(0, label)

    def attention(weights: Any, x: Any, label: Any) -> Any:
        query, key, value, head = weights
        scores = (x @ query) @ (x @ key).T
        logits = (torch.softmax(scores / 8.0, -1) @ (x @ value)).mean(0) @ head
        return torch.logsumexp(logits, 0) - logits.gather(0, label)

    def mapped(loss: Any) -> Any:
        return torch.func.vmap(torch.func.grad(loss), (None, 0, 0))

    return {"perceptron": perceptron, "attention": attention}, mapped, lambda function: function


def own_tensorflow() -> tuple[dict[str, Any], Callable[..., Any], Callable[..., Any]]:
    """Losses, tapes under vectorized_map, and graphs of TensorFlow."""
    import tensorflow as tf

    def perceptron(weights: Any, x: Any, label: Any) -> Any:
        first, bias, second, shift = weights
        hidden = tf.tanh(tf.linalg.matvec(first, x, transpose_a=True) + bias)
        logits = tf.linalg.matvec(second, hidden, transpose_a=True) + shift
        return tf.reduce_logsumexp(logits) - tf.gather(logits, label)

    def attention(weights: Any, x: Any, label: Any) -> Any:
        query, key, value, head = weights
        scores = tf.matmul(x @ query, x @ key, transpose_b=True)
        mixed = tf.reduce_mean(tf.nn.softmax(scores / 8.0) @ (x @ value), 0)
        logits = tf.linalg.matvec(head, mixed, transpose_a=True)
        return tf.reduce_logsumexp(logits) - tf.gather(logits, label)

    def mapped(loss: Any) -> Any:
        def run(weights: Any, x: Any, labels: Any) -> Any:
            def entry(parts: Any) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(weights)
                    value = loss(weights, *parts)
                return tape.gradient(value, weights)

            return tf.vectorized_map(entry, (x, labels))

        return run

    return {"perceptron": perceptron, "attention": attention}, mapped, tf.function


def keep_pages() -> None:
    """Tells glibc neither to give memory back nor to map what is large by itself."""
    trim_threshold, mmap_threshold = -1, -3
    for option in (trim_threshold, mmap_threshold):
        if not getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)(option, 2**30):
            raise SystemExit("the C library has no mallopt for that; run it on glibc")


def timed(function: Callable[..., Any], arguments: tuple, calls: int) -> float:
    """CPU milliseconds of a call."""
    start = time.process_time()
    found: Any = None
    for _ in range(calls):
        found = function(*arguments)
    for leaf in found:
        getattr(leaf, "block_until_ready", lambda: None)()
    return 1e3 * (time.process_time() - start) / calls


def measure(case: str, staged: bool, rounds: int, compiled: bool) -> dict[str, Any]:
    """Measures all ways in turns."""
    native, mapped, jit = globals()[f"own_{keras.backend.backend()}"]()
    loss = losses()[case]
    ways = {
        "kmodels": transforms.vmap(transforms.grad(loss), (None, 0, 0)),
        "own": mapped(loss),
        "native": mapped(native[case]),
    }
    if staged:
        ways = {
            name: (transforms.jit if name == "kmodels" else jit)(way) for name, way in ways.items()
        }
    if staged and compiled:
        import torch

        ways["compiled"] = torch.compile(ways["native"])
    rng = np.random.default_rng(0)
    weights = [
        ops.convert_to_tensor(rng.normal(size=shape).astype("float32") / 16)
        for shape in SHAPES[case]
    ]
    x = ops.convert_to_tensor(rng.normal(size=INPUTS[case]).astype("float32"))
    labels = rng.integers(0, CLASSES, BATCH).astype("int64")
    arguments = (weights, x, ops.convert_to_tensor(labels))
    start = time.perf_counter()
    if "compiled" in ways:
        ways["compiled"](*arguments)
    compile_s = time.perf_counter() - start
    found = {name: [ops.convert_to_numpy(x) for x in way(*arguments)] for name, way in ways.items()}
    difference = max(
        float(np.abs(a - b).max())
        for name in ways
        for a, b in zip(found["kmodels"], found[name], strict=True)
    )
    if difference > 1e-5:
        raise SystemExit(f"{case}: the gradients differ by {difference}")
    calls = max(1, round(50 / timed(ways["native"], arguments, 2)))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name in list(ways) if turn % 2 else reversed(ways):
            times[name].append(timed(ways[name], arguments, calls))
    row = {
        "case": case,
        "jit": staged,
        "time_ms": {name: round(statistics.median(found), 4) for name, found in times.items()},
    }
    if "compiled" in ways:
        row["compile_s"] = round(compile_s, 1)
    for name in [name for name in ways if name != "kmodels"]:
        ratios = [a / b for a, b in zip(times["kmodels"], times[name], strict=True)]
        row[f"ratio_{name}"] = round(statistics.median(ratios), 3)
        row[f"quartiles_{name}"] = [round(x, 3) for x in statistics.quantiles(ratios, n=4)[::2]]
    return row | {"calls_per_round": calls, "largest_difference": difference}


def main() -> None:
    parser = record.flags(__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--device-name", default="cpu", help="for the file's name")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile too; needs a compiler"
    )
    options = parser.parse_args()
    keep_pages()
    rows = []
    for case in SHAPES:
        for staged in (False, True):
            rows.append(measure(case, staged, options.rounds, options.compile))
            print(json.dumps(rows[-1]), flush=True)
    if options.write:
        backend = keras.backend.backend()
        record.write(
            f"transforms_{backend}_{options.device_name}",
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
