"""Exchange of keys between devices, for attention over tokens that lie in parts on them.

Without a window, keys and values go round a ring. With one, a device asks the devices just before
it for the tokens that its first query sees, and no other. Parts are runs of neighbouring tokens, so
that a window mostly has one neighbour.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp

from kmodels.ops._attention_blockwise import Block, cuts


@dataclass(frozen=True)
class Plan:
    """The sizes and options that are known when the step is traced."""

    axis: str  # of the mesh, along which tokens lie
    parts: int  # devices on it
    rows: tuple[str, ...]  # axes of the mesh along which the batch lies
    batch: int  # rows in all
    shared: int  # queries at a position that share a key head, G
    size: int  # queries of a block
    causal: bool
    window: int | None
    scale: float
    soft_cap: float | None
    rate: float  # of dropout


class Hop(NamedTuple):
    """Some keys of the device `distance` places before this one, negative for one behind it."""

    distance: int
    low: int
    high: int


class Held(NamedTuple):
    """Arrays that devices send each other: (b, K, s, H) twice, and ids (b or 1, s)."""

    key: jax.Array
    value: jax.Array
    segments: jax.Array | None
    images: jax.Array | None


class Hidden(NamedTuple):
    """What hides keys: the mask (b, K, t, G, S), each of which may be 1, and ids (b or 1, t)."""

    mask: jax.Array | None
    segments: jax.Array | None
    images: jax.Array | None


# Forward: maximum and sum (b, K, t * G), and the sum of weighted values (b, K, t * G, H). Backward:
# gradients of queries, keys and values.
State = tuple[jax.Array, jax.Array, jax.Array]
Turn = Callable[[State, Held, jax.Array | int], State]


def near(plan: Plan, length: int, ahead: bool) -> list[Hop] | None:
    """Returns which keys a device with so many tokens needs, or None for those of all devices.

    Args:
        plan: the options.
        length: tokens of a device.
        ahead: whether blocks may let a query see what is ahead of it.
    """
    window = plan.window
    if window is None or ahead:
        return None
    reach = min(-(-(window - 1) // length), plan.parts - 1)
    found = [Hop(i, max(i * length - window + 1, 0), length) for i in range(reach + 1)]
    if plan.causal:
        return found
    if 2 * reach >= plan.parts:
        return None  # to both sides it would be more than the ring
    highs = [min(window + length - 1 - i * length, length) for i in range(1, reach + 1)]
    return [*found, *(Hop(-i, 0, high) for i, high in enumerate(highs, start=1))]


def hop_blocks(plan: Plan, hop: Hop, length: int) -> list[Block]:
    """Returns blocks of queries and the keys of a hop that they see; blocks without any are out."""
    found, window, gap = [], plan.window or 0, hop.distance * length
    for start in range(0, length, plan.size):
        stop = min(start + plan.size, length)
        low = max(gap + start - window + 1, hop.low)
        high = min(gap + stop - 1 + (1 if plan.causal else window), hop.high)
        if high > low:
            found.append(Block(start, low - hop.low, stop - start, high - low))
    return found


def own_blocks(plan: Plan, ahead: bool, length: int) -> list[Block]:
    """Returns blocks of queries and the keys of one device, their own or a whole part, they see."""
    return cuts(length, length, ahead or not plan.causal, plan.causal, None, plan.size)


def there(plan: Plan, hop: Hop) -> jax.Array:
    """Returns whether there is a device at this distance."""
    other = lax.axis_index(plan.axis) - hop.distance
    return (other >= 0) & (other < plan.parts)


def sent(tree: Any, plan: Plan, places: int, wraps: bool = True) -> Any:
    """Returns what the device so many places before this one has."""
    targets = [(i, i + places) for i in range(plan.parts)]
    if wraps:
        pairs = [(source, target % plan.parts) for source, target in targets]
    else:
        pairs = [(source, target) for source, target in targets if 0 <= target < plan.parts]
    return jax.tree.map(lambda x: lax.ppermute(x, plan.axis, pairs), tree)


def ring(plan: Plan, own: Held, state: State, turn: Turn) -> Any:
    """Repeats state = turn(state, keys of another device, number) for all other devices.

    Keys are sent on before their turn is computed, so that both can go on at once.
    """
    held = sent(own, plan, 1)

    def body(carried: tuple[Any, Held], number: jax.Array) -> tuple[tuple[Any, Held], None]:
        state, held = carried
        following = sent(held, plan, 1)
        return (turn(state, held, number), following), None

    if plan.parts > 2:
        numbers = jnp.arange(1, plan.parts - 1)
        (state, held), _ = lax.scan(body, (state, held), numbers)
    return turn(state, held, plan.parts - 1)
