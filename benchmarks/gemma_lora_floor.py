"""How much of a LoRA step is products that nothing can leave out?

    KERAS_BACKEND=tensorflow python benchmarks/gemma_lora_floor.py [--write]

Times the matrix products of the step of `gemma_lora.py` alone, one thread, each by the fastest call
that the backend has (`kmodels.ops.dense`): of each block the six kernels, forward and for the
gradient of their input, and of the head the logits of the weighted positions and the gradient of
the hidden states. Attention, norms, activations and everything else are left out, so no step can be
faster on this processor. Seconds of CPU time, medians, times the number of blocks and tiles.
"""

import argparse
import importlib.metadata
import json
import statistics
import time
from pathlib import Path

import keras
import numpy as np

from kmodels import ops

RESULTS = Path(__file__).parent / "results"
TILE = 4096
# width, heads, key heads, head width, MLP, blocks, vocabulary
SHAPES = {
    "270m": (640, 4, 1, 256, 2048, 18, 262144),
    "small": (512, 4, 1, 128, 2048, 6, 256000),
}


def products(shapes: str, length: int) -> list[tuple[int, int, int, float]]:
    """(rows, in, out, how often) of all products of a step at batch 2."""
    width, heads, key_heads, head, mlp, blocks, vocabulary = SHAPES[shapes]
    tokens, counted = 2 * length, length - 1 + length * 3 // 4 - 1
    kernels = [(width, heads * head), (heads * head, width), (width, mlp), (width, mlp)]
    kernels += [(width, key_heads * head)] * 2 + [(mlp, width)]
    found = [(tokens, a, b, blocks) for a, b in kernels]
    found += [(tokens, b, a, blocks) for a, b in kernels]
    tiles = vocabulary / TILE
    return [*found, (counted, width, TILE, tiles), (counted, TILE, width, tiles)]


def seconds(rows: int, inner: int, outer: int, dtype: str, rounds: int) -> float:
    """Median CPU time of one product."""
    rng = np.random.default_rng(0)
    x, kernel = (
        keras.ops.convert_to_tensor(rng.normal(size=shape).astype("float32"), dtype)
        for shape in ((rows, inner), (inner, outer))
    )
    run = compiled(ops.dense)
    times = []
    for turn in range(rounds + 2):
        begun = time.process_time()
        run(x, kernel)
        if turn > 1:
            times.append(time.process_time() - begun)
    return statistics.median(times)


def compiled(function):
    """The function as a step runs it; waits for the result."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        fast = jax.jit(function)
        return lambda *x: jax.block_until_ready(fast(*x))
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.function(function, autograph=False)
    import torch

    torch.set_num_threads(1)
    return torch.no_grad()(function)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    rows = []
    for shapes, length in (("270m", 256), ("270m", 512), ("small", 256)):
        for dtype in ("bfloat16", "float32"):
            floor = sum(
                times * seconds(*sizes, dtype, options.rounds)
                for *sizes, times in products(shapes, length)
            )
            work = sum(2 * a * b * c * times for a, b, c, times in products(shapes, length))
            row = {"shapes": shapes, "length": length, "dtype": dtype, "floor_s": round(floor, 3)}
            rows.append(row | {"gflop_per_s": round(work / floor / 1e9)})
            print(json.dumps(rows[-1]), flush=True)
    if options.write:
        backend, date = keras.backend.backend(), time.strftime("%Y-%m-%d")
        content = {
            "question": __doc__.splitlines()[0],
            "backend": backend,
            "versions": {name: importlib.metadata.version(name) for name in ("keras", backend)},
            "clock": "process CPU",
            "threads": 1,
            "rounds": options.rounds,
            "date": date,
            "rows": rows,
        }
        target = RESULTS / f"floor_gemma_lora_{backend}_cpu_{date}.json"
        target.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
