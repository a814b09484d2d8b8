"""Variables of which each process of a run holds a part.

`placed_<backend>.py` has four things. `is_placed(variable)`: whether it is such a one.
`parts(variable)`: where each part begins that this process is the one to write, with its values in
host memory of their own; parts that several processes hold are written by one. `read(variable,
array)`: what this process holds of a tensor of a file, in the form that `put(variable, held)`
takes.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kmodels.core.dispatch import backend_module
from kmodels.weights.parts import Start
from kmodels.weights.tensors import LazyArray

_placed: Any = backend_module("kmodels.checkpoint.sharded")


def is_placed(variable: Any) -> bool:
    """Whether this process cannot see all of its values without the other processes."""
    return _placed is not None and _placed.is_placed(variable)


def parts(variable: Any) -> Iterator[tuple[Start, np.ndarray]]:
    """Where the parts begin that this process writes, and their values."""
    return _placed.parts(variable)


def read(variable: Any, array: LazyArray) -> Any:
    """What this process holds of a tensor of a file, in host memory."""
    return _placed.read(variable, array)


def put(variable: Any, held: Any) -> None:
    """Assigns what `read` gave."""
    _placed.put(variable, held)
