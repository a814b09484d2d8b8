"""A mesh written as text, such as "data=4,model=2"."""

from collections.abc import Mapping
from typing import Any

from kmodels.dispatch import backend, backend_module
from kmodels.errors import InputError

AXES = ("data", "model")
Layout = Mapping[str, tuple[str | None, ...]]


def parse_mesh(spec: str) -> dict[str, int]:
    """The axes and their lengths: "data=4,model=2" is {"data": 4, "model": 2}.

    Raises:
        InputError: for an unknown axis, one named twice, or a length that is not a whole number.
    """
    mesh: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in spec.split(","))):
        axis, _, length = (text.strip() for text in part.partition("="))
        if axis not in AXES:
            raise InputError(
                f"mesh axis {axis!r} is unknown; write {' and '.join(AXES)}, as in data=4,model=2"
            )
        if axis in mesh:
            raise InputError(f"mesh axis {axis!r} is named twice in {spec!r}; name it once")
        if not length.isdecimal() or int(length) < 1:
            raise InputError(
                f"mesh axis {axis} has length {length!r}; give a whole number from 1, as in data=4"
            )
        mesh[axis] = int(length)
    if not mesh:
        raise InputError("the mesh is empty; write it as in data=4,model=2")
    return mesh


def check_batch(spec: str, batch_size: int) -> None:
    """Raises `InputError` where the data axis does not divide the global batch."""
    data = parse_mesh(spec).get("data", 1)
    if batch_size % data:
        raise InputError(
            f"data={data} does not divide the batch of {batch_size}; the nearest batches that "
            f"work are {max(batch_size // data, 1) * data} and {(batch_size // data + 1) * data}"
        )


def use_mesh(spec: str, layout: Layout) -> Any:
    """Spreads all that is built from now on over the devices of a mesh.

    Call it before the model is built: variables keep the place where they were made.

    Args:
        spec: axes and lengths, "data=4" or "data=4,model=2". Batches are split over `data`,
            variables over `model`.
        layout: variable path pattern -> axis by dimension, as in a family's `sharding.py`.

    Returns:
        The `keras.distribution` object that is now set.

    Raises:
        InputError: on a backend without an engine, for a wrong spec, or too few devices.
    """
    mesh = parse_mesh(spec)
    engine = backend_module("kmodels.distribution.mesh")
    if engine is None:
        raise InputError(
            f"a mesh ({spec}) needs the jax backend and this is {backend()}; "
            "set KERAS_BACKEND=jax or leave the mesh out"
        )
    return engine.use(mesh, layout)
