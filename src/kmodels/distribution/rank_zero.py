"""Files of a run of several processes that one of them writes, of weights that all of them hold."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.distribution import processes
from kmodels.weights.tensors import LazyArray

Tensors = Mapping[str, LazyArray]


def write_on_rank_zero(tensors: Tensors, write: Callable[[Tensors], Path]) -> Path:
    """Has the first process write; all gather the values, one tensor after another.

    No process has more than one of them in memory whole. All have to call it, in the same order,
    between steps.

    Args:
        tensors: by name, in the same order in all processes.
        write: writes what it is given, reading each tensor once, in the order given.

    Returns:
        The result of `write`.

    Raises:
        InputError: as `write` raised it, or for a disk that cannot be written to, in all processes.
    """
    if processes.count() == 1:
        return write(tensors)
    if not processes.is_rank_zero():
        for tensor in tensors.values():
            tensor.read()
        return Path(processes.broadcast("files", lambda: None))
    left = dict(tensors)

    def turn(name: str) -> np.ndarray:
        return left.pop(name).read()

    held = {
        name: replace(tensor, read=lambda name=name: turn(name), read_part=None)
        for name, tensor in tensors.items()
    }

    def run() -> str:
        try:
            return str(write(held))
        except OSError as error:
            raise InputError(
                f"cannot write {error.filename or 'a file'}: {error.strerror or error}; make room "
                "or give another directory"
            ) from error
        finally:
            # The others gather these with this process, whether they are written or not.
            for name in list(left):
                turn(name)

    return Path(processes.broadcast("files", run))


@contextmanager
def without_distribution() -> Iterator[None]:
    """Puts no mesh in force inside the block, so that one of several processes can save with Keras.

    Keras makes an optimizer then, to see what every optimizer has, and over a mesh on JAX each
    variable that is made waits for all processes.
    """
    distribution = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(distribution)
