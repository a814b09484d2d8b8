"""Weights in four to six bits: llama.cpp's K-quants, and which tensor of a file gets which type.

The arithmetic is that of `quantize_row_q4_K_ref`, `quantize_row_q5_K_ref` and
`quantize_row_q6_K_ref` in ggml's ggml-quants.c, or with an importance matrix of
`quantize_row_q4_K_impl` and those of the other types, with each float32 rounding in the same place,
so that files have the bytes that llama.cpp's own quantizer writes. The choice of types is that of
`llama_tensor_get_type` in its llama-quant.cpp. The gguf package quantizes the simpler types, and
has no K-quants.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from kmodels.core.errors import InputError
from kmodels.models.blocks.gguf.tensors import OUTPUT, PER_LAYER_TABLE, TABLE

# Numbers that a K-quant stores together, and those that share a scale in Q4_K and Q5_K, and in
# Q6_K.
SUPER_BLOCK, GROUP, SMALL_GROUP = 256, 32, 16
# Super-blocks that are quantized at a time: their arrays fit into the caches of a core.
CHUNK = 512
# Below this a group counts as zero.
EPSILON = np.float32(1e-15)
# Float32 numbers of about this size have no fraction, so adding it rounds to a whole number.
MAGIC = np.float32(12582912.0)

# === Quantizing ===
# Groups are columns: NumPy adds the rows of an array in their order, as ggml adds the numbers of a
# group, whereas along the last axis it would add pairs first.


def quantize(
    values: np.ndarray, kind: str, name: str, importance: np.ndarray | None = None
) -> np.ndarray:
    """Quantizes rows (..., n) float32 to (..., bytes) uint8, or to values of a float type.

    The importance, (n,) float32, or (E, n) for values (E, rows, n), weighs the error in each
    column; `WEIGHTED` types use it. `name` is for errors.
    """
    import gguf

    if not np.isfinite(values).all():
        raise InputError(f"{name} holds NaN or infinite values; a GGUF file of it would not run")
    if importance is not None and kind in WEIGHTED:
        data = _weighted(values, kind, importance)
    elif kind in ENCODERS:
        blocks = np.ascontiguousarray(values, "float32").reshape(-1, SUPER_BLOCK)
        # Divides by zero, as C does, where the result is not used.
        with np.errstate(all="ignore"):
            parts = [ENCODERS[kind](blocks[i : i + CHUNK]) for i in range(0, len(blocks), CHUNK)]
        data = np.concatenate(parts).reshape(*values.shape[:-1], -1)
    else:
        # ggml's largest number of a block of zeros is 0, also if they are negative zeros.
        values = values + np.float32(0) if kind in ("Q4_0", "Q5_0") else values
        # The package divides by scales of zero, and casts numbers that are beyond float16.
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    if not _fits(data, kind):
        largest = np.abs(values).max()
        raise InputError(
            f"{name} has values up to {largest:.1e}, too large for {kind}; write float32, bfloat16"
        )
    return data


def _fits(data: np.ndarray, kind: str) -> bool:
    """Returns True if the float16 numbers of a tensor are finite: values, or scales of blocks."""
    import gguf

    if kind == "F16":
        return bool(np.isfinite(data).all())
    if kind not in SCALES:
        return True
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = data.reshape(-1, size)
    columns = [np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2") for at in SCALES[kind]]
    return all(np.isfinite(column).all() for column in columns)


# Where the float16 scales of a block begin, by type.
SCALES = {
    **{"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q6_K": (208,)},
    **{"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)},
}


def _nearest(x: np.ndarray, low: int, high: int) -> np.ndarray:
    """Rounds to whole numbers from `low` to `high`; ties go to even numbers.

    Like ggml's `nearest_int`, it reads the bits of the sum, which for numbers beyond 2**22 are some
    other whole number.
    """
    return np.clip(_nearest_int(x), low, high)


def _nearest_int(x: np.ndarray) -> np.ndarray:
    return ((x + MAGIC).view("int32") & 0x007FFFFF) - 0x00400000


def _with_minimum(
    x: np.ndarray, weights: np.ndarray, bits: int, start: float, change: float, steps: int
) -> tuple[np.ndarray, ...]:
    """Finds scale and minimum of groups (32, groups): x is about scale * quants - minimum.

    They are those of a weighted least-squares fit, for the best of several roundings
    (`make_qkx2_quants` and `make_qkx3_quants`): those with `start` + i * `change` more levels than
    the quants have, for i up to `steps`.

    Returns:
        scales (groups,), minima (groups,) and quants (32, groups) int32.
    """
    most = 2**bits - 1
    # The first of equal numbers: zeros have signs.
    low, high = np.take_along_axis(x, x.argmin(0)[None], 0)[0], x.max(0)
    low = np.where(low > 0, np.float32(0), low)
    constant = high == low
    sum_w, sum_x = weights.sum(0), (weights * x).sum(0)

    def error(scale: np.ndarray, quants: np.ndarray, minimum: np.ndarray) -> np.ndarray:
        difference = scale * quants + minimum - x
        return (weights * (difference * difference)).sum(0)

    inverse = np.float32(most) / (high - low)
    scale = np.float32(1) / inverse
    best = _nearest(inverse * (x - low), 0, most)
    least = error(scale, best.astype("float32"), low)
    for step in range(steps + 1):
        levels = np.float32(start) + np.float32(change) * np.float32(step) + np.float32(most)
        # A minimum next to the maximum divides by next to nothing.
        places = np.fmin(
            np.fmax(levels / (high - low) * (x - low), np.float32(0)), np.float32(most)
        )
        tried = _nearest_int(places)
        quants = tried.astype("float32")
        weighted = weights * quants
        sum_l, sum_l2, sum_xl = weighted.sum(0), (weighted * quants).sum(0), (weighted * x).sum(0)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        positive = new_low > 0
        new_scale = np.where(positive, sum_xl / sum_l2, new_scale)
        new_low = np.where(positive, np.float32(0), new_low)
        tried_error = error(new_scale, quants, new_low)
        better = (determinant > 0) & (tried_error < least) & ~constant
        best = np.where(better, tried, best)
        least = np.where(better, tried_error, least)
        scale, low = np.where(better, new_scale, scale), np.where(better, new_low, low)
    return np.where(constant, np.float32(0), scale), -low, np.where(constant, 0, best)


def _with_minima(
    blocks: np.ndarray, bits: int, start: float, steps: int, importance: np.ndarray | None
) -> tuple[np.ndarray, ...]:
    """Returns the header (n, 16) uint8 and the quants (n, 256) uint8 of Q4_K and Q5_K."""
    count, groups = len(blocks), SUPER_BLOCK // GROUP
    x = np.ascontiguousarray(blocks.reshape(-1, GROUP).T)
    if importance is None:
        weights = np.sqrt((x * x).sum(0) / np.float32(GROUP)) + np.abs(x)
        fitted, lows, best = _with_minimum(x, weights, bits, start, 0.1, steps)
    else:
        squares = np.float32(2) * _sum_of_squares(blocks) / np.float32(SUPER_BLOCK)
        weights = _columns(_spread(importance, blocks, squares), x)
        fitted, lows, best = _with_minimum(x, weights, bits, *FIT)
    parts = []
    for numbers in (fitted.reshape(count, groups), lows.reshape(count, groups)):
        if importance is None:
            largest = np.maximum(numbers.max(1), np.float32(0))
            inverse = np.where(largest > 0, np.float32(63) / largest, np.float32(0))
            six = np.minimum(_nearest_int(inverse[:, None] * numbers).astype("uint8"), 63)
            step = (largest / np.float32(63)).astype("<f2")
        else:
            weight = np.ascontiguousarray(weights.sum(0).reshape(count, groups).T)
            step, six = _positive(np.ascontiguousarray(numbers.T), weight, 63)
            # A scale below zero becomes a large byte, of which Q4_K stores some bits.
            step, six = step.astype("<f2"), np.minimum(six.T, 63 if bits == 5 else 255)
        parts.append((step, six))
    (d, scales), (d_min, minima) = parts
    # Of six bits, the last groups have four in their own bytes and two in those of the first.
    first, second, mixed = packed = (
        scales[:, :4] | scales[:, 4:] >> 4 << 6,
        minima[:, :4] | minima[:, 4:] >> 4 << 6,
        scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4,
    )
    stored = [
        np.concatenate([first & 63, mixed & 15 | first >> 6 << 4], 1),
        np.concatenate([second & 63, mixed >> 4 | second >> 6 << 4], 1),
    ]
    scale, minimum = [
        (step.astype("float32")[:, None] * six.astype("float32")).reshape(-1)
        for step, six in zip((d, d_min), stored, strict=True)
    ]
    again = _nearest((x + minimum) / scale, 0, 2**bits - 1)
    quants = np.where(scale == 0, best, again).T.reshape(count, SUPER_BLOCK).astype("uint8")
    floats = np.stack([d, d_min], 1).view("uint8")
    return np.concatenate([floats, *packed], 1), quants


def _sum_of_squares(rows: np.ndarray) -> np.ndarray:
    # Each sum in order, which `sum` does not promise for a single row.
    return np.add.accumulate(np.ascontiguousarray((rows * rows).T), 0)[-1]


def _spread(importance: np.ndarray, x: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Returns the weights of numbers (n, width), of which larger ones count more."""
    return importance * np.sqrt(squares[:, None] + x * x)


def _positive(x: np.ndarray, weights: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Finds the scales of groups (8, groups), not negative: x is about scale * quants.

    The quants, up to `most`, are the best of several roundings, and then each is the best for those
    of the others (`make_qp_quants`). Scales are (groups,), quants (8, groups) uint8.
    """
    largest = np.maximum(x.max(0), np.float32(0))
    zero = largest < EPSILON

    def error(inverse: np.ndarray, quants: np.ndarray) -> np.ndarray:
        difference = x - np.float32(1) / inverse * quants.astype("float32")
        return (weights * difference * difference).sum(0)

    inverse = np.float32(most) / largest
    least = error(inverse, _nearest_int(inverse * x).astype("uint8"))
    for change in (*range(-4, 0), *range(1, 5)):
        tried = (np.float32(0.1) * np.float32(change) + np.float32(most)) / largest
        tried_error = error(tried, np.minimum(_nearest_int(tried * x), most))
        better = tried_error < least
        least, inverse = np.where(better, tried_error, least), np.where(better, tried, inverse)
    rounded = np.minimum(_nearest_int(inverse * x), most)
    floats, quants = rounded.astype("float32"), rounded.astype("uint8")
    sum_xl, sum_l2 = (weights * x * floats).sum(0), (weights * floats * floats).sum(0)
    for _ in range(5):
        for own, w, row in zip(quants, weights, x, strict=True):
            old = own.astype("float32")
            rest_xl, rest_l2 = sum_xl - w * row * old, sum_l2 - w * old * old
            tried = np.minimum(_nearest_int(row * rest_l2 / rest_xl), most)
            new = tried.astype("float32")
            new_xl, new_l2 = rest_xl + w * row * new, rest_l2 + w * new * new
            better = (rest_xl > 0) & (rest_l2 > 0) & (tried != own)
            better &= new_xl * new_xl * sum_l2 > sum_xl * sum_xl * new_l2
            own[better] = tried[better].astype("uint8")
            sum_xl, sum_l2 = np.where(better, new_xl, sum_xl), np.where(better, new_l2, sum_l2)
    scale = np.where(sum_l2 > 0, sum_xl / sum_l2, np.float32(0))
    return np.where(zero, np.float32(0), scale), np.where(zero, np.uint8(0), quants)


def _q4_k(blocks: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    header, quants = _with_minima(blocks, 4, -1.0, 20, importance)
    halves = quants.reshape(-1, 4, 2, GROUP)
    packed = halves[:, :, 0] | halves[:, :, 1] << 4
    return np.concatenate([header, packed.reshape(len(blocks), -1)], 1)


def _q5_k(blocks: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    header, quants = _with_minima(blocks, 5, -0.5, 15, importance)
    halves = (quants & 15).reshape(-1, 4, 2, GROUP)
    packed = halves[:, :, 0] | halves[:, :, 1] << 4
    fifth = quants.reshape(-1, SUPER_BLOCK // GROUP, GROUP) >> 4
    fifth = np.packbits(fifth, axis=1, bitorder="little")
    return np.concatenate([header, fifth[:, 0], packed.reshape(len(blocks), -1)], 1)


def _around_zero(
    x: np.ndarray, weights: np.ndarray, most: int = 32
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the scales of groups (size, groups): x is about scale * (quants - most).

    The scale is that of a weighted least-squares fit for the best of several roundings
    (`make_qx_quants`). Scales are (groups,), quants (size, groups) int32 below twice `most`.
    """
    largest = np.take_along_axis(x, np.abs(x).argmax(0)[None], 0)[0]
    zero = np.abs(largest) < EPSILON

    def fit(change: float) -> tuple[np.ndarray, ...]:
        levels = np.float32(most) + np.float32(0.1) * np.float32(change)
        quants = _nearest(-levels / largest * x, -most, most - 1)
        floats = quants.astype("float32")
        return quants, (weights * x * floats).sum(0), (weights * floats * floats).sum(0)

    quants, sum_xl, sum_l2 = fit(0)
    scale = np.where(sum_l2 != 0, sum_xl / sum_l2, np.float32(0))
    best = scale * sum_xl
    for change in (*range(-9, 0), *range(1, 10)):
        tried, sum_xl, sum_l2 = fit(change)
        better = (sum_l2 > 0) & (sum_xl * sum_xl > best * sum_l2)
        quants = np.where(better, tried, quants)
        scale = np.where(better, sum_xl / sum_l2, scale)
        best = np.where(better, scale * sum_xl, best)
    return np.where(zero, np.float32(0), scale), np.where(zero, 0, quants + most)


def _q6_k(blocks: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    count, groups = len(blocks), SUPER_BLOCK // SMALL_GROUP
    x = np.ascontiguousarray(blocks.reshape(-1, SMALL_GROUP).T)
    fitted, best = _around_zero(x, x * x if importance is None else _columns(importance, x))
    fitted = fitted.reshape(count, groups)
    largest = np.take_along_axis(fitted, np.abs(fitted).argmax(1)[:, None], 1)
    empty = np.abs(largest) < EPSILON
    inverse = np.float32(-128) / largest
    scales = np.minimum(_nearest_int(inverse * fitted), 127).astype("int8")
    d = (np.float32(1) / inverse).astype("<f2")
    steps = (d.astype("float32") * scales.astype("float32")).reshape(-1)
    again = _nearest(x / steps, -32, 31) + 32
    quants = np.where(steps == 0, best, again).T.reshape(count, 2, 4, 32).astype("uint8")
    low, high = quants & 15, quants >> 4
    low = low[:, :, :2] | low[:, :, 2:] << 4
    shifts = np.array([0, 2, 4, 6], "uint8")[:, None]
    high = np.bitwise_or.reduce(high << shifts, axis=2)
    data = [low.reshape(count, -1), high.reshape(count, -1), scales.view("uint8"), d.view("uint8")]
    return np.where(empty, np.uint8(0), np.concatenate(data, 1))


def _columns(importance: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(importance.reshape(-1, len(x)).T)


def _in_blocks_of_32(
    bits: int, has_minimum: bool, blocks: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Returns the bytes of Q4_0, Q4_1, Q5_0 and Q5_1 of blocks (n, 32)."""
    x, weights = np.ascontiguousarray(blocks.T), np.ascontiguousarray(weights.T)
    if has_minimum:
        scale, minimum, quants = _with_minimum(x, weights, bits, *FIT)
        floats = [scale, -minimum]
    else:
        scale, quants = _around_zero(x, weights, 2 ** (bits - 1))
        floats = [scale]
    quants = quants.T.astype("uint8")
    fifth = np.packbits(quants >> 4, axis=1, bitorder="little")
    low = (quants[:, :16] & 15) | (quants[:, 16:] & 15) << 4
    parts = [np.stack(floats, 1).astype("<f2").view("uint8"), *([fifth] if bits == 5 else []), low]
    return np.concatenate(parts, 1)


def _weighted(values: np.ndarray, kind: str, importance: np.ndarray) -> np.ndarray:
    """Quantizes values (..., n) by the importance of their columns, see `quantize`."""
    width = values.shape[-1]
    size = SUPER_BLOCK if kind in ENCODERS else GROUP
    at_once = max(2, CHUNK * SUPER_BLOCK // width)
    parts = []
    matrices = np.ascontiguousarray(values, "float32").reshape(importance.size // width, -1, width)
    for matrix, own in zip(matrices, importance.reshape(-1, width), strict=True):
        for start in range(0, len(matrix), at_once):
            rows = matrix[start : start + at_once]
            count = len(rows)
            # NumPy adds the numbers of a single column in another order.
            rows = np.repeat(rows, 2, 0) if count == 1 else rows
            blocks = rows.reshape(-1, size)
            weights = np.tile(own.reshape(-1, size), (len(rows), 1))
            with np.errstate(all="ignore"):
                if kind not in ENCODERS:
                    squares = _sum_of_squares(rows) / np.float32(width)
                    weights = _spread(weights, blocks, squares.repeat(width // size))
                data = WEIGHTED[kind](blocks, weights)
            parts.append(data.reshape(len(rows), -1)[:count])
    return np.concatenate(parts).reshape(*values.shape[:-1], -1)


Encoder = Callable[..., np.ndarray]
# Of these each takes blocks (n, 256), and with an importance its weights, of the same shape.
ENCODERS: dict[str, Encoder] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
# Start, change and number of the roundings that are tried with an importance matrix.
FIT = (-0.9, 0.05, 36)
WEIGHTED: dict[str, Encoder] = {
    **ENCODERS,
    **{"Q4_0": partial(_in_blocks_of_32, 4, False), "Q4_1": partial(_in_blocks_of_32, 4, True)},
    **{"Q5_0": partial(_in_blocks_of_32, 5, False), "Q5_1": partial(_in_blocks_of_32, 5, True)},
}

# === Which tensor gets which type ===

# llama.cpp's file types by dtype of an export. As in its llama-quantize, a name without _s or _m is
# that of the medium mixture.
MIXTURES = {
    "q4_0": "Q4_0",
    **{"q4_k": "Q4_K_M", "q4_k_s": "Q4_K_S", "q4_k_m": "Q4_K_M"},
    **{"q5_k": "Q5_K_M", "q5_k_s": "Q5_K_S", "q5_k_m": "Q5_K_M"},
    "q6_k": "Q6_K",
}
# The type of a tensor whose rows are no multiple of 256.
FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
# Tensors of a block that lose most, of which a mixture stores some in more bits.
VALUES, DOWN = "attn_v", "ffn_down"
_PART = re.compile(rf"blk\.(\d+)\.({VALUES}|{DOWN})\.weight")
# Matrices that are never quantized.
WHOLE = ("per_layer_model_proj.weight",)


def choose_types(
    shapes: Mapping[str, tuple[int, ...]], file: str, architecture: str, weighted: bool = False
) -> dict[str, str]:
    """Returns the type of each tensor of a quantized decoder, as llama-quantize chooses it.

    The file is a value of `MIXTURES`, and `weighted` says whether there is an importance matrix.
    """
    kind = file[:4]
    places = {name: match for name in shapes if (match := _PART.fullmatch(name))}
    layers = {
        part: sorted(int(match[1]) for match in places.values() if match[2] == part)
        for part in (VALUES, DOWN)
    }
    tables = (OUTPUT,) if OUTPUT in shapes else (TABLE, PER_LAYER_TABLE)
    types = {}
    for name, shape in shapes.items():
        own = kind
        if len(shape) < 2 or name in WHOLE:
            types[name] = "F32"
            continue
        if name in tables:
            own = "Q6_K"
        elif match := places.get(name):
            part, of_part = match[2], layers[match[2]]
            index, number = of_part.index(int(match[1])), len(of_part)
            first = number // 8
            # The first and last eighth of the layers, and every third in between, lose most.
            outer = index < first or index >= 7 * number // 8 or (index - first) % 3 == 2
            if file.endswith("_M") and outer:
                own = "Q6_K"
            elif file == "Q4_K_S" and index < (4 if part == VALUES else first):
                own = "Q5_K"
            elif (file, part) == ("Q4_0", DOWN) and weighted and index < first:
                own = "Q4_1"
            # The values of a Llama with 70 B parameters are small, so that more bits cost little.
            if (part, own, architecture, number) == (VALUES, "Q4_K", "llama", 80):
                own = "Q5_K"
        types[name] = that_divides(own, shape[-1])
    return types


def that_divides(kind: str, width: int) -> str:
    """Returns the nearest type to `kind` that can store rows of this width."""
    if width % SUPER_BLOCK:
        kind = FALLBACKS.get(kind, kind)
    return "F16" if kind in SCALES and width % GROUP else kind
