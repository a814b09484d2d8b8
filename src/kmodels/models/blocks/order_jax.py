"""Moving the places of each row on JAX, where tokens may lie in parts on several devices."""

import jax
import keras
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from kmodels.overrides import meshes


def tokens_first(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the source and the destination of each position of a row, (B, T) int32 each."""
    is_token = mask.astype(bool)
    before = jnp.cumsum(is_token, axis=1, dtype="int32")
    masked = jnp.cumsum(~is_token, axis=1, dtype="int32") + before[:, -1:]
    back = jnp.where(is_token, before, masked) - 1
    return jnp.argsort(back, axis=1).astype("int32"), back


def moved(x: jax.Array, order: jax.Array) -> jax.Array:
    """Moves x (B, T) or (B, T, D): the places of each row, in the order (B, S)."""
    places, axis = meshes.places(), meshes.tokens()
    if x.ndim == 2:
        return jnp.take_along_axis(x, order, axis=1)
    if places is None or axis is None or x.shape[1] != order.shape[1]:
        return jnp.take_along_axis(x, order[..., None], axis=1)
    rows, parts = meshes.parts(places.rows), meshes.parts((axis,))
    if x.shape[0] % rows or x.shape[1] % parts:
        return jnp.take_along_axis(x, order[..., None], axis=1)
    return _round(x, order, axis, parts, places.rows)


def _round(
    x: jax.Array, order: jax.Array, axis: str, parts: int, rows: tuple[str, ...]
) -> jax.Array:
    """Moves x a part at a time, so that no device holds rows whole.

    Padding mostly stands behind the tokens, and then all is in its place and nothing is sent.
    """
    pairs = [(i, (i + 1) % parts) for i in range(parts)]
    stays = jnp.all(order == jnp.arange(order.shape[1]))

    def local(x: jax.Array, order: jax.Array, stays: jax.Array) -> jax.Array:
        length, index = x.shape[1], lax.axis_index(axis)

        def turn(
            carried: tuple[jax.Array, jax.Array], number: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            moved, part = carried
            place = order - (index - number) % parts * length
            here = (place >= 0) & (place < length)
            taken = jnp.take_along_axis(part, jnp.clip(place, 0, length - 1)[..., None], axis=1)
            moved = jnp.where(here[..., None], taken, moved)
            return (moved, lax.ppermute(part, axis, pairs)), None

        def go_round(x: jax.Array) -> jax.Array:
            return lax.scan(turn, (jnp.zeros_like(x), x), jnp.arange(parts))[0][0]

        return lax.cond(stays, lambda x: x, jax.checkpoint(go_round), x)

    along = PartitionSpec(rows or None, axis)
    mesh = keras.distribution.distribution().device_mesh.backend_mesh
    specs = (along, along, PartitionSpec())
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=along, check_vma=False)
    return run(x, order, stays)
