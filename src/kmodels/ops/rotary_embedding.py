"""Rotary position embedding of the tokens of a row, and of places in a plane."""

from collections.abc import Sequence

import numpy as np
from keras import ops

from kmodels.core.dispatch import op
from kmodels.core.errors import InputError, check_choice
from kmodels.core.types import Tensor
from kmodels.ops._wide import wide

# By pairing: the shape of a head's channels, None for the remaining size, and the axis of a pair.
PAIRS: dict[str, tuple[tuple[int | None, ...], int]] = {
    "halves": ((2, None), -2),
    "neighbors": ((None, 2), -1),
    "quarters": ((2, 2, None), -2),
}


@op
def rotary_embedding(
    x: Tensor,
    positions: Tensor | None = None,
    *,
    max_wavelength: float = 10_000.0,
    scaling: float | Sequence[float] = 1.0,
    turned: float = 1.0,
) -> Tensor:
    """Rotates pairs of channels by angles that grow with the position.

    Channel i of the first half and channel i of the second half make a pair (Transformers'
    "rotate half"), turned by `position / scaling * max_wavelength ** (-2 i / H)`.

    Shapes: x (B, T, N, H), H even; positions (T,) or (B, T) -> (B, T, N, H).
    Dtypes: x floating, positions integer or floating; angles, sine, cosine and the rotation in
        float32 (float64 for float64 input); the output has x's dtype.

    Args:
        x: queries or keys.
        positions: positions of the tokens, from 0; None for 0, 1, ...
        max_wavelength: the base of the geometric series, also called "theta".
        scaling: positions are divided by it: one number (linear scaling of the context), or one for
            each of the H / 2 pairs (YaRN).
        turned: share of the pairs that turn, the first ones; the others keep their values, while
            the series is that of all pairs.

    Raises:
        InputError: if H is odd, or `scaling` has another number of values.

    Parity: Transformers' `apply_rotary_pos_emb` with `rope_type` "default", "linear",
        "proportional" or "yarn" (whose attention factor scales the queries).
    Source: https://arxiv.org/abs/2104.09864, https://arxiv.org/abs/2306.15595 (scaling)
    """
    check_rotary_embedding(x)
    if positions is None:
        positions = ops.arange(ops.shape(x)[1], dtype="int32")
    dtype = wide(x)
    numbers = _frequencies(x.shape[-1], max_wavelength, scaling, turned)
    frequencies = ops.convert_to_tensor(numbers, dtype)
    angles = ops.multiply(ops.expand_dims(ops.cast(positions, dtype), -1), frequencies)
    angles = ops.expand_dims(angles, -2)  # (T, 1, H/2) or (B, T, 1, H/2)
    cosine, sine = ops.cos(angles), ops.sin(angles)
    half = x.shape[-1] // 2
    y = ops.cast(x, dtype)
    first, second = y[..., :half], y[..., half:]
    y = ops.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return ops.cast(y, ops.dtype(x))


def check_rotary_embedding(x: Tensor) -> None:
    """Raises `InputError` if H is odd."""
    if x.shape[-1] % 2:
        raise InputError(f"rotary_embedding got heads of width {x.shape[-1]}; it must be even.")


def rotary_frequencies(
    head_dim: int,
    max_wavelength: float,
    scaling: float | Sequence[float],
    turned: float = 1.0,
) -> np.ndarray:
    """Radians per position of each pair of channels: (H / 2,), float64."""
    return np.array(_frequencies(head_dim, max_wavelength, scaling, turned))


def _frequencies(
    head_dim: int, max_wavelength: float, scaling: float | Sequence[float], turned: float
) -> list[float]:
    # Plain numbers: torch.compile takes them as constants, and NumPy's arrays it does not trace.
    pairs, half = int(turned * head_dim // 2), head_dim // 2
    divisors = [scaling] * half if isinstance(scaling, (int, float)) else [*scaling]
    if len(divisors) != half:
        raise InputError(
            f"rotary_embedding got scaling of {len(divisors)} pairs of channels; heads of width "
            f"{head_dim} have {half}"
        )
    frequencies = [1.0 / (max_wavelength ** (2 * i / head_dim) * divisors[i]) for i in range(pairs)]
    return frequencies + [0.0] * (half - pairs)


@op
def rotary_embedding_2d(
    x: Tensor,
    coordinates: Tensor,
    *,
    max_wavelength: float = 100.0,
    pairs: str = "halves",
) -> Tensor:
    """Rotates pairs of channels by angles that grow with the place in a plane.

    The first half of a head's H / 2 pairs turns by the first coordinate, the second half by the
    second one: pair i of each by `coordinate * max_wavelength ** (-4 i / H)`. A token at (0, 0)
    keeps its values, bit for bit.

    Shapes: x (B, T, N, H), H a multiple of 4; coordinates (T, 2) or (B, T, 2) -> (B, T, N, H).
    Dtypes: x floating, coordinates integer or floating; angles, sine, cosine and the rotation in
        float32 (float64 for float64 input); the output has x's dtype.

    Args:
        x: queries or keys.
        coordinates: places of the tokens, in radians of the fastest pair.
        max_wavelength: the base of the geometric series, also called "theta" or "temperature".
        pairs: which channels make a pair: "halves", channel i of the first half of a head and i of
            the second (DINOv3); "neighbors", 2 i and 2 i + 1 (Perception Encoder, EVA-02);
            "quarters", "halves" within each half of the head (Gemma 4's tower).

    Raises:
        InputError: if H is no multiple of 4, for coordinates of another shape, or another `pairs`.

    Parity: Transformers' `apply_rotary_pos_emb` of DINOv3 ("halves"), timm's
        `apply_rot_embed_cat` ("neighbors"), the former on each half of the head ("quarters").
    Source: https://arxiv.org/abs/2104.09864, https://arxiv.org/abs/2403.13298 (two axes)
    """
    check_rotary_embedding_2d(x, coordinates, pairs)
    dtype = wide(x)
    frequencies = ops.convert_to_tensor(frequencies_2d(x.shape[-1], max_wavelength), dtype)
    angles = ops.expand_dims(ops.cast(coordinates, dtype), -1) * frequencies  # (..., T, 2, H / 4)
    shape, axis = pair_shape(x.shape[-1], pairs)
    of_pairs = shape[:axis] + shape[axis:][1:]  # without the axis of a pair
    angles = ops.reshape(angles, (*ops.shape(angles)[:-2], 1, *of_pairs))
    cosine, sine = ops.cos(angles), ops.sin(angles)
    whole = ops.shape(x)
    y = ops.reshape(ops.cast(x, dtype), (*whole[:-1], *shape))
    first, second = ops.split(y, 2, axis=axis)
    first, second = ops.squeeze(first, axis), ops.squeeze(second, axis)
    y = ops.stack([first * cosine - second * sine, second * cosine + first * sine], axis=axis)
    return ops.cast(ops.reshape(y, whole), ops.dtype(x))


def check_rotary_embedding_2d(x: Tensor, coordinates: Tensor, pairs: str) -> None:
    """Raises `InputError` for wrong arguments of `rotary_embedding_2d`."""
    if x.shape[-1] % 4:
        raise InputError(
            f"rotary_embedding_2d got heads of width {x.shape[-1]}; it must be a multiple of 4"
        )
    shape = tuple(coordinates.shape)
    if len(shape) not in (2, 3) or shape[-1] != 2:
        raise InputError(
            f"rotary_embedding_2d got coordinates of shape {shape}; give (T, 2) or (B, T, 2)"
        )
    check_choice("pairs", pairs, PAIRS)


def pair_shape(width: int, pairs: str) -> tuple[tuple[int, ...], int]:
    """Returns the shape of a head's channels with an axis for the pairs, and that axis."""
    shape, axis = PAIRS[pairs]
    known = 2 ** (len(shape) - 1)
    return tuple(width // known if n is None else n for n in shape), axis


def frequencies_2d(head_dim: int, max_wavelength: float) -> list[float]:
    """Returns radians per unit of a coordinate for each of its pairs, H / 4 plain numbers."""
    return [1.0 / max_wavelength ** (4 * i / head_dim) for i in range(head_dim // 4)]
