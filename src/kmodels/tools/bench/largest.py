"""The largest batch that fits: doubling, then halving the gap."""

from collections.abc import Callable

# The gap that is left, as a share of what fits; each try starts a process and compiles.
GAP = 1 / 16
MOST = 2**20


def largest(fits: Callable[[int], bool], start: int) -> int:
    """Returns the largest number that fits, except for a sixteenth.

    Args:
        fits: whether a number does; if one does, all smaller ones do.
        start: the number to begin with, at least 1.

    Returns:
        A number that was tried and fits, 0 where not even 1 does. The first one that was tried and
        does not fit is at most a sixteenth above it, or one more.
    """
    low, high = 0, start
    while high <= MOST and fits(high):
        low, high = high, 2 * high
    if high > MOST:
        return low
    while high - low > max(1, int(low * GAP)):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
