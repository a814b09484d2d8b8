"""Names of variables that differ only by how many layers the process had made before.

Keras calls unnamed layers `dense`, `dense_1` and so on, and counts on where a cell of a notebook
builds the same model once more.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
# Keras' first number is 1; `block_0` is a name that somebody gave.
_WORD = re.compile(r"([^/:]+?)(?:_([1-9]\d*))?(?=[/:]|$)")


def as_counted(
    found: Mapping[str, Mapping[str, T]], wanted: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Mapping[str, T]]:
    """Calls what was stored as the same layers are called in this process.

    All layers of one kind are counted together, so their numbers all differ by the same amount.

    Args:
        found: arrays by name, by part of the checkpoint.
        wanted: variables, likewise.

    Returns:
        What was found under the names that are wanted; as it was where these differ by more than
        such numbers.
    """
    if all(set(found[part]) == set(names) for part, names in wanted.items()):
        return found
    before = _lowest(name for held in found.values() for name in held)
    now = _lowest(name for held in wanted.values() for name in held)
    if before.keys() != now.keys():
        return found
    move = _moved({kind: now[kind] - number for kind, number in before.items()})
    moved = {part: {move(name): held for name, held in of.items()} for part, of in found.items()}
    same = all(set(moved[part]) == set(names) for part, names in wanted.items())
    return moved if same else found


def from_first(found: Mapping[str, T]) -> dict[str, T]:
    """Calls layers as if the first of each kind among them had been the first of the process."""
    move = _moved({kind: -number for kind, number in _lowest(found).items()})
    return {move(name): held for name, held in found.items()}


def _lowest(names: Iterable[str]) -> dict[str, int]:
    """Returns the lowest number of each kind of layer; without a number it is the first."""
    lowest: dict[str, int] = {}
    for name in names:
        for kind, number in _WORD.findall(name):
            lowest[kind] = min(lowest.get(kind, int(number or 0)), int(number or 0))
    return lowest


def _moved(by: Mapping[str, int]) -> Callable[[str], str]:
    """Returns a function that adds to the numbers in a name."""

    def word(match: re.Match[str]) -> str:
        number = int(match[2] or 0) + by[match[1]]
        return f"{match[1]}_{number}" if number else match[1]

    return lambda name: _WORD.sub(word, name)
