"""Attention for JAX: kernels on accelerators, and products with float32 results on CPUs.

On a CPU, XLA takes a slow path for bfloat16 results, copies the operands of grouped heads, and
computes what a causal mask hides; `jax.nn.dot_product_attention` shares that. `choose` of
`_attention_choice_jax` says which body serves a call; none was measured on an accelerator yet.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import keras
from jax import numpy as jnp

from kmodels.core import internals_jax
from kmodels.core.dispatch import OpCall, override
from kmodels.ops._attention_blockwise import Hidden, allowed_pairs, cuts
from kmodels.ops.attention import attention, check_attention, check_ids
from kmodels.overrides import _attention_calls_jax as calls
from kmodels.overrides import _attention_choice_jax as choices
from kmodels.overrides import _attention_kernels_jax as kernels
from kmodels.overrides import _attention_loops_jax as loop
from kmodels.overrides import _attention_products_jax as short
from kmodels.overrides import _attention_ring_jax as ring
from kmodels.overrides import dropout_jax, meshes
from kmodels.overrides.blocks import blocks

# Queries of a block: measured between 32 and 256.
SIZE = 64
# Queries of a block in a loop, and scores of one that are not to be more if it can be.
LOOP_SIZE, SCORES = 128, 2**21
# The same for accelerators, whose blocks are to keep many cores busy; scores of all heads.
LEAST, MOST, ALL_SCORES = 128, 1024, 2**26
# XLA's flags that forbid kernels whose results differ from run to run.
DETERMINISTIC = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")


def supports(call: OpCall) -> str | None:
    """Serves what a kernel, loops or products do better than the op's own body."""
    choice = chosen(facts(call))
    return choice.reason if choice.body == "generic" else None


def chosen(known: choices.Facts) -> choices.Choice:
    """Returns the body that serves a call; JAX itself is asked whether it would trace a kernel."""
    choice = choices.choose(known)
    if choice.body in calls.PLATFORMS and (reason := _refused(known, choice.body)):
        return choices.without_kernel(known, reason)
    return choice


@lru_cache(maxsize=256)
def _refused(known: choices.Facts, body: str) -> str | None:
    """Returns what JAX says against a kernel while it traces one and its gradient, or None."""
    batch, length, heads, width = known.query
    keys, groups = known.key[1:3]
    parts = 1 if heads is None or heads % known.parts else known.parts
    sizes = ((length, (heads or 0) // parts), *[(keys, max((groups or 0) // parts, 1))] * 2)
    shapes = [
        jax.ShapeDtypeStruct(((batch or 0) // known.rows, place, count, width), known.dtype)
        for place, count in sizes
    ]
    ids = jax.ShapeDtypeStruct((1, keys), "int32") if "segments" in known.hidden else None
    cap = 50.0 if known.soft_cap else None
    options = _Options(known.causal, known.window, 1.0, cap, 0.0, body)
    kernel = _bodies(options).kernel

    def traced(*inputs: jax.Array, ids: jax.Array | None) -> Any:
        return jax.vjp(lambda *x: kernel(*x, ids), *inputs)[1](inputs[0])

    try:
        jax.eval_shape(traced, *shapes, ids=ids)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return f"JAX declines the kernel: {str(error).splitlines()[0].rstrip('.')}"
    return None


def facts(call: OpCall) -> choices.Facts:
    """Returns what is known of a call."""
    given = {"mask": call.mask, "segments": call.segment_ids, "blocks": call.block_ids}
    places, along, window = meshes.places(), meshes.tokens(), call.window
    lengths = (*call.query.shape[1:2], *call.key.shape[1:2])
    if window is not None and all(isinstance(x, int) and x <= window for x in lengths):
        window = None  # it hides nothing
    return choices.Facts(
        device=device(),
        query=tuple(call.query.shape),
        key=tuple(call.key.shape),
        value_width=call.value.shape[-1],
        dtype=keras.backend.standardize_dtype(call.query.dtype),
        causal=call.causal,
        window=window,
        hidden=frozenset(name for name, x in given.items() if x is not None),
        soft_cap=call.soft_cap is not None,
        drops=bool(call.dropout) and call.seed is not None,
        generator=call.seed is None or isinstance(call.seed, keras.random.SeedGenerator),
        rows=0 if places is None else meshes.parts(places.rows),
        parts=0 if places is None else meshes.parts((places.heads,) if places.heads else ()),
        tokens=meshes.parts((along,)) if along else 1,
    )


def device() -> choices.Device:
    """Returns what runs programs here unless they say otherwise."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.partition("=")[0] for flag in flags if not flag.endswith("=false")}
    return _device(jax.default_backend(), not names.isdisjoint(DETERMINISTIC))


@lru_cache
def _device(platform: str, deterministic: bool) -> choices.Device:
    if platform != "gpu":
        return choices.Device(platform, deterministic=deterministic)
    first: Any = jax.devices()[0]
    if "rocm" in first.client.platform_version.lower():
        return choices.Device("rocm", deterministic=deterministic)
    major, minor = (int(part) for part in str(first.compute_capability).split("."))
    return choices.Device("cuda", (major, minor), internals_jax.has_cudnn(), deterministic)


@dataclass(frozen=True)
class _Options:
    """The arguments of a call that are not arrays, and the body that serves it."""

    causal: bool
    window: int | None
    scale: float
    soft_cap: float | None
    dropout: float
    body: str


@override(attention, supports)
def attention_jax(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    block_ids: jax.Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    seed: keras.random.SeedGenerator | jax.Array | None = None,
) -> jax.Array:
    """Keeps the attention weights of short texts on CPUs; else nothing of their size."""
    check_attention(query, key, value, causal, window, soft_cap, dropout)
    check_ids(query, key, causal, segment_ids, block_ids)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    bind: Any = attention.bind
    known = facts(
        bind(
            *(query, key, value, mask),
            causal=causal,
            window=window,
            segment_ids=segment_ids,
            block_ids=block_ids,
            soft_cap=soft_cap,
            dropout=dropout,
            seed=seed,
        )
    )
    body = chosen(known).body
    factor = query.shape[3] ** -0.5 if scale is None else scale
    options = _Options(causal, known.window, factor, soft_cap, dropout, body)
    mask = allowed_pairs(query, key, mask, False, None)
    segments, images = (None if x is None else jnp.asarray(x) for x in (segment_ids, block_ids))
    words = dropout_jax.words(seed) if dropout and seed is not None else None  # type: ignore[arg-type]
    if body in calls.PLATFORMS:

        def run(query: jax.Array, key: jax.Array, value: jax.Array, ids: Any) -> jax.Array:
            return calls.by_kernel(query, key, value, ids, _bodies(options))

        return calls.in_parts(run, query, key, value, segments)
    others = (mask, segments, images)
    if body == "ring":
        along = meshes.tokens()
        shared = partial(_plain, options)
        return calls.in_parts(shared, query, key, value, *others, words, tokens=along)
    if words is None and known.parts > 1 and body != "generic":
        return calls.in_parts(partial(_plain, options), query, key, value, *others)
    return _plain(options, query, key, value, *others, words)


@lru_cache(maxsize=256)
def _bodies(options: _Options) -> calls.Bodies:
    """Returns a kernel and what serves in its place; one object for each options, for jit."""
    given = {"causal": options.causal, "window": options.window, "scale": options.scale}

    def cudnn(query: jax.Array, key: jax.Array, value: jax.Array, ids: None) -> jax.Array:
        return kernels.cudnn(query, key, value, **given)

    def splash(query: jax.Array, key: jax.Array, value: jax.Array, ids: Any) -> jax.Array:
        return kernels.splash(query, key, value, ids, **given, soft_cap=options.soft_cap)

    def plain(query: jax.Array, key: jax.Array, value: jax.Array, ids: Any) -> jax.Array:
        return _plain(options, query, key, value, None, ids, None)

    found: dict[str, Callable[..., Any]] = {"cudnn": cudnn, "splash": splash}
    return calls.Bodies(options.body, found[options.body], plain)


def _plain(
    options: _Options,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    pairs: jax.Array | None,
    segments: jax.Array | None,
    images: jax.Array | None,
    words: jax.Array | None = None,
) -> jax.Array:
    """Runs products or loops; `pairs` is the mask with four axes, `words` key the dropout."""
    batch, length, heads, head_dim = query.shape
    keys, groups = key.shape[1:3]
    shared = heads // groups
    causal, window = options.causal, options.window
    if pairs is not None:
        # (B or 1, N or 1, T or 1, S or 1) -> (B or 1, K or 1, T or 1, G or 1, S or 1)
        split = (groups, shared) if pairs.shape[1] > 1 else (1, 1)
        pairs = pairs.reshape(pairs.shape[0], *split, *pairs.shape[2:]).swapaxes(2, 3)
    rows = query.reshape(batch, length, groups, shared, head_dim).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(batch, groups, length * shared, head_dim)
    inputs = rows, key.swapaxes(1, 2), value.swapaxes(1, 2)
    places = shared, keys - length, causal, window
    output: Any
    if options.body == "ring":
        marks = ring.Hidden(pairs, segments, images)
        output = ring.products(*inputs, marks, words, _ring(options, batch, length, heads, shared))
    elif options.body != "products":
        ahead = not causal or images is not None
        found = cuts(length, keys, ahead, causal, window, _size(batch * heads, keys, window))
        hidden = Hidden(pairs, segments, images, causal, window)
        plan = loop.Plan(tuple(found), *places, options.scale, options.soft_cap, options.dropout)
        output = loop.products(*inputs, hidden, words, plan)
    else:
        kept, share = None, 1.0
        if words is not None:
            shape = (batch, groups, length * shared, keys)
            share = 1.0 / (1.0 - options.dropout)
            kept = dropout_jax.kept(words, shape, options.dropout)
        parts = tuple(
            (queries.start, queries.stop, seen.start, seen.stop)
            for queries, seen in blocks(length, keys, causal, window, SIZE)
        )
        plan = short.Plan(parts, *places, options.scale, share)
        output = short.products(*inputs, (pairs, segments, kept), plan)
    width = value.shape[3]
    output = output.reshape(batch, groups, length, shared, width).transpose(0, 2, 1, 3, 4)
    return output.reshape(batch, length, heads, width)


def _ring(options: _Options, batch: int, length: int, heads: int, shared: int) -> ring.Plan:
    """Returns the plan of what each device does with its own rows and tokens."""
    places = meshes.places()
    assert places is not None and places.tokens is not None
    return ring.Plan(
        axis=places.tokens,
        parts=meshes.parts((places.tokens,)),
        rows=places.rows,
        batch=batch * meshes.parts(places.rows),
        shared=shared,
        size=_size(batch * heads, length, options.window),
        causal=options.causal,
        window=options.window,
        scale=options.scale,
        soft_cap=options.soft_cap,
        rate=options.dropout,
    )


def _size(heads: int, keys: int, window: int | None) -> int:
    """Returns the queries of a block of a loop; `heads` counts those of the whole batch."""
    if device().platform == "cpu":
        return max(SIZE, min(LOOP_SIZE, SCORES // keys))
    if not isinstance(heads, int):  # what jax.export has for a batch of any size
        return LEAST
    # A block sees the window of its first query and that of its last.
    most = MOST if window is None else min(MOST, window // 4)
    return max(LEAST, min(most, ALL_SCORES // max(heads * keys, 1)))
