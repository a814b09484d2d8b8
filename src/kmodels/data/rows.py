"""Some rows of each batch: what a process feeds where several train together.

Workers run this, so it imports no framework.
"""


def rows_within(start: int, stop: int, size: int) -> slice:
    """Returns rows start to stop of a batch of `size` rows: those there are, but at least one.

    So there is always something to fill up the last batch of an epoch with.
    """
    return slice(start, min(stop, size)) if start < size else slice(size - 1, size)
