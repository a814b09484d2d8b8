"""Attention alone, forward and backward, beside the best kernels of the framework.

Each row names what ran: on torch the longest kernels by the profiler, on JAX the custom calls in
the compiled program. `declines` is why the override left a call to the op's own body.
"""

import re
from typing import Any

import numpy as np

from accelerator import clock

LONGEST_PLAIN = 8192  # what holds T x T scores is left out beyond it


def run(settings: dict[str, Any]) -> clock.Parts:
    """Yields a row per call, heads and system."""
    yield {"dtype": "bfloat16", "batch": 1}
    for heads in settings["heads"]:
        for kind, length in settings["calls"]:
            yield from one(kind, length, heads, settings)


def one(kind: str, length: int, heads: Any, settings: dict[str, Any]) -> clock.Parts:
    import keras

    from kmodels import ops

    keywords: dict[str, Any] = {"causal": kind != "full"}
    if kind == "window":
        keywords["window"] = settings["window"]
    if kind == "segments":
        ids = (np.arange(length)[None] * 4 // length).astype("int32")
        keywords["segment_ids"] = keras.ops.convert_to_tensor(ids)
    if kind == "soft cap":
        keywords["soft_cap"] = 50.0
    rng, (queries, keys, width) = np.random.default_rng(0), heads
    shapes = [(1, length, count, width) for count in (queries, keys, keys)]
    arrays = [
        keras.ops.convert_to_tensor(rng.standard_normal(shape, "float32"), "bfloat16")
        for shape in shapes
    ]
    bodies: dict[str, Any] = {"kmodels": lambda *x: ops.attention(*x, **keywords)}
    if length <= LONGEST_PLAIN:
        bodies["kmodels_generic"] = lambda *x: ops.attention.generic(*x, **keywords)
    if clock.backend() == "torch":
        with_flex = kind in settings["flex"]
        systems, told = torch_systems(bodies, arrays, kind, keywords, length, with_flex)
    else:
        systems, told = jax_systems(bodies, arrays, kind, keywords)
    case = f"{kind}, T {length}, heads {'/'.join(map(str, heads))}"
    rows = yield from clock.measure(case, systems, settings["rounds"])
    for row in rows:
        name = row["system"]
        if "median_ms" in row:
            row["kernels"] = told.get(name) or clock.kernels(systems[name])
    rows[0]["declines"] = ops.attention.declines(*arrays, **keywords)
    yield {"rows": rows}


def torch_systems(
    bodies: dict[str, Any],
    arrays: list[Any],
    kind: str,
    keywords: dict[str, Any],
    length: int,
    with_flex: bool,
) -> tuple[dict[str, clock.Run], dict[str, list[str]]]:
    """Our op, SDPA by each of its kernels where the call has no more than SDPA knows, and flex."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    tensors = [x.detach().clone().requires_grad_(True) for x in arrays]
    weight = torch.ones_like(tensors[0])
    causal = keywords["causal"]

    def step(function: Any) -> clock.Run:
        return lambda: torch.autograd.grad(function(*tensors), tensors, weight)

    systems = {name: step(body) for name, body in bodies.items()}
    names = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
    for name in names if clock.on_gpu() else ("MATH",):

        def by(*x: Any, name: str = name) -> Any:
            with sdpa_kernel(getattr(SDPBackend, name)):
                q, k, v = (part.transpose(1, 2) for part in x)
                return sdpa(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)

        if kind in ("causal", "full"):
            systems[f"sdpa_{name.split('_')[0].lower()}"] = step(by)
    if clock.on_gpu() and with_flex:
        systems |= clock.optional("flex", lambda: {"flex": step(flex(kind, keywords, length))})
    return systems, {}


def flex(kind: str, keywords: dict[str, Any], length: int) -> Any:
    """FlexAttention with the block mask of the call, compiled."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    segments = keywords.get("segment_ids")
    ids = None if segments is None else segments[0]
    window, cap = keywords.get("window"), keywords.get("soft_cap")

    def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen = q >= k
        if window is not None:
            seen = seen & (q - k < window)
        return seen if ids is None else seen & (ids[q] == ids[k])

    def capped(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return cap * torch.tanh(score / cap)

    torch.compiler.reset()  # which gives up after eight masks otherwise
    mask = None if kind == "full" else create_block_mask(visible, None, None, length, length)
    run = torch.compile(flex_attention)

    def function(*x: Any) -> Any:
        q, k, v = (part.transpose(1, 2) for part in x)
        score = capped if cap else None
        output: Any = run(q, k, v, score_mod=score, block_mask=mask, enable_gqa=True)
        return output.transpose(1, 2)

    return function


def jax_systems(
    bodies: dict[str, Any], arrays: list[Any], kind: str, keywords: dict[str, Any]
) -> tuple[dict[str, clock.Run], dict[str, list[str]]]:
    """Our op, and `jax.nn.dot_product_attention` by cuDNN and by XLA."""
    import jax

    causal, window = keywords["causal"], keywords.get("window")

    def native(implementation: str) -> Any:
        size = None if window is None else (window - 1, 0)
        return lambda *x: jax.nn.dot_product_attention(
            *x, is_causal=causal, local_window_size=size, implementation=implementation
        )

    if kind in ("causal", "full", "window"):
        if arrays[0].shape[1] <= LONGEST_PLAIN:
            bodies = bodies | {"jax_xla": native("xla")}
        if clock.on_gpu():
            bodies = bodies | {"jax_cudnn": native("cudnn")}
    systems, told = {}, {}
    weight = jax.numpy.ones_like(arrays[0])
    for name, body in bodies.items():

        def step(cotangent: Any, *x: Any, body: Any = body) -> Any:
            output, pull = jax.vjp(body, *x)
            return output, pull(cotangent)

        try:
            compiled = jax.jit(step).lower(weight, *arrays).compile()
        except Exception as error:
            text = clock.one_line(error)

            def raises(text: str = text) -> None:
                raise RuntimeError(text)

            systems[name] = raises
            continue
        targets = re.findall(r'custom_call_target="([^"]+)"', compiled.as_text())
        told[name] = sorted(set(targets)) or ["no custom call"]
        systems[name] = lambda run=compiled: run(weight, *arrays)
    return systems, told
