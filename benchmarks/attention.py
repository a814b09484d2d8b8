"""How do time and memory of attention grow with the length of the text?

    python benchmarks/attention.py [--backends jax,torch,tensorflow] [--lengths 512,...] [--write]

One layer's attention, forward and backward, batch 1, by the op's generic body and by the override
of each backend, on one thread. Each row is a process of its own. Memory is what stands beside the
inputs, in MiB: on JAX the temporary buffers of the compiled gradient; on torch and TensorFlow the
growth of the process's peak (VmHWM) over what it was before a step, where the C library gives large
blocks back at once (MALLOC_MMAP_THRESHOLD_). Time is CPU time in ms, the median of `--rounds`.
`one_block` is the op's generic body without blocks. `memory_growth` is memory over that of half
the length.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import record

HEADS, GROUPS, WIDTH = 4, 2, 64
SEGMENT = 1024
KINDS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window 1024": {"causal": True, "window": 1024},
    "segments": {"causal": True, "segment_ids": True},
    "soft cap": {"causal": True, "soft_cap": 50.0},
    "dropout": {"causal": True, "dropout": 0.1},
}
BODIES = ("override", "generic", "one_block")


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Measures one row in this process."""
    import importlib

    import keras
    import numpy as np

    from kmodels import ops

    keywords, length = dict(KINDS[settings["kind"]]), settings["length"]
    if "segment_ids" in keywords:
        keywords["segment_ids"] = (np.arange(length)[None] // SEGMENT).astype("int32")
    if "dropout" in keywords:
        keywords["seed"] = keras.random.SeedGenerator(1)
    if settings["body"] == "one_block":
        vars(importlib.import_module("kmodels.ops.attention"))["PAIRS"] = 2**62
    body = ops.attention if settings["body"] == "override" else ops.attention.generic
    rng = np.random.default_rng(0)
    arrays = [
        keras.ops.cast(rng.normal(size=(1, length, heads, WIDTH)), settings["dtype"])
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    row: dict[str, Any] = {"declines": None}
    if settings["body"] == "override":
        row["declines"] = ops.attention.declines(*arrays, **keywords)
    make = {"torch": torch_step, "jax": jax_step, "tensorflow": tensorflow_step}
    run, memory = make[keras.backend.backend()](lambda *x: body(*x, **keywords), arrays)
    before = record.status("VmHWM")
    run()
    if memory is None:
        memory = (record.status("VmHWM") - before) / 2**20
    times = []
    for _ in range(settings["rounds"]):
        start = time.process_time()
        run()
        times.append(1e3 * (time.process_time() - start))
    return row | {"memory_mib": round(memory, 1), "time_ms": round(statistics.median(times), 2)}


Step = tuple[Callable[[], Any], float | None]


def torch_step(function: Callable[..., Any], arrays: list[Any]) -> Step:
    import torch

    torch.set_num_threads(1)
    tensors = [x.clone().requires_grad_(True) for x in arrays]
    weight = torch.ones_like(tensors[0])
    # What the first call loads is no part of the layer.
    short = [x[:, :16].detach().requires_grad_(True) for x in tensors]
    torch.autograd.grad((short[0] @ short[0].mT).sum(), short[0])
    return lambda: torch.autograd.grad(function(*tensors), tensors, weight), None


def jax_step(function: Callable[..., Any], arrays: list[Any]) -> Step:
    import jax
    import keras

    def step(cotangent: Any, *values: Any) -> Any:
        with keras.StatelessScope():  # for the state of seed generators
            output, pull = jax.vjp(function, *values)
            return output, pull(cotangent)

    weight = jax.numpy.ones_like(arrays[0])
    compiled: Any = jax.jit(step).lower(weight, *arrays).compile()
    memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
    return lambda: jax.block_until_ready(compiled(weight, *arrays)), memory


def tensorflow_step(function: Callable[..., Any], arrays: list[Any]) -> Step:
    import tensorflow as tf

    weight = tf.ones_like(arrays[0])

    @tf.function
    def step(cotangent: Any, *values: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            output = function(*values)
        return output, *tape.gradient(output, values, cotangent)

    step.get_concrete_function(weight, *arrays)
    return lambda: [x.numpy() for x in step(weight, *arrays)], None


def child(backend: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns what `measure` finds in a process with this backend."""
    large = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "TF_CPP_MIN_LOG_LEVEL": "3"}
    return record.child(__file__, backend, "--measure", json.dumps(settings), **large)


def main() -> None:
    parser = record.flags(__doc__)
    parser.add_argument("--backends", default=os.environ.get("KERAS_BACKEND", "jax"))
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--bodies", default=",".join(BODIES[:2]))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device-name", default="cpu", help="for the file's name")
    parser.add_argument("--measure", help="for the script itself: measure this row")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(json.loads(arguments.measure))))
        return
    for backend in arguments.backends.split(","):
        rows: list[dict[str, Any]] = []
        for kind in arguments.kinds.split(","):
            for body in arguments.bodies.split(","):
                half = {}
                for length in map(int, arguments.lengths.split(",")):
                    settings = {"kind": kind, "body": body, "length": length}
                    more = {"dtype": arguments.dtype, "rounds": arguments.rounds}
                    row = settings | child(backend, settings | more)
                    if length // 2 in half and half[length // 2] > 1:
                        row["memory_growth"] = round(row["memory_mib"] / half[length // 2], 2)
                    half[length] = row["memory_mib"]
                    rows.append(row)
                    print(json.dumps(row), flush=True)
        if arguments.write:
            record.write(
                f"attention_{backend}_{arguments.device_name}",
                __doc__,
                ("keras", "numpy", backend),
                backend=backend,
                heads=[HEADS, GROUPS, WIDTH],
                dtype=arguments.dtype,
                threads=1,
                rounds=arguments.rounds,
                rows=rows,
            )


if __name__ == "__main__":
    main()
