"""How a body of attention is called on JAX: for its platform, and where rows and heads lie."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import keras
from jax import lax
from jax.sharding import PartitionSpec

from kmodels.overrides import meshes

# By kernel, the platform for which JAX lowers it.
PLATFORMS = {"cudnn": "cuda", "splash": "tpu"}
Inputs = tuple[jax.Array, jax.Array, jax.Array]
# Takes query, key and value, and further arrays, of which no gradient is asked.
Body = Callable[..., jax.Array]


@dataclass(frozen=True)
class Bodies:
    """A kernel, and a body of plain operations that gives the same on every platform."""

    name: str
    kernel: Body
    plain: Body


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def by_kernel(
    query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array | None, bodies: Bodies
) -> jax.Array:
    """Runs the kernel where the program runs on its platform, and the plain body elsewhere.

    JAX learns the platform when it lowers a program, which is later than Python runs this: a
    program of a machine with a GPU may be one for its CPU, and one that is exported is for several.
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
    """Returns the kernel's gradients; their own derivatives, which no kernel has, are plain."""
    return pull(gradient)


@_slopes.defjvp
def _slopes_of_slopes(bodies: Bodies, primals: Any, tangents: Any) -> tuple[Inputs, Any]:
    _, *inputs, ids, gradient = primals
    _, *directions, _, of_gradient = tangents

    def again(query: jax.Array, key: jax.Array, value: jax.Array, gradient: jax.Array) -> Inputs:
        return jax.vjp(lambda *x: bodies.plain(*x, ids), query, key, value)[1](gradient)

    _, found = jax.jvp(again, (*inputs, gradient), (*directions, of_gradient))
    return _slopes(bodies, *primals), found


def in_parts(
    body: Body,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *others: jax.Array | None,
    tokens: str | None = None,
) -> Any:
    """Runs a body on each device with its own rows and heads, which none of them sends.

    Args:
        body: takes query, key and value and the others, or each device's parts of them.
        query: (B, T, N, H).
        key: (B, S, K, H); where a device has fewer than one of K heads, it picks the one it needs.
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
