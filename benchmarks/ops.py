"""Is each override faster or leaner than the op's generic body?

    KERAS_BACKEND=torch python benchmarks/ops.py [--write] [--device-name cpu] [OP ...]

Runs the two bodies of each op in turn, forward and backward, on ViT-S/16 shapes (batch 8 at 224
pixels, and longer sequences for attention), one thread. `time_ratio` and `memory_ratio` are
override over generic: below 1 the override wins. Time is the process's CPU time, which neighbours
on the machine disturb little (`--wall` for a GPU), the median of interleaved calls, in
milliseconds; memory is what the backward pass has to keep (torch: bytes of saved
tensors beyond the inputs; JAX: XLA's temporary buffers of the compiled step), in MiB.
"""

import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import ml_dtypes
import numpy as np
import record

from kmodels import ops
from kmodels.core import dispatch
from kmodels.layers.quantized import Quantization, quantize_array

BACKEND = dispatch.backend()
Case = tuple[str, str, str, list[Any], dict[str, Any]]


def cases() -> list[Case]:
    """(op, label, dtype, arguments, keyword arguments).

    An argument is the shape of an array to differentiate by. Arrays stand first, and have no
    gradient.
    """
    tokens, width = (8, 197, 384), 384
    found: list[Case] = []
    for dtype in ("float32", "bfloat16"):
        for rate in (0.0, 0.1):
            keywords = {"dropout": rate, "seed": keras.random.SeedGenerator(1)} if rate else {}
            label = f"8x197x6x64 dropout {rate}"
            found.append(("attention", label, dtype, [(8, 197, 6, 64)] * 3, keywords))
        for length in (384, 1024):
            found.append(("attention", f"1x{length}x6x64", dtype, [(1, length, 6, 64)] * 3, {}))
        found.append(
            ("attention", "1x1024x6x64 causal", dtype, [(1, 1024, 6, 64)] * 3, {"causal": True})
        )
        for length in (256, 512):  # the heads of Gemma 3 270M
            shapes = [(2, length, 4, 256), *[(2, length, 1, 256)] * 2]
            label = f"2x{length}x4x256, one key head, causal"
            found.append(("attention", label, dtype, shapes, {"causal": True}))
        positions = {"positions": np.arange(256)}
        found.append(("rotary_embedding", "2x256x4x256", dtype, [(2, 256, 4, 256)], positions))
        drawn = np.random.default_rng(1).uniform(-6, 6, (201, 2)).astype("float32")
        places = {"coordinates": keras.ops.convert_to_tensor(drawn)}
        found.append(("rotary_embedding_2d", "8x201x6x64", dtype, [(8, 201, 6, 64)], places))
        found.append(("layer_norm", "8x197x384", dtype, [tokens, (width,), (width,)], {}))
        found.append(("rms_norm", "2x256x640", dtype, [(2, 256, 640), (640,)], {}))
        found.append(("gelu", "8x197x1536", dtype, [(8, 197, 1536)], {}))
        hidden = [tokens, (width, 1536), (1536,), (1536, width), (width,)]
        found.append(("mlp", "8x197x384 by 1536", dtype, hidden, {}))
        found.append(("gated_gelu", "2x256x2048", dtype, [(2, 256, 2048)] * 2, {}))
        found.append(("gated_silu", "2x256x2048", dtype, [(2, 256, 2048)] * 2, {}))
        found.append(("dense", "8x197x384 to 1536", dtype, [tokens, (width, 1536), (1536,)], {}))
        found.append(
            ("dense", "8x197x1536 to 384", dtype, [(8, 197, 1536), (1536, width), (width,)], {})
        )
        for tokens_, groups, chosen, inner, outer in (
            (512, 8, 2, 256, 512),
            (256, 128, 8, 256, 128),
        ):
            rows = tokens_ * chosen
            draw = np.random.default_rng(1)
            sizes = draw.multinomial(rows, draw.dirichlet(np.full(groups, 2.0)))
            label = f"{tokens_} tokens to {chosen} of {groups}, {inner} to {outer}"
            shapes = [(rows, inner), (groups, inner, outer)]
            grouped = {"sizes": keras.ops.convert_to_tensor(sizes.astype("int32"))}
            found.append(("grouped_dense", label, dtype, shapes, grouped))
        found.append(("dense", "8x17x64 to 64", dtype, [(8, 17, 64), (64, 64), (64,)], {}))
        seeded = {"rate": 0.1, "seed": keras.random.SeedGenerator(2)}
        found.append(("dropout", "8x197x1536 rate 0.1", dtype, [(8, 197, 1536)], seeded))
        drawn = np.random.default_rng(1)
        for layers, shape, double in (
            (1, (1152, 6912), True),
            (1, (1152, 6912), False),
            (6, (1152, 1152), False),
        ):
            settings = Quantization("nf4", double=double)
            kernels = [drawn.normal(size=shape) * 0.02 for _ in range(layers)]
            arrays = [part for kernel in kernels for part in quantize_array(kernel, settings)]
            label = f"{layers} of 2x256x1152 to {shape[1]}{', scales in 8 bits' * double}"
            found.append(
                ("quantized_dense", label, dtype, [*arrays, (2, 256, 1152)], {"mode": "nf4"})
            )
        numbers = drawn.normal(size=(1152, 6912)).astype(ml_dtypes.float8_e4m3fn).view("uint8")
        scales = drawn.uniform(0.01, 0.02, (9, 6912)).astype("float32")
        arrays = [numbers, scales, (2, 256, 1152)]
        label = "1 of 2x256x1152 to 6912, FP8"
        found.append(("quantized_dense", label, dtype, arrays, {"mode": "fp8"}))
        found.append(
            (
                "patch_embedding",
                "8x224x224x3 patch 16",
                dtype,
                [(8, 224, 224, 3), (768, width), (width,)],
                {"patch_size": 16},
            )
        )
    return found


def torch_step(function: Callable[..., Any], arrays: list[Any], skip: int) -> Any:
    """(run, memory in MiB) of a forward and backward pass; images get no gradient."""
    import torch

    tensors = [keras.ops.convert_to_tensor(x).clone() for x in arrays]
    for tensor in tensors[skip:]:
        tensor.requires_grad_(True)
    inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    weight = torch.ones_like(function(*tensors))

    def run() -> None:
        torch.autograd.grad(function(*tensors), tensors[skip:], weight)

    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in inputs:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = function(*tensors)
    memory = sum(kept.values()) / 2**20
    del output
    return run, memory


def jax_step(function: Callable[..., Any], arrays: list[Any], skip: int) -> Any:
    """(run, memory in MiB) of a compiled forward and backward pass; images get no gradient."""
    import jax

    tensors = [keras.ops.convert_to_tensor(x) for x in arrays]
    weight = jax.numpy.ones_like(function(*tensors))

    def step(cotangent: Any, *values: Any) -> Any:
        with keras.StatelessScope():  # for the state of seed generators
            output, pull = jax.vjp(lambda *rest: function(*values[:skip], *rest), *values[skip:])
            return output, pull(cotangent)

    compiled: Any = jax.jit(step).lower(weight, *tensors).compile()
    memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
    return lambda: jax.block_until_ready(compiled(weight, *tensors)), memory


def tensorflow_step(function: Callable[..., Any], arrays: list[Any], skip: int) -> Any:
    """(run, memory in MiB) of a graph's forward and backward pass; images get no gradient."""
    import tensorflow as tf

    tensors = [keras.ops.convert_to_tensor(x) for x in arrays]
    weight = tf.ones_like(function(*tensors))
    forward = []

    @tf.function
    def step(cotangent: Any, *values: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values[skip:])
            output = function(*values)
        graph = tf.compat.v1.get_default_graph()
        forward[:] = [operation.name for operation in graph.get_operations()]
        return output, *tape.gradient(output, values[skip:], cotangent)

    graph = step.get_concrete_function(weight, *tensors).graph
    kept = kept_tensors(graph.get_operations(), set(forward))
    memory = sum(math.prod(x.shape) * x.dtype.size for x in kept) / 2**20
    return lambda: [x.numpy() for x in step(weight, *tensors)], memory


def kept_tensors(operations: list[Any], forward: set[str]) -> list[Any]:
    """Returns what the forward pass of a graph makes and the backward pass reads, each once."""
    found = {}
    for operation in operations:
        if operation.name in forward:
            continue
        for tensor in operation.inputs:
            while tensor.op.type in ("Identity", "Reshape") and tensor.op.inputs:
                tensor = tensor.op.inputs[0]
            made = tensor.op.type not in ("Placeholder", "Const", "ReadVariableOp")
            if made and tensor.op.name in forward and tensor.shape.is_fully_defined():
                found[tensor.name] = tensor
    return list(found.values())


def by_parts(function: Callable[..., Any], *values: Any, **keywords: Any) -> Any:
    """Calls an op that takes the parts of its kernel as one argument, for several in turn."""
    *arrays, x = values
    size = 4 if len(arrays) == 4 else 2  # scales in 8 bits have scales themselves
    for i in range(0, len(arrays), size):
        x = function(x, arrays[i : i + size], **keywords)
    return x


def main() -> None:
    parser = record.flags(__doc__)
    parser.add_argument("ops", nargs="*", help="only these ops")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device-name", default="cpu", help="for the file's name")
    parser.add_argument("--wall", action="store_true", help="measure wall-clock time")
    arguments = parser.parse_args()
    clock = time.perf_counter if arguments.wall else time.process_time
    if BACKEND == "torch":
        import torch

        torch.set_num_threads(1)
    make = {"torch": torch_step, "jax": jax_step, "tensorflow": tensorflow_step}[BACKEND]
    rng = np.random.default_rng(0)
    rows = []
    for name, label, dtype, shapes, keywords in cases():
        op = getattr(ops, name)
        if op.override is None or (arguments.ops and name not in arguments.ops):
            continue
        arrays = [
            keras.ops.cast(rng.normal(size=shape) * 0.5, dtype)
            if isinstance(shape, tuple)
            else keras.ops.convert_to_tensor(shape)
            for shape in shapes
        ]
        skip = sum(not isinstance(shape, tuple) for shape in shapes)
        skip += name == "patch_embedding"
        call = by_parts if name == "quantized_dense" else lambda f, *values, **k: f(*values, **k)
        runs: dict[str, list[float]] = {"generic": [], "override": []}
        steps, memory = {}, {}
        for path, function in (("generic", op.generic), ("override", op.override)):
            steps[path], memory[path] = make(
                lambda *values, f=function, k=keywords, call=call: call(f, *values, **k),
                arrays,
                skip,
            )
        for turn in range(-3, arguments.rounds):
            for path, step in steps.items():
                start = clock()
                step()
                if turn >= 0:
                    runs[path].append(1e3 * (clock() - start))
        times = {path: statistics.median(values) for path, values in runs.items()}
        first = (arrays[-1], arrays[:-1]) if call is by_parts else arrays
        declines = op.supports(op.bind(*first, **keywords)) if op.supports else None
        row = {
            "override": f"{name}_{BACKEND}",
            "case": label,
            "dtype": dtype,
            "time_ms": {path: round(value, 3) for path, value in times.items()},
            "time_ratio": round(times["override"] / times["generic"], 3),
            "declines": declines,
        }
        if not math.isnan(memory["generic"]):
            row["memory_mb"] = {path: round(value, 3) for path, value in memory.items()}
            row["memory_ratio"] = round(memory["override"] / max(memory["generic"], 1e-6), 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
    if arguments.write:
        record.write(
            f"ops_{BACKEND}_{arguments.device_name}",
            "Is each override faster or leaner than the op's generic body?",
            ("keras", "numpy", BACKEND),
            backend=BACKEND,
            clock="wall" if arguments.wall else "process CPU",
            threads=1,
            rounds=arguments.rounds,
            rows=rows,
        )


if __name__ == "__main__":
    main()
