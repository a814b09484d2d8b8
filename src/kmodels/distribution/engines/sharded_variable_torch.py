"""Keras variables of which each rank holds a part, as torch's `DTensor`s."""

from typing import Any

import keras
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from kmodels.weights.host_torch import to_numpy


class Placed(keras.Variable):
    """A variable whose value is a `DTensor`; whole values that are given to it are cut.

    All ranks have to give the same value. `gathered`, and with it whatever reads the variable on
    the host, is a collective: all ranks have to call it together.
    """

    @property
    def placed(self) -> DTensor:
        """This rank's part, in the dtype of the variable."""
        return self._value

    @property
    def index(self) -> tuple[slice, ...]:
        """Where in the whole value this rank's part lies."""
        return region(self.placed)

    def gathered(self) -> torch.Tensor:
        """The whole value."""
        return self.placed.full_tensor().detach()

    def take(self, value: torch.Tensor) -> None:
        """Copies this rank's part of a whole value, or the part of a `DTensor` cut alike."""
        self.take_part(value.to_local() if isinstance(value, DTensor) else value[self.index])

    @torch.no_grad()
    def take_part(self, value: torch.Tensor) -> None:
        """Copies what lies at `index`."""
        self.placed.to_local().copy_(value)

    def _direct_assign(self, value: Any) -> None:
        self.take(value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = to_numpy(self.gathered().cpu())
        return found if dtype is None else found.astype(dtype)


class Sharded(Placed):
    """A weight that is whole while its group runs, and else a part.

    FSDP2 exchanges the parameter of the group's module, so the variable looks there whenever it is
    asked. One that was built without a value has none until one is given to it.
    """

    group: torch.nn.Module
    place: str
    waiting: bool

    @property
    def _value(self) -> Any:  # type: ignore[override]
        return None if self.waiting else getattr(self.group, self.place)

    @property
    def placed(self) -> DTensor:
        """This rank's part; only outside of the group's run."""
        return getattr(self.group, self.place)

    def take_part(self, value: torch.Tensor) -> None:
        """See `Placed`; the variable has a value from now on."""
        super().take_part(value)
        self.waiting, self._initializer = False, None

    def _initialize(self, value: Any) -> None:
        self.take(value)

    def _initialize_with_initializer(self, initializer: Any) -> None:
        # The whole is drawn on the host: a device may not have the room.
        with keras.device("cpu"):
            super()._initialize_with_initializer(initializer)


def put_in(variable: Any, group: torch.nn.Module, place: str) -> None:
    """Makes a variable look for its value in a group's module; its own is let go."""
    vars(variable).pop("_value", None)
    variable.__class__ = Sharded
    variable.group, variable.place, variable.waiting = group, place, True


def place_like(slot: Any, weight: Sharded) -> None:
    """Gives a variable without a value its first one, cut as a weight of the same shape is.

    Its initializer has to give one number everywhere, as those of optimizers' slots do.
    """
    like = weight.placed
    local = like.to_local()
    first = slot._initializer(tuple(local.shape), dtype=slot.dtype)
    value = DTensor.from_local(
        first.to(local.device), like.device_mesh, like.placements, run_check=False,
        shape=like.shape, stride=like.stride(),
    )  # fmt: skip
    slot.__class__ = Placed
    slot._value = torch.nn.Parameter(value, requires_grad=False)
    slot._initializer = None


def region(placed: DTensor) -> tuple[slice, ...]:
    """Where in the whole tensor this rank's part lies."""
    found = [(0, size) for size in placed.shape]
    mesh = placed.device_mesh
    for axis, placement in enumerate(placed.placements):
        if placement.is_shard():
            dimension = placement.dim  # type: ignore[attr-defined]
            start, stop = found[dimension]
            # As torch cuts: the last parts are shorter, or empty.
            step = -(-(stop - start) // mesh.size(axis))
            begin = min(start + step * mesh.get_local_rank(axis), stop)
            found[dimension] = begin, min(begin + step, stop)
    return tuple(slice(*bounds) for bounds in found)
