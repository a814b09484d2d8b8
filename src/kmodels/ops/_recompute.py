"""Computation in parts whose backward pass recomputes them: blocks of attention, rows of logits."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from kmodels.core.dispatch import backend_module

# Blocks share a loop if the widest sees at most this many times the keys of the narrowest.
SPREAD = 1.25


class Block(NamedTuple):
    """Adjacent queries, and the keys that they may see."""

    start: int  # first query
    low: int  # first key
    size: int  # queries
    width: int  # keys


class Loop(NamedTuple):
    """Blocks of one size in a loop, with the number of keys that each reads."""

    places: list[tuple[int, int]]  # first query and first key of each block
    size: int  # queries of a block
    width: int  # keys of a block


def loops(blocks: Sequence[Block]) -> list[Loop]:
    """Returns loops over blocks of one size and nearly one width, in order."""
    groups = [[blocks[0]]]
    for before, block in pairwise(blocks):
        widths = [x.width for x in (*groups[-1], block)]
        if block.size == before.size and max(widths) <= SPREAD * min(widths):
            groups[-1].append(block)
        else:
            groups.append([block])
    groups_of_equal = []
    for group in groups:
        width = max(block.width for block in group)
        # The last key stays; earlier keys, which the rules hide, make widths equal.
        places = [(x.start, max(x.low + x.width - width, 0)) for x in group]
        groups_of_equal.append(Loop(places, group[0].size, width))
    return groups_of_equal


class RecomputeBackend(Protocol):
    """Computation by blocks whose backward pass keeps only the inputs.

    `keras.remat` would suffice on JAX. torch's is not allowed inside of `torch.func`, TensorFlow's
    has no second derivatives, and both add up one gradient per block at the end.
    """

    def blockwise(
        self,
        function: Callable[..., Any],
        blocks: Sequence[Block],
        tensors: tuple[Any, Any, Any],
        others: Any,
    ) -> Any:
        """Returns the results (B, size, ...) of all blocks, joined.

        Args:
            function: takes start and low, numbers or scalar tensors; size and width, numbers; the
                tensors; and the others.
            blocks: blocks in the order of their queries.
            tensors: query, key and value, which get gradients.
            others: further tensors in lists, tuples and dictionaries, or None.
        """
        ...

    def by_rows(
        self, function: Callable[..., Any], parts: Sequence[Any], others: Sequence[Any]
    ) -> Any:
        """Returns the results (parts, rows) of `function(*part, *others)`, one after another.

        Args:
            function: takes tensors (rows, ...), and the others.
            parts: tensors (parts, rows, ...), which get gradients.
            others: further tensors, which get gradients.
        """
        ...


recompute = backend_module("kmodels.ops._recompute", RecomputeBackend)
