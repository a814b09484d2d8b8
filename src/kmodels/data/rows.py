"""Rows of a batch: the examples that share one, and the rows that a process takes.

Workers run this, so it imports no framework.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence


def assign(sizes: Sequence[int], length: int, most: int | None = None) -> list[list[int]]:
    """Packs examples into rows: the longest first, each into the row that it fills best.

    Sizes are tokens of the examples, `length` those of a row, which has `most` examples at most.
    Returns the numbers of the examples in each row; rows are in the order of their first example.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # free tokens of each row that is not full, sorted
    for example in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        place = bisect_left(room, (sizes[example], -1))
        if place == len(room):
            rows.append([])
            left, row = length, len(rows) - 1
        else:
            left, row = room.pop(place)
        rows[row].append(example)
        if left > sizes[example] and len(rows[row]) != most:
            insort(room, (left - sizes[example], row))
    return sorted((sorted(row) for row in rows), key=lambda row: row[0])


def rows_within(start: int, stop: int, size: int) -> slice:
    """Returns rows start to stop of a batch of `size` rows that exist, but at least one row.

    The one row is there to fill up the last batch of an epoch.
    """
    return slice(start, min(stop, size)) if start < size else slice(size - 1, size)
