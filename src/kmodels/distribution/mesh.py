"""A mesh, such as "data=2,fsdp=4": devices in a grid with named axes.

`data` splits batches; `fsdp` splits batches, and weights, gradients and slots too (Rajbhandari et
al. 2020); `sequence` splits rows by their tokens (Liu et al. 2023); `model` splits heads, MLPs and
the vocabulary (Shoeybi et al. 2019).
"""

import dataclasses
import math
import re
from dataclasses import dataclass

from kmodels.core.errors import InputError, check_whole

# From the outermost to the innermost: devices along `model` communicate most, so they are closest.
AXES = ("data", "fsdp", "sequence", "model")
REST = -1


@dataclass(frozen=True)
class Mesh:
    """A mesh: the number of devices along each axis, 1 by default.

    Args:
        data: number of copies of the model, or of its groups of `fsdp` devices.
        fsdp: number of devices over which each weight is sharded.
        model: number of devices that compute one row of a batch together.
        sequence: number of devices over which the tokens of each row are sharded.

    Raises:
        InputError: for a length that is neither a whole number from 1 nor -1.
    """

    data: int = 1
    fsdp: int = 1
    model: int = 1
    sequence: int = 1

    def __post_init__(self) -> None:
        for axis, length in self.lengths.items():
            if length != REST:
                check_whole(f"mesh axis {axis}", length)

    @property
    def lengths(self) -> dict[str, int]:
        """Lengths of all axes by name, the outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def grid(self) -> dict[str, int]:
        """The axes of the device grid: those of rows, and others that are longer than 1.

        Along an axis of one device, XLA would still sum values that are not sharded along it.
        """
        rows = ("data", "fsdp")
        return {axis: n for axis, n in self.lengths.items() if axis in rows or n > 1}

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.lengths.values())

    @property
    def replicas(self) -> int:
        """Number of parts of a batch, which must divide it."""
        return self.data * self.fsdp

    def __str__(self) -> str:
        """Returns the text that `parse_mesh` reads, without the axes of length 1."""
        named = {axis: length for axis, length in self.lengths.items() if length != 1}
        return ",".join(f"{axis}={length}" for axis, length in (named or {"data": 1}).items())


def parse_mesh(spec: str) -> Mesh:
    """Reads a mesh: "data=4,model=2", "fsdp=8", "data=2,fsdp=4", "data=-1".

    One axis may be -1: `fill` sets it to the remaining devices.

    Raises:
        InputError: for an unknown axis, one named twice, a length that is not a whole number, -1
            twice, or anything but a text.
    """
    if not isinstance(spec, str):
        raise InputError(f"the mesh is {spec!r}; give a text, such as 'data=4,model=2'")
    lengths: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in spec.split(","))):
        axis, _, text = (text.strip() for text in part.partition("="))
        if axis not in AXES:
            raise InputError(
                f"mesh axis {axis!r} is unknown; write {', '.join(AXES[:-1])} and {AXES[-1]}, "
                "as in data=4,model=2"
            )
        if axis in lengths:
            raise InputError(f"mesh axis {axis!r} is named twice in {spec!r}; name it once")
        if text != str(REST) and not re.fullmatch("0*[1-9][0-9]{0,8}", text):
            raise InputError(
                f"mesh axis {axis} has length {text!r}; give a whole number from 1, as in data=4, "
                "or -1 for the devices that are left"
            )
        lengths[axis] = int(text)
    if not lengths:
        raise InputError("the mesh is empty; write it as in data=4,model=2")
    if list(lengths.values()).count(REST) > 1:
        raise InputError(f"the mesh {spec!r} has -1 twice; one axis alone takes what is left")
    return Mesh(**lengths)


def fill(mesh: Mesh, devices: int, more: str) -> Mesh:
    """Returns the mesh with -1 replaced by the number of remaining devices of all processes.

    `more` says how to get more devices; "{}" stands for their number. Raises `InputError` if there
    are too few, or they do not divide evenly.
    """
    open_axes = [axis for axis, length in mesh.lengths.items() if length == REST]
    known = abs(mesh.size)
    if open_axes and devices % known == 0:
        return dataclasses.replace(mesh, **{open_axes[0]: devices // known})
    if open_axes and known < devices:
        raise InputError(
            f"the mesh {mesh} leaves no whole {open_axes[0]} axis of {devices} devices, which "
            f"{known} does not divide; give its length"
        )
    if known > devices:
        raise InputError(
            f"the mesh {mesh} needs {known} devices and there are {devices}; give a smaller "
            f"mesh, or {more.format(known)}"
        )
    return mesh


def check_batch(mesh: Mesh | str, batch_size: int) -> None:
    """Raises `InputError` if the data and fsdp axes do not divide the global batch.

    An axis of -1 counts as 1 until it is filled.
    """
    check_whole("batch size", batch_size)
    mesh = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    parts = abs(mesh.replicas)
    if batch_size % parts:
        axes, below = Mesh(data=mesh.data, fsdp=mesh.fsdp), batch_size // parts * parts
        named = f"{axes}" if 1 in (mesh.data, mesh.fsdp) else f"{axes}, {parts} parts in all,"
        raise InputError(
            f"{named} does not divide the batch of {batch_size}; the nearest batches that "
            f"work are {max(below, parts)} and {below + parts}"
        )
