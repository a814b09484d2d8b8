"""The numbers that codes of 4 and 8 bits stand for, by the data type."""

import ml_dtypes
import numpy as np

# The 16 numbers of each mode with a table, by their codes.
# NF4: quantiles of the normal distribution (https://arxiv.org/abs/2305.14314, appendix E).
# FP4: a sign, two bits of exponent and one of fraction, divided by the largest as in bitsandbytes.
TABLES: dict[str, tuple[float, ...]] = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": tuple(
        sign * np.float32(number / 192).item() + 0.0  # no negative zero
        for sign in (1, -1)
        for number in (0, 1, 128, 192, 64, 96, 32, 48)
    ),
}
# Scales of 8 bits that share a scale themselves.
NESTED_BLOCK = 256
# The numbers of FP8 by their codes: a sign, four bits of exponent and three of fraction, without
# infinities (e4m3fn, https://arxiv.org/abs/2209.05433).
FLOAT8 = np.arange(256, dtype="uint8").view(ml_dtypes.float8_e4m3fn).astype("float32")


def dynamic_numbers() -> np.ndarray:
    """Returns the 256 numbers of scales in 8 bits: bitsandbytes' signed dynamic data type.

    Each power of ten has twice as many as the one below (https://arxiv.org/abs/1511.04561); those
    at 0 and at the upper end have no counterpart.
    """
    numbers = [0.0, 1.0]
    for power in range(7):
        count = 2**power
        # Both halves of the ends are counted from their own side, as torch.linspace does.
        step = np.float64((np.float32(1) - np.float32(0.1)) / np.float32(count))
        below = np.float64(np.float32(0.1)) + step * np.arange(count + 1)
        above = 1.0 - step * np.arange(count, -1, -1)
        lower = np.arange(count + 1) < (count + 1) // 2
        ends = np.where(lower, below, above).astype("float32")
        middles = np.float32(10.0 ** (power - 6)) * ((ends[:-1] + ends[1:]) / np.float32(2))
        numbers += [*middles.tolist(), *(-middles).tolist()]
    return np.sort(np.array(numbers, "float32"))


DYNAMIC = dynamic_numbers()
