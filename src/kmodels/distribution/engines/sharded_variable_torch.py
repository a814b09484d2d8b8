"""Keras variables of which each rank holds a part, as torch's `DTensor`s."""

from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from kmodels.core import keras_internals
from kmodels.weights.host_torch import to_numpy


class Placed(keras_internals.OwnAssign):
    """A variable whose value is a `DTensor`; whole values that are given to it are cut.

    All ranks have to give the same value. `gathered`, and with it whatever reads the variable on
    the host, is a collective: all ranks have to call it together.
    """

    @property
    def placed(self) -> DTensor:
        """This rank's part, in the dtype of the variable."""
        return self.held

    @property
    def index(self) -> tuple[slice, ...]:
        """The slices of the whole value that this rank holds."""
        return region(self.placed)

    def gathered(self) -> torch.Tensor:
        """Returns the whole value."""
        return self.placed.full_tensor().detach()

    def take(self, value: torch.Tensor) -> None:
        """Copies this rank's part of a whole value, or the part of a `DTensor` cut alike."""
        self.take_part(value.to_local() if isinstance(value, DTensor) else value[self.index])

    @torch.no_grad()
    def take_part(self, value: torch.Tensor) -> None:
        """Copies what lies at `index`."""
        self.placed.to_local().copy_(value)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        found = to_numpy(self.gathered().cpu())
        return found if dtype is None else found.astype(dtype)


class ShardedVariable(keras_internals.ValueElsewhere, Placed):
    """A weight that is whole while its group runs, and else a part.

    FSDP2 exchanges the parameter of the group's module, so the variable looks there whenever it is
    asked. One that was built without a value has none until one is given to it.
    """

    group: torch.nn.Module
    place: str
    waiting: bool

    def found(self) -> Any:
        """Returns the parameter of the group's module, None before a value was given to it."""
        return None if self.waiting else getattr(self.group, self.place)

    @property
    def placed(self) -> DTensor:
        """This rank's part; only outside of the group's run."""
        return getattr(self.group, self.place)

    def take_part(self, value: torch.Tensor) -> None:
        """See `Placed`; the variable has a value from now on."""
        super().take_part(value)
        self.waiting = False
        self.has_taken()


def put_in(variable: keras.Variable, group: torch.nn.Module, place: str) -> None:
    """Makes a variable look for its value in a group's module; its own is let go."""
    keras_internals.let_value_go(variable)
    keras_internals.change_class(variable, ShardedVariable)
    variable.group, variable.place, variable.waiting = group, place, True


def place_like(slot: keras.Variable, weight: ShardedVariable) -> None:
    """Gives a variable without a value its first one, cut as a weight of the same shape is.

    Its initializer has to give one number everywhere, as those of optimizers' slots do.
    """
    like = weight.placed
    local = like.to_local()
    first = keras_internals.first_value(slot, local.shape)
    value = DTensor.from_local(
        first.to(local.device), like.device_mesh, like.placements, run_check=False,
        shape=like.shape, stride=like.stride(),
    )  # fmt: skip
    keras_internals.change_class(slot, Placed)
    keras_internals.give_value(slot, torch.nn.Parameter(value, requires_grad=False))


def region(placed: DTensor) -> tuple[slice, ...]:
    """Returns where in the whole tensor this rank's part lies."""
    found = [(0, size) for size in placed.shape]
    mesh = placed.device_mesh
    for axis, placement in enumerate(placed.placements):
        if placement.is_shard():
            dimension = placement.dim  # type: ignore[attr-defined]
            start, stop = found[dimension]
            # It is cut as torch cuts: the last parts are shorter, or empty.
            step = -(-(stop - start) // mesh.size(axis))
            begin = min(start + step * mesh.get_local_rank(axis), stop)
            found[dimension] = begin, min(begin + step, stop)
    return tuple(slice(*bounds) for bounds in found)
