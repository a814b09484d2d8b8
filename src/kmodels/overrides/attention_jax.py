"""Attention for JAX: kernels on accelerators, and loops over blocks for long texts.

In this order: the facts of a call, the choice of a body by these facts alone, and the bodies. Tests
and `kmodels doctor` ask for the choice on platforms that are not there. cuDNN's and splash
attention's kernels are preferred because they hold nothing of the size of query times key; none was
measured on an accelerator yet. On a CPU, loops take a quarter of the memory of the op's own blocks,
and in bfloat16 and with dropout less time.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import jax
import keras
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from kmodels.core import internals_jax
from kmodels.core.dispatch import OpCall, override
from kmodels.ops.attention import (
    Hidden,
    allowed_pairs,
    attention,
    check_attention,
    cuts,
    hiding_window,
)
from kmodels.overrides import _attention_blocks_jax as blocks
from kmodels.overrides import _attention_kernels_jax as kernels
from kmodels.overrides import _attention_ring_jax as ring
from kmodels.overrides import dropout_jax, meshes

# Queries of a block on a CPU, at least and at most, and scores of a block that set the number
# between.
SIZE, LOOP_SIZE, SCORES = 64, 128, 2**21
# The same for accelerators, whose blocks are to keep many cores busy; scores of all heads.
LEAST, MOST, ALL_SCORES = 128, 1024, 2**26
# XLA's flags that forbid kernels whose results differ from run to run.
DETERMINISTIC = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")
Body = Literal["cudnn", "splash", "ring", "loops", "generic"]

# Pairs of query and key from which loops serve.
PAIRS = 2**19
# Widths of heads that cuDNN serves: on Hopper, and on older GPUs.
WIDEST_ON_HOPPER, WIDEST = 256, 128


@dataclass(frozen=True)
class Device:
    """The device that runs the program.

    Attributes:
        platform: "cpu", "cuda", "rocm", "tpu", or another name of JAX's.
        capability: CUDA's compute capability, as (9, 0).
        cudnn: whether JAX found cuDNN.
        deterministic: whether XLA may use deterministic kernels only.
    """

    platform: str
    capability: tuple[int, int] = (0, 0)
    cudnn: bool = False
    deterministic: bool = False


@dataclass(frozen=True)
class Facts:
    """The properties of a call that the choice depends on.

    Attributes:
        device: the device that runs the program.
        query: (B, T, N, H); None for an unknown size.
        key: (B, S, K, H).
        value_width: width of a value's heads.
        dtype: of query, key and value.
        causal: as in `ops.attention`.
        window: as in `ops.attention`.
        hidden: those of "mask", "segments" and "blocks" that are given.
        soft_cap: whether scores are capped.
        drops: whether weights are dropped.
        generator: whether the seed is a `SeedGenerator`.
        rows: shards of the batch on a mesh; 0 if unknown.
        parts: shards of the heads on a mesh; 0 if unknown.
        tokens: shards of the tokens on a mesh.
    """

    device: Device
    query: tuple[int | None, ...]
    key: tuple[int | None, ...]
    value_width: int | None
    dtype: str
    causal: bool = False
    window: int | None = None
    hidden: frozenset[str] = frozenset()
    soft_cap: bool = False
    drops: bool = False
    generator: bool = True
    rows: int = 1
    parts: int = 1
    tokens: int = 1


class Choice(NamedTuple):
    """The chosen body and the reason a faster one was rejected, or None."""

    body: Body
    reason: str | None = None


def choose(facts: Facts) -> Choice:
    """Returns the body that serves a call; "generic" is the op's own."""
    if len(facts.query) != 4 or len(facts.key) != 4:
        return Choice("generic", "query and key have no four axes")  # which the op says itself
    if not all(isinstance(size, int) for size in (*facts.query[1:], *facts.key[1:])):
        return Choice("generic", "lengths are not known")  # None, or what jax.export has for them
    if facts.drops and not facts.generator:
        return Choice("generic", "the seed is no SeedGenerator")
    reason = None
    if facts.tokens > 1:
        reason = ring_declines(facts)
        return Choice("ring") if reason is None else without_kernel(facts, reason)
    for body, declines in KERNELS.get(facts.device.platform, ()):
        reason = declines(facts)
        if reason is None:
            return Choice(body)
    return without_kernel(facts, reason)


def without_kernel(facts: Facts, reason: str | None) -> Choice:
    """Returns the body for a call that no kernel supports, for this reason."""
    pairs = _length(facts) * _keys(facts)
    if facts.parts != 1 and (why := heads_decline(facts)):
        return Choice("generic", reason or why)
    # XLA on a CPU is slow at products with bfloat16 results, which loops do not have. Loops also
    # draw dropped weights again, the same on each mesh, and leave heads on their devices.
    special = facts.drops or facts.dtype == "bfloat16" or facts.parts > 1
    if pairs > PAIRS or (special and facts.device.platform == "cpu"):
        return Choice("loops", reason)
    return Choice("generic", reason or "the op's own body serves short texts")


def cudnn_declines(facts: Facts) -> str | None:
    """Returns why cuDNN's kernel does not serve a call (a clause), or None."""
    device, width = facts.device, facts.query[3]
    widest = WIDEST_ON_HOPPER if device.capability[0] == 9 else WIDEST
    if not device.cudnn:
        return "JAX finds no cuDNN"
    if device.capability < (8, 0):
        return "cuDNN's kernel needs compute capability 8.0"
    if device.deterministic:
        return "the gradients of cuDNN's kernel are not deterministic"
    if facts.dtype not in ("float16", "bfloat16"):
        return f"cuDNN's kernel takes float16 and bfloat16, not {facts.dtype}"
    if width is None or width % 8 or width > widest:
        return f"cuDNN's kernel takes heads up to {widest} wide in steps of 8, not {width}"
    if reason := _kernel_declines(facts, "cuDNN's kernel"):
        return reason
    if "segments" in facts.hidden:
        return "cuDNN's kernel takes no segments"
    if facts.soft_cap:
        return "cuDNN's kernel takes no soft cap"
    if facts.causal and facts.query[1] != facts.key[1]:
        return "cuDNN's causal mask begins at the first key"
    if facts.window is not None and not facts.causal:
        return "cuDNN's kernel takes windows in causal attention alone"
    return heads_decline(facts)


def splash_declines(facts: Facts) -> str | None:
    """Returns why splash attention does not serve a call (a clause), or None."""
    width = facts.query[3]
    if facts.dtype not in ("float32", "bfloat16"):
        return f"splash attention takes float32 and bfloat16, not {facts.dtype}"
    if width is None or width % (kernels.LANES // 2):
        return f"splash attention takes heads whose width is a multiple of 64, not {width}"
    if _length(facts) < kernels.LANES:
        return f"splash attention pays from {kernels.LANES} queries on"
    if facts.window is not None and _length(facts) > _keys(facts):
        return "a query before the first key may see nothing"
    return _kernel_declines(facts, "splash attention") or heads_decline(facts)


# By platform, the kernels in the order in which they are tried.
KERNELS: dict[str, tuple[tuple[Body, Callable[[Facts], str | None]], ...]] = {
    "cuda": (("cudnn", cudnn_declines),),
    "tpu": (("splash", splash_declines),),
}


def _kernel_declines(facts: Facts, name: str) -> str | None:
    """Returns the property of a call that no kernel supports (a clause), or None."""
    if not facts.query[0]:
        return "the batch is empty, or its size is not known"
    for what, word in (("mask", "dense mask"), ("blocks", "image blocks")):
        if what in facts.hidden:
            return f"{name} takes no {word}"
    if facts.drops:
        return f"{name} takes no dropout"
    if facts.value_width != facts.query[3]:
        return f"{name} takes values as wide as keys"
    return None


def heads_decline(facts: Facts) -> str | None:
    """Returns why devices of a mesh cannot compute their own rows and heads, or None."""
    batch, heads, groups = facts.query[0], facts.query[2], facts.key[2]
    if not facts.rows or not facts.parts:
        return "under ModelParallel heads may lie on several devices"
    if facts.rows * facts.parts == 1:
        return None
    if not isinstance(batch, int) or batch % facts.rows or not batch:
        return f"a batch of {batch} does not divide by the {facts.rows} parts of the mesh"
    if facts.drops and facts.parts > 1:
        return "where heads are cut the op's own body draws what is dropped"
    if not isinstance(heads, int) or not isinstance(groups, int) or heads % facts.parts:
        return None  # they stay whole on each device
    if groups % facts.parts and (heads // groups) % (heads // facts.parts):
        return f"{groups} key heads do not divide by the {facts.parts} parts of the mesh"
    return None


def ring_declines(facts: Facts) -> str | None:
    """Returns why ring attention does not support a call (a clause), or None."""
    length = _length(facts)
    if length != _keys(facts):
        return f"{length} queries and {_keys(facts)} keys do not lie on the same devices"
    if length % facts.tokens:
        return f"{length} tokens do not divide by the {facts.tokens} parts of the mesh"
    return heads_decline(facts)


def _length(facts: Facts) -> int:
    return facts.query[1] or 0


def _keys(facts: Facts) -> int:
    return facts.key[1] or 0


def supports(call: OpCall) -> str | None:
    """Supports calls for which a kernel or loops beat the op's own body."""
    choice = chosen(facts(call))
    return choice.reason if choice.body == "generic" else None


def chosen(known: Facts) -> Choice:
    """Returns the body for a call; a kernel must be one that JAX can trace for it."""
    choice = choose(known)
    if choice.body in kernels.PLATFORMS and (reason := _refused(known, choice.body)):
        return without_kernel(known, reason)
    return choice


@lru_cache(maxsize=256)
def _refused(known: Facts, body: str) -> str | None:
    """Returns JAX's error from tracing a kernel and its gradient (a clause), or None."""
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


def facts(call: OpCall) -> Facts:
    """Returns the facts of a call."""
    hiding = {"mask": call.mask, "segments": call.segment_ids, "blocks": call.block_ids}
    places, along = meshes.places(), meshes.tokens()
    return Facts(
        device=device(),
        query=tuple(call.query.shape),
        key=tuple(call.key.shape),
        value_width=call.value.shape[-1],
        dtype=keras.backend.standardize_dtype(call.query.dtype),
        causal=call.causal,
        window=hiding_window(call.window, call.query, call.key),
        hidden=frozenset(name for name, x in hiding.items() if x is not None),
        soft_cap=call.soft_cap is not None,
        drops=bool(call.dropout) and call.seed is not None,
        generator=call.seed is None or isinstance(call.seed, keras.random.SeedGenerator),
        rows=0 if places is None else meshes.parts(places.rows),
        parts=0 if places is None else meshes.parts((places.heads,) if places.heads else ()),
        tokens=meshes.parts((along,)) if along else 1,
    )


def device() -> Device:
    """Returns the default device of this process."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.partition("=")[0] for flag in flags if not flag.endswith("=false")}
    return _device(jax.default_backend(), not names.isdisjoint(DETERMINISTIC))


@lru_cache
def _device(platform: str, deterministic: bool) -> Device:
    if platform != "gpu":
        return Device(platform, deterministic=deterministic)
    first: Any = jax.devices()[0]
    if "rocm" in first.client.platform_version.lower():
        return Device("rocm", deterministic=deterministic)
    major, minor = (int(part) for part in str(first.compute_capability).split("."))
    return Device("cuda", (major, minor), internals_jax.has_cudnn(), deterministic)


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
    """Keeps no array of the size of the attention weights."""
    hidden = Hidden(mask, segment_ids, block_ids, causal, window)
    check_attention(query, key, value, hidden, soft_cap, dropout)
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
    mask = allowed_pairs(query, key, Hidden(mask))
    segments, images = (None if x is None else jnp.asarray(x) for x in (segment_ids, block_ids))
    words = dropout_jax.words(seed) if dropout and seed is not None else None  # type: ignore[arg-type]
    if body in kernels.PLATFORMS:

        def run(query: jax.Array, key: jax.Array, value: jax.Array, ids: Any) -> jax.Array:
            return kernels.by_kernel(query, key, value, ids, _bodies(options))

        return in_parts(run, query, key, value, segments)
    others = (mask, segments, images)
    if body == "ring":
        along = meshes.tokens()
        shared = partial(_plain, options)
        return in_parts(shared, query, key, value, *others, words, tokens=along)
    if words is None and known.parts > 1 and body != "generic":
        return in_parts(partial(_plain, options), query, key, value, *others)
    return _plain(options, query, key, value, *others, words)


@lru_cache(maxsize=256)
def _bodies(options: _Options) -> kernels.Bodies:
    """Returns a kernel and its plain body; one object for each options, so that jit caches."""
    words_of_call = {"causal": options.causal, "window": options.window, "scale": options.scale}

    def cudnn(query: jax.Array, key: jax.Array, value: jax.Array, ids: None) -> jax.Array:
        return kernels.cudnn(query, key, value, **words_of_call)

    def splash(query: jax.Array, key: jax.Array, value: jax.Array, ids: Any) -> jax.Array:
        return kernels.splash(query, key, value, ids, **words_of_call, soft_cap=options.soft_cap)

    def plain(query: jax.Array, key: jax.Array, value: jax.Array, ids: Any) -> jax.Array:
        return _plain(options, query, key, value, None, ids, None)

    kernels_by_name: dict[str, Callable[..., Any]] = {"cudnn": cudnn, "splash": splash}
    return kernels.Bodies(options.body, kernels_by_name[options.body], plain)


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
    """Runs the blocks; `pairs` is the mask with four axes, `words` key the dropout."""
    batch, length, heads, head_dim = query.shape
    keys, groups = key.shape[1:3]
    shared = heads // groups
    causal, window = options.causal, options.window
    if pairs is not None:
        # (B or 1, N or 1, T or 1, S or 1) -> (B or 1, K or 1, T or 1, G or 1, S or 1)
        split = (groups, shared) if pairs.shape[1] > 1 else (1, 1)
        pairs = pairs.reshape(pairs.shape[0], *split, *pairs.shape[2:]).swapaxes(2, 3)
    own = query.reshape(batch, length, groups, shared, head_dim).transpose(0, 2, 1, 3, 4)
    own = own.reshape(batch, groups, length * shared, head_dim)
    inputs = own, key.swapaxes(1, 2), value.swapaxes(1, 2)
    hidden = Hidden(pairs, segments, images, causal, window)
    known = blocks.Options(
        shared,
        keys - length,
        causal,
        window,
        options.scale,
        options.soft_cap,
        0.0 if words is None else options.dropout,
        (batch, groups, length * shared, keys),
    )
    output: Any
    size = _size(batch * heads, keys, window)
    if options.body == "ring":
        places = meshes.places()
        assert places is not None and places.tokens is not None
        rows, parts = meshes.parts(places.rows), meshes.parts((places.tokens,))
        whole = (batch * rows, groups, length * shared * parts, keys * parts)
        along = {"axis": places.tokens, "parts": parts, "rows": places.rows, "size": size}
        plan = ring.Plan(**{**vars(known), "whole": whole}, **along)
        output = ring.products(*inputs, hidden, words, plan)
    else:
        ahead = not causal or images is not None
        blocks_of_plan = tuple(cuts(length, keys, ahead, causal, window, size))
        output = blocks.products(
            *inputs, hidden, words, blocks.Plan(**vars(known), blocks=blocks_of_plan)
        )
    width = value.shape[3]
    output = output.reshape(batch, groups, length, shared, width).transpose(0, 2, 1, 3, 4)
    return output.reshape(batch, length, heads, width)


def _size(heads: int, keys: int, window: int | None) -> int:
    """Returns the queries of a block of a loop; `heads` counts those of the whole batch."""
    if device().platform == "cpu":
        return max(SIZE, min(LOOP_SIZE, SCORES // keys))
    if not isinstance(heads, int):  # what jax.export has for a batch of any size
        return LEAST
    # A block sees the window of its first query and that of its last.
    most = MOST if window is None else min(MOST, window // 4)
    return max(LEAST, min(most, ALL_SCORES // max(heads * keys, 1)))


def in_parts(
    body: kernels.Body,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *others: jax.Array | None,
    tokens: str | None = None,
) -> Any:
    """Runs a body on each device with its own rows and heads, without communication.

    Args:
        body: takes query, key and value and the others, or each device's parts of them.
        query: (B, T, N, H).
        key: (B, S, K, H); with more devices than K heads, each slices the head it needs.
        value: (B, S, K, H).
        others: arrays (B or 1, ...), of four axes with heads second and queries third, of two with
            tokens second, of one for all devices, or None.
        tokens: axis of the mesh along which tokens lie; None has each device see whole rows.
    """
    places, (batch, length, heads, _), groups = meshes.places(), query.shape, key.shape[2]
    if places is None:
        return body(query, key, value, *others)
    axis, parts = places.heads, meshes.parts((places.heads,) if places.heads else ())
    if axis is not None and heads % parts:
        axis, parts = None, 1
    if meshes.parts(places.rows) * parts == 1 and tokens is None:
        return body(query, key, value, *others)
    rows = places.rows or None
    mesh = keras.distribution.distribution().device_mesh.backend_mesh
    whole = PartitionSpec(rows, tokens, axis, None)
    shared = groups % parts != 0

    def spec(x: jax.Array) -> PartitionSpec:
        if x.ndim == 1:
            return PartitionSpec()
        along = [rows if x.shape[0] == batch else None, *[None] * (x.ndim - 1)]
        if x.ndim == 4 and x.shape[1] == heads:
            along[1] = axis
        place = 2 if x.ndim == 4 else 1
        if x.shape[place] == length:
            along[place] = tokens
        return PartitionSpec(*along)

    def local(query: jax.Array, key: jax.Array, value: jax.Array, *others: jax.Array | None) -> Any:
        if shared:
            own = lax.axis_index(axis) * query.shape[2] // (heads // groups)
            key, value = (lax.dynamic_slice_in_dim(x, own, 1, 2) for x in (key, value))
        return body(query, key, value, *others)

    of_key = PartitionSpec(rows, tokens) if shared else whole
    specs = (whole, of_key, of_key, *jax.tree.map(spec, others))
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False)
    return run(query, key, value, *others)
