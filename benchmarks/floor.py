"""How much of a training step is work that no code can leave out?

    KERAS_BACKEND=tensorflow python benchmarks/floor.py gemma_lora [--write]
    KERAS_BACKEND=torch python benchmarks/floor.py vit_train [--write]
    python benchmarks/gemma_lora.py WEIGHTS --shapes e2b --systems kmodels transformers floor
    python benchmarks/image_text_lora.py WEIGHTS --systems kmodels transformers_sdpa floor

The last two take turns with the systems whose step it is. Times parts of the steps of
`gemma_lora.py` and `vit_train.py` alone, one thread, by the fastest call that the backend has.
`gemma_lora`: of each block the kernels, forward and for the gradient of their input, and of the
head the logits of the weighted positions and the gradient of the hidden states. `vit_train`, the
small model at batch 8: of each block the kernels, forward and for both gradients, and the six
products of attention; of the last block what the class token needs. On torch also, as `passes`, one
pass forward and one back of GELU, softmax and layer norms, the additions to the residual stream,
one cast of each kernel and of its gradient, and SGD's update. Nothing else is counted, so no step
is faster on this processor. Seconds of CPU time, medians, times how often.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import record
from gemma_lora import answer
from keras import ops

from kmodels.ops import dense

TILE = 4096
# width, heads, key heads, head width, MLP, blocks, vocabulary
GEMMAS = {
    "270m": (640, 4, 1, 256, 2048, 18, 262144),
    "small": (512, 4, 1, 128, 2048, 6, 256000),
}
# The blocks of Gemma 4 E2B's widths that gemma_lora.py has: head width, MLP, whether the block has
# keys and values of its own.
E2B_BLOCKS = ((256, 6144, True), (512, 6144, True), (256, 12288, False), (512, 12288, False))
# batch, tokens, width, heads, MLP, blocks, numbers of a patch, classes
VIT = (8, 197, 384, 6, 1536, 12, 768, 1000)
# A row has how a product is formed, the shapes of what goes in, and how often a step has it.
Product = tuple[str, tuple[int, ...], tuple[int, ...], float]


def gemma_products(shapes: str, length: int) -> list[Product]:
    """Yields the products of a LoRA step at batch 2."""
    if shapes == "e2b":
        return e2b_products(length)
    if shapes == "image_text":
        return image_text_products(length)
    width, heads, key_heads, head, mlp, blocks, vocabulary = GEMMAS[shapes]
    tokens, counted = 2 * length, length - 1 + length * 3 // 4 - 1
    kernels = [(width, heads * head), (heads * head, width), (width, mlp), (width, mlp)]
    kernels += [(width, key_heads * head)] * 2 + [(mlp, width)]
    tiles = vocabulary / TILE
    sizes = [(tokens, a, b, blocks) for a, b in kernels]
    sizes += [(tokens, b, a, blocks) for a, b in kernels]
    sizes += [(counted, width, TILE, tiles), (counted, TILE, width, tiles)]
    return [("dense", (rows, a), (a, b), times) for rows, a, b, times in sizes]


def e2b_products(length: int) -> list[Product]:
    """Returns the products of a LoRA step at batch 2 of Gemma 4 E2B's widths in 4 blocks.

    No gradient goes below the first block's queries, keys and values, nor into what the embeddings
    of each layer come from.
    """
    width, heads, per_layer, vocabulary = 1536, 8, 256, 262144
    tokens, counted = 2 * length, length - 1 + length * 3 // 4 - 1
    forward, backward = [(width, len(E2B_BLOCKS) * per_layer)], []
    for number, (head, mlp, own) in enumerate(E2B_BLOCKS):
        first = [(width, heads * head)] + [(width, head)] * 2 * own
        rest = [(heads * head, width), (width, mlp), (width, mlp), (mlp, width)]
        rest += [(width, per_layer), (per_layer, width)]
        forward += first + rest
        backward += [(b, a) for a, b in (rest if number == 0 else first + rest)]
    tiles = vocabulary / TILE
    sizes: list[tuple[int, int, int, float]] = [(tokens, a, b, 1) for a, b in forward + backward]
    sizes += [(counted, width, TILE, tiles), (counted, TILE, width, tiles)]
    return [("dense", (rows, a), (a, b), times) for rows, a, b, times in sizes]


def image_text_products(counted: int) -> list[Product]:
    """Returns the products of a LoRA step of image_text_lora.py, on one image and one text.

    In the first block of vision no gradient goes below queries and values, in those of text all
    does. Attention has six products a block, its weights being kept.

    Args:
        counted: tokens of text whose logits count.
    """
    patches, pooled, blocks, vocabulary = 4096, 256, 4, 262208
    tokens = 2 + pooled + counted + 1
    wide, inner, heads, head = 1152, 4304, 16, 72
    width, mlp, query, key = 2560, 10240, 2048, 1024
    seen = [(wide, wide), (wide, inner), (inner, wide)]
    sizes: list[tuple[int, int, int, float]] = [(patches, *pair, 2 * blocks) for pair in seen]
    sizes += [(patches, wide, wide, 6 * blocks - 3), (patches, 588, wide, 1)]
    sizes += [(pooled, wide, width, 1), (pooled, width, wide, 1)]
    read = [(width, query), *[(width, key)] * 2, (query, width), *[(width, mlp)] * 2, (mlp, width)]
    for a, b in read:
        sizes += [(tokens, a, b, blocks), (tokens, b, a, blocks)]
    tiles = vocabulary / TILE
    sizes += [(counted, width, TILE, tiles), (counted, TILE, width, tiles)]
    found: list[Product] = [("dense", (rows, a), (a, b), times) for rows, a, b, times in sizes]
    rows, weights = (patches, head), (patches, patches)
    return [
        *found,
        ("second", rows, rows, 2 * heads * blocks),
        ("dense", weights, rows, 2 * heads * blocks),
        ("first", weights, rows, heads * (2 * blocks - 1)),
    ]


def vit_products() -> list[Product]:
    """Yields the products of a training step of all weights."""
    batch, tokens, width, heads, mlp, blocks, patch, classes = VIT
    rows, full = batch * tokens, blocks - 1
    sizes = [(rows, width, width, 4 * full + 2), (batch, width, width, 2)]
    sizes += [(rows, width, mlp, full), (rows, mlp, width, full)]
    sizes += [(batch, width, mlp, 1), (batch, mlp, width, 1), (batch, width, classes, 1)]
    patches = rows - batch
    found: list[Product] = [
        ("dense", (patches, patch), (patch, width), 1),
        ("first", (patches, patch), (patches, width), 1),
    ]
    for many, a, b, times in sizes:
        found += [
            ("dense", (many, a), (a, b), times),
            ("second", (many, b), (a, b), times),
            ("first", (many, a), (many, b), times),
        ]
    for queries, times in ((tokens, full), (1, 1)):
        head, weights = (batch, heads, queries, width // heads), (batch, heads, queries, tokens)
        keys = (batch, heads, tokens, width // heads)
        found += [
            ("second", head, keys, 2 * times),
            ("dense", weights, keys, 2 * times),
            ("first", weights, head, 2 * times),
        ]
    return found


def product(form: str, x: Any, y: Any) -> Any:
    """x y, or with the first or the second transposed."""
    if form == "dense":
        return dense(x, y) if len(y.shape) == 2 else ops.matmul(x, y)
    if form == "first":
        return ops.matmul(ops.swapaxes(x, -1, -2), y)
    return ops.matmul(x, ops.swapaxes(y, -1, -2))


def passes(dtype: str) -> dict[str, tuple[Callable[[], Any], float]]:
    """Returns what a ViT's step on torch computes beside products, each with how often it does."""
    import torch
    from torch.nn import functional

    batch, tokens, width, heads, mlp, blocks, _, _ = VIT
    narrow, full = getattr(torch, dtype), blocks - 1

    def made(*shape: int, kind: Any = narrow, grad: bool = False) -> Any:
        return torch.randn(shape, dtype=kind, requires_grad=grad)

    def both(function: Callable[..., Any], x: Any, *more: Any) -> Callable[[], Any]:
        slope = torch.ones_like(x)

        def run() -> Any:
            with torch.enable_grad():
                return torch.autograd.grad(function(x), (x, *more), slope)

        return run

    hidden, stream = made(batch * tokens, mlp, grad=True), made(batch, tokens, width, grad=True)
    scores = made(batch, heads, tokens, tokens, grad=True)
    scale, shift = made(width, grad=True), made(width, grad=True)
    # The arrays are of all blocks at once: parts of them would stay in the processor's cache.
    weights = blocks * (4 * width * width + 2 * width * mlp)
    kernel, change = (made(weights, kind=torch.float32) for _ in range(2))
    slope = made(weights)
    left, right = made(batch, tokens, width), made(batch, tokens, width)

    def norm(x: Any) -> Any:
        return functional.layer_norm(x, (width,), scale, shift)

    found: dict[str, tuple[Callable[[], Any], float]] = {
        "gelu": (both(functional.gelu, hidden), full),
        "softmax": (both(lambda x: torch.softmax(x, -1), scores), full),
        "layer norm": (both(norm, stream, scale, shift), 2 * full + 1),
        "additions": (lambda: left + right, 4 * full),
        "update": (lambda: kernel.add_(change, alpha=-1e-9), 1),
    }
    if narrow != torch.float32:
        found["casts"] = (lambda: (kernel.to(narrow), slope.float()), 1)
    return found


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """Median CPU time of one call."""
    times = []
    for turn in range(rounds + 2):
        begun = time.process_time()
        run()
        if turn > 1:
            times.append(time.process_time() - begun)
    return statistics.median(times)


def timed_product(form: str, first: tuple, second: tuple, dtype: str, rounds: int) -> float:
    rng = np.random.default_rng(0)
    x, y = (
        ops.convert_to_tensor(rng.normal(size=shape).astype("float32"), dtype)
        for shape in (first, second)
    )
    run = compiled(lambda x, y: product(form, x, y))
    return seconds(lambda: run(x, y), rounds)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
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


def floor(found: list[Product], dtype: str, rounds: int) -> dict[str, Any]:
    """Seconds of all products, and what the processor reached in them."""
    total = work = 0.0
    for form, first, second, times in found:
        total += times * timed_product(form, first, second, dtype, rounds)
        outer = second[-2] if form == "second" else second[-1]
        work += 2 * np.prod([*first, outer], dtype=float) * times
    return {"floor_s": round(total, 3), "gflop_per_s": round(work / total / 1e9)}


def serve(shapes: str, dtype: str, length: int) -> None:
    """A child's side of gemma_lora.py: for each line that comes in, all products of one step."""
    rng = np.random.default_rng(0)
    calls = []
    for form, first, second, times in gemma_products(shapes, length):
        x, y = (
            ops.convert_to_tensor(rng.normal(size=shape).astype("float32"), dtype)
            for shape in (first, second)
        )
        run = compiled(partial(product, form))
        run(x, y)
        calls.append((partial(run, x, y), times))

    def step() -> tuple[float, float]:
        total = 0.0
        for call, times in calls:
            begun = time.process_time()
            call()
            total += times * (time.process_time() - begun)
        return total, float("nan")

    answer(step)


def measure(question: str, dtype: str, rounds: int) -> list[dict[str, Any]]:
    if question == "gemma_lora":
        cases = (("270m", 256), ("270m", 512), ("small", 256))
        return [
            {"shapes": shapes, "length": length, "dtype": dtype}
            | floor(gemma_products(shapes, length), dtype, rounds)
            for shapes, length in cases
        ]
    row = {"shapes": "small", "batch": VIT[0], "dtype": dtype}
    row |= floor(vit_products(), dtype, rounds)
    if keras.backend.backend() == "torch":
        timed = {k: times * seconds(run, rounds) for k, (run, times) in passes(dtype).items()}
        row["passes_s"] = {name: round(value, 4) for name, value in timed.items()}
        row["with_passes_s"] = round(row["floor_s"] + sum(timed.values()), 3)
    return [row]


def main() -> None:
    parser = record.flags(__doc__)
    parser.add_argument("question", choices=("gemma_lora", "vit_train"), nargs="?")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _, shapes, dtype, length = json.loads(options.child)
        serve(shapes, dtype, length)
        return
    rows = []
    for dtype in ("bfloat16", "float32"):
        for row in measure(options.question, dtype, options.rounds):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.write:
        backend = keras.backend.backend()
        record.write(
            f"floor_{options.question}_{backend}_cpu",
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
