"""Attention kernels of JAX for accelerators, each called through one thin function.

Tests replace them by a recorder or a body for CPUs; splash attention also runs on a CPU,
interpreted. Shapes are those of `ops.attention`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

# Lanes of a TPU's vectors: splash attention's blocks are multiples of them.
LANES = 128
# Blocks of splash attention, the largest that pads a text by little.
BLOCKS = (512, 256, LANES)
# The segment of padding has a number that no caller uses.
REAL, ADDED = 0, -(2**31)


def cudnn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> jax.Array:
    """Runs cuDNN's flash attention; `window` counts the query itself, as in `ops.attention`.

    A query and a key are added to odd lengths: JAX refuses to train with them, a rule of cuDNN's
    for calls with a bias that it applies to all.
    """
    length, keys = query.shape[1], key.shape[1]
    # A causal mask hides the key that is added behind all others.
    lengths = jnp.full(key.shape[:1], keys, "int32") if keys % 2 and not causal else None
    output = jax.nn.dot_product_attention(
        _even(query),
        _even(key),
        _even(value),
        scale=scale,
        is_causal=causal,
        key_value_seq_lengths=lengths,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    return output[:, :length]


def _even(x: jax.Array) -> jax.Array:
    """(B, T, N, H) -> (B, T + T % 2, N, H)."""
    more = x.shape[1] % 2
    return jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) if more else x


def splash(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    soft_cap: float | None,
    interpret: bool = False,
) -> jax.Array:
    """Runs splash attention, with lengths padded to its blocks; it neither scales nor batches."""
    # Importing Pallas takes a good part of a second.
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    batch, length, heads, _ = query.shape
    keys = key.shape[1]
    block_q, block_kv = block(length), block(keys)
    more, more_keys = -length % block_q, -keys % block_kv
    offset = keys - length
    kernel = _kernel(
        (length + more, keys + more_keys),
        (block_q, block_kv),
        heads,
        offset,
        causal,
        window,
        soft_cap,
        interpret,
    )
    scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
    ids = None
    # Causal masks hide the keys that are added behind all others; else segments do.
    if segment_ids is not None or (more_keys and not causal):
        if segment_ids is None:
            segment_ids = jnp.full((1, keys), REAL, "int32")
        numbers = jnp.broadcast_to(segment_ids.astype("int32"), (batch, keys))
        own = numbers[:, offset:] if offset >= 0 else jnp.full((batch, length), REAL, "int32")
        ids = SegmentIds(
            q=jnp.pad(own, ((0, 0), (0, more)), constant_values=ADDED),
            kv=jnp.pad(numbers, ((0, 0), (0, more_keys)), constant_values=ADDED),
        )
    inputs = (_padded(scaled, more), _padded(key, more_keys), _padded(value, more_keys))
    output = jax.vmap(kernel)(*inputs, ids)
    return output[:, :, :length].swapaxes(1, 2)


def block(length: int) -> int:
    """Returns the largest block that adds at most an eighth to a length in whole lanes."""
    least = -(-length // LANES) * LANES
    return next(x for x in BLOCKS if -(-length // x) * x <= least * 1.125)


def _padded(x: jax.Array, more: int) -> jax.Array:
    """(B, T, N, H) -> (B, N, T + more, H)."""
    return jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))).swapaxes(1, 2)


@lru_cache(maxsize=64)
def _kernel(
    lengths: tuple[int, int],
    sizes: tuple[int, int],
    heads: int,
    offset: int,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    interpret: bool,
) -> Any:
    """Returns the kernel of a mask; its tables are made once, outside of the running trace."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as made
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    mask: masks.Mask
    if window is not None:
        mask = masks.LocalMask(lengths, (window - 1, 0 if causal else window - 1), offset)
    elif causal:
        mask = masks.CausalMask(lengths, offset)
    else:
        mask = masks.FullMask(lengths)
    rows, columns = sizes
    blocks = made.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
    )
    with jax.ensure_compile_time_eval():
        return made.make_splash_mha(
            masks.MultiHeadMask([mask] * heads),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=soft_cap,
            interpret=interpret,
        )


# By kernel, the platform for which JAX lowers it.
PLATFORMS = {"cudnn": "cuda", "splash": "tpu"}
Inputs = tuple[jax.Array, jax.Array, jax.Array]
# Takes query, key and value, and further arrays, of which no gradient is asked.
Body = Callable[..., jax.Array]


@dataclass(frozen=True)
class Bodies:
    """A kernel, and a body of plain operations with the same result on every platform."""

    name: str
    kernel: Body
    plain: Body


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def by_kernel(
    query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array | None, bodies: Bodies
) -> jax.Array:
    """Runs the kernel on its platform, and the plain body on others.

    The platform is known when a program is lowered, after Python has run this function: with a GPU
    present a program may be for the CPU, and an exported one is for several platforms.
    """
    return _run(query, key, value, ids, bodies)


@partial(jax.jit, static_argnums=(4,))
def _run(
    query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array | None, bodies: Bodies
) -> jax.Array:
    kernels = {PLATFORMS[bodies.name]: bodies.kernel}
    return lax.platform_dependent(query, key, value, ids, default=bodies.plain, **kernels)


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array | None, bodies: Bodies
) -> tuple[jax.Array, Any]:
    output, pull = jax.vjp(lambda *x: _run(*x, ids, bodies), query, key, value)
    return output, (pull, query, key, value, ids)


def _backward(bodies: Bodies, saved: Any, gradient: jax.Array) -> tuple[jax.Array | None, ...]:
    pull, query, key, value, ids = saved
    return (*_slopes(bodies, pull, query, key, value, ids, gradient), None)


by_kernel.defvjp(_forward, _backward)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _slopes(
    bodies: Bodies,
    pull: Callable[[jax.Array], Inputs],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ids: jax.Array | None,
    gradient: jax.Array,
) -> Inputs:
    """Returns the kernel's gradients; their derivatives are those of the plain body."""
    return pull(gradient)


@_slopes.defjvp
def _slopes_of_slopes(bodies: Bodies, primals: Any, tangents: Any) -> tuple[Inputs, Any]:
    _, *inputs, ids, gradient = primals
    _, *directions, _, of_gradient = tangents

    def again(query: jax.Array, key: jax.Array, value: jax.Array, gradient: jax.Array) -> Inputs:
        return jax.vjp(lambda *x: bodies.plain(*x, ids), query, key, value)[1](gradient)

    _, of_slopes = jax.jvp(again, (*inputs, gradient), (*directions, of_gradient))
    return _slopes(bodies, *primals), of_slopes
