"""Rotary position embedding."""

from collections.abc import Sequence

import numpy as np
from keras import ops

from kmodels.core.dispatch import op
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.ops._wide import wide


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
        max_wavelength: the base of the geometric series, "theta" elsewhere.
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
    """Checks the arguments of `rotary_embedding`.

    Raises:
        InputError: if H is odd.
    """
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
    divisors = [scaling] * half if isinstance(scaling, int | float) else [*scaling]
    if len(divisors) != half:
        raise InputError(
            f"rotary_embedding got scaling of {len(divisors)} pairs of channels; heads of width "
            f"{head_dim} have {half}"
        )
    frequencies = [1.0 / (max_wavelength ** (2 * i / head_dim) * divisors[i]) for i in range(pairs)]
    return frequencies + [0.0] * (half - pairs)
