"""Definitions of the ops in NumPy's float64, and the calls of `op_cases` that tests run."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kmodels.tools.op_cases import PLACES, OpCase, cases
from numpy_attention import attention

__all__ = ["DEFINITIONS", "PLACES", "OpCase", "cases", "few_cases", "layer_norm", "without_rows"]


def gelu(x: np.ndarray, approximate: bool | str = False) -> np.ndarray:
    if approximate == "sigmoid":
        return x / (1 + np.exp(-1.702 * x))
    if approximate:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def mlp(x: np.ndarray, up: Any, up_bias: Any, down: Any, down_bias: Any, **form: Any) -> np.ndarray:
    return gelu(x @ up + up_bias, **form) @ down + down_bias


def layer_norm(
    x: np.ndarray, scale: np.ndarray, bias: Any = 0.0, epsilon: float = 1e-6
) -> np.ndarray:
    spread = np.sqrt(x.var(-1, keepdims=True) + epsilon)
    return (x - x.mean(-1, keepdims=True)) / spread * scale + bias


def rms_norm(
    x: np.ndarray, scale: np.ndarray | None, epsilon: float = 1e-6, offset: float = 1.0
) -> np.ndarray:
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    return y if scale is None else y * (offset + scale)


def grouped_dense(x: np.ndarray, kernel: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    return np.stack([row @ kernel[group] for row, group in zip(x, groups, strict=True)])


def turn(x: np.ndarray, first: int, second: int, angle: np.ndarray) -> np.ndarray:
    """Turns one pair of channels by angles (..., T)."""
    y, angle = x.copy(), angle[..., None]
    y[..., first] = x[..., first] * np.cos(angle) - x[..., second] * np.sin(angle)
    y[..., second] = x[..., second] * np.cos(angle) + x[..., first] * np.sin(angle)
    return y


def rotary_embedding(
    x: np.ndarray,
    positions: np.ndarray,
    max_wavelength: float = 1e4,
    scaling: float | tuple[float, ...] = 1.0,
    turned: float = 1.0,
) -> np.ndarray:
    half = x.shape[-1] // 2
    for i in range(round(half * turned)):
        divisor = scaling if isinstance(scaling, float) else scaling[i]
        x = turn(x, i, i + half, positions / divisor * max_wavelength ** (-i / half))
    return x


# (axis, step of the series) -> the two channels of each pair of 8, written out.
CHANNELS = {
    "halves": {(0, 0): (0, 4), (0, 1): (1, 5), (1, 0): (2, 6), (1, 1): (3, 7)},
    "neighbors": {(0, 0): (0, 1), (0, 1): (2, 3), (1, 0): (4, 5), (1, 1): (6, 7)},
    "quarters": {(0, 0): (0, 2), (0, 1): (1, 3), (1, 0): (4, 6), (1, 1): (5, 7)},
}


def rotary_embedding_2d(
    x: np.ndarray, coordinates: np.ndarray, pairs: str, max_wavelength: float
) -> np.ndarray:
    coordinates = coordinates.astype("float64")
    for (axis, step), (first, second) in CHANNELS[pairs].items():
        x = turn(x, first, second, coordinates[..., axis] * max_wavelength ** (-step / 2))
    return x


def patch_embedding(
    images: np.ndarray, kernel: np.ndarray, bias: Any = 0.0, *, patch_size: int
) -> np.ndarray:
    rows, columns = (range(0, length, patch_size) for length in images.shape[1:3])
    patches = [images[:, r : r + patch_size, c : c + patch_size] for r in rows for c in columns]
    return np.stack([patch.reshape(len(patch), -1) @ kernel for patch in patches], 1) + bias


def linear_cross_entropy(
    hidden: np.ndarray,
    table: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray,
    soft_cap: float | None = None,
    **_: Any,
) -> np.ndarray:
    scores = hidden @ table.T
    scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
    losses = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(labels)), labels]
    return (losses * weights).sum()


def linear_log_probs(
    hidden: np.ndarray,
    table: np.ndarray,
    labels: np.ndarray,
    weights: Any = 1.0,
    soft_cap: float | None = None,
    temperature: float = 1.0,
    **_: Any,
) -> np.ndarray:
    scores = hidden @ table.T
    scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
    scores = scores / temperature
    return weights * (scores[np.arange(len(labels)), labels] - np.log(np.exp(scores).sum(1)))


def linear_divergence(
    hidden: np.ndarray,
    table: np.ndarray,
    teacher_hidden: np.ndarray,
    teacher_table: np.ndarray,
    weights: Any = 1.0,
    kind: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    teacher_soft_cap: float | None = None,
    **_: Any,
) -> np.ndarray:
    q, p = (
        capped / capped.sum(1, keepdims=True)
        for capped in (
            np.exp((x if cap is None else cap * np.tanh(x / cap)) / temperature)
            for x, cap in (
                (hidden @ table.T, soft_cap),
                (teacher_hidden.astype("float64") @ teacher_table.T, teacher_soft_cap),
            )
        )
    )
    mean = beta * p + (1 - beta) * q
    parts = {
        "forward_kl": ((1, p, q),),
        "reverse_kl": ((1, q, p),),
        "jsd": ((beta, p, mean), (1 - beta, q, mean)),
    }[kind]
    return weights * sum(share * (a * np.log(a / b)).sum(1) for share, a, b in parts)


# Codes of 4 bits: quantiles of the normal distribution, and sign, exponent and fraction.
NF4 = (
    "-1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 "
    "-0.18477343022823334 -0.09105003625154495 0 0.07958029955625534 0.16093020141124725 "
    "0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941 "
    "0.7229568362236023 1"
)
FP4 = [0, 0.0625, 8, 12, 4, 6, 2, 3]


def quantized_dense(
    x: np.ndarray, arrays: Sequence[np.ndarray], mode: str, sizes: np.ndarray | None = None
) -> np.ndarray:
    if sizes is not None:
        rows = np.split(x, np.cumsum(sizes)[:-1])
        parts = [
            quantized_dense(part, [array[group] for array in arrays], mode)
            for group, part in enumerate(rows)
        ]
        return np.concatenate(parts)
    numbers, scale, *more = arrays
    if mode == "int8":
        return x @ (numbers / scale.astype("float64"))
    if mode == "fp8":
        sign = np.where(numbers >> 7, -1.0, 1.0)
        exponent, fraction = (numbers >> 3 & 15).astype(int), (numbers & 7) / 8
        kernel = np.where(exponent == 0, fraction / 64, (1 + fraction) * 2.0 ** (exponent - 7))
        return x @ (sign * kernel * scale.astype("float64").repeat(len(numbers) // len(scale), 0))
    halves = [numbers.view("uint8") & 15, numbers.view("uint8") >> 4]
    if mode == "int4":
        codes = np.stack([(half.astype(int) + 8) % 16 - 8 for half in halves], 1)
        kernel = codes.reshape(-1, numbers.shape[1]) - more[0].astype(int).repeat(2, 0)
        return x @ (kernel * scale.astype("float64").repeat(2, 0))
    table = {"nf4": [*map(float, NF4.split())], "fp4": [*FP4, *(-x for x in FP4)]}[mode]
    table = (np.array(table) / np.abs(table).max()).astype("float32").astype("float64")
    kernel = table[np.stack(halves[::-1], 1).reshape(-1, numbers.shape[1])]
    if more:
        nested, offset = more
        scale = dynamic()[scale] * nested.astype("float64")[0, 0] + offset[0, 0]
    return x @ (kernel * scale.repeat(2, 0))


def dynamic() -> np.ndarray:
    """Signed numbers of 8 bits, twice as many in each power of ten as in the one below."""
    powers = [(10.0 ** (i - 6), (np.arange(2**i) + 0.5) * 0.9 / 2**i + 0.1) for i in range(7)]
    positive = np.concatenate([power * middles for power, middles in powers])
    return np.sort(np.concatenate([positive, -positive, [0.0, 1.0]]))


# What each op is, of arrays in float64.
DEFINITIONS = {
    "attention": attention,
    "dense": lambda x, kernel, bias=0.0: x @ kernel + bias,
    "gated_gelu": lambda gate, up: gelu(gate, True) * up,
    "gated_silu": lambda gate, up: gate / (1 + np.exp(-gate)) * up,
    "gelu": gelu,
    "grouped_dense": grouped_dense,
    "layer_norm": layer_norm,
    "linear_cross_entropy": linear_cross_entropy,
    "linear_divergence": linear_divergence,
    "linear_log_probs": linear_log_probs,
    "mlp": mlp,
    "patch_embedding": patch_embedding,
    "quantized_dense": quantized_dense,
    "rms_norm": rms_norm,
    "rotary_embedding": rotary_embedding,
    "rotary_embedding_2d": rotary_embedding_2d,
}


# Those that differ in more than a number from one named before.
TELLING = (
    *("plain", "mask with an empty row", "causal window, grouped", "mask per head, grouped"),
    *("segments, mask, window, grouped", "blocks, window, grouped", "one query, segments"),
    *("an odd width", "one query, mask of keys", "quick GELU", "soft cap", "two rows"),
    *("soft cap, temperature", "places of each", "neighbors", "quarters", "4 bits of a table"),
    "floats of 8 bits",
    *("frozen table, reverse_kl", "frozen table, jsd", "trainable table, jsd"),
)


def few_cases() -> list[OpCase]:
    """The first case of each op, and those that take a path of their own."""
    seen, found = set(), []
    for case in cases():
        if case[0] not in seen or case[1] in TELLING:
            found.append(case)
        seen.add(case[0])
    return found


def without_rows(case: OpCase) -> OpCase:
    """The same call with a batch of 0."""
    name, label, given, keywords = case
    rows = {"attention": 3, "gated_gelu": 2, "gated_silu": 2}.get(name, 1)
    given = [x[:0] if i < rows else x for i, x in enumerate(given)]
    of_batch = ("labels", "weights", "teacher_hidden")
    if name == "grouped_dense":
        keywords = {"sizes": 0 * keywords["sizes"]}
    if name == "attention":
        of_batch = ("mask", "segment_ids", "block_ids")
    keywords = {key: x[:0] if key in of_batch else x for key, x in keywords.items()}
    if name == "rotary_embedding_2d" and keywords["coordinates"].ndim == 3:
        keywords["coordinates"] = keywords["coordinates"][:0]
    if name == "rotary_embedding" and keywords["positions"].ndim == 2:
        keywords["positions"] = keywords["positions"][:0]
    return name, label, given, keywords
