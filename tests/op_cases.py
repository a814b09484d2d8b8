"""Calls of the ops, and their definitions in NumPy's float64."""

import math
from typing import Any

import numpy as np

from numpy_attention import attention

T, S, H = 5, 7, 8
FULL = ((2, T, 4, H), (2, S, 4, H), (2, S, 4, H))
GROUPED = ((2, T, 4, H), (2, S, 2, H), (2, S, 2, H))
ONE = ((2, 1, 4, H), (2, S, 2, H), (2, S, 2, H))
SQUARE = ((2, S, 4, H), (2, S, 4, H), (2, S, 4, H))

# Texts of a packed row, of which the last is padding, and one row that is a single text.
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1]], "int32")
# Two images inside a text, and a text alone.
BLOCKS = np.array([[-1, 0, 0, 0, -1, 1, 1], [-1, -1, -1, -1, -1, -1, -1]], "int32")


def pairs(length: int) -> np.ndarray:
    """A mask of pairs by head, (B, N, T, S), of which one query sees nothing."""
    found = np.random.default_rng(4).random((2, 4, length, S)) > 0.4
    found[0, :, length // 2] = False
    return found


# A mask of keys: one row is all padding.
KEYS = np.random.default_rng(4).random((2, 1, 1, S)) > 0.4
KEYS[1] = False

# Label, shapes, and what the call is given besides.
ATTENTION: tuple[tuple[str, tuple[tuple[int, ...], ...], dict[str, Any]], ...] = (
    ("plain", FULL, {}),
    ("scale", FULL, {"scale": 0.7}),
    ("causal", SQUARE, {"causal": True}),
    ("causal, more keys", FULL, {"causal": True}),
    ("window", SQUARE, {"window": 2}),
    ("causal window, grouped", GROUPED, {"causal": True, "window": 3}),
    ("mask with an empty row", FULL, {"mask": pairs(T)}),
    ("mask of keys, grouped, causal", GROUPED, {"causal": True, "mask": KEYS}),
    ("mask per head, grouped", GROUPED, {"mask": pairs(T)}),
    ("one query, grouped, causal", ONE, {"causal": True, "scale": 0.3}),
    ("one query, causal window", ONE, {"causal": True, "window": 3}),
    ("one query, mask of keys", ONE, {"mask": KEYS}),
    ("one query, mask per head", ONE, {"mask": pairs(1)}),
    ("segments", FULL, {"segment_ids": SEGMENTS}),
    ("segments, causal", SQUARE, {"causal": True, "segment_ids": SEGMENTS}),
    (
        *("segments, mask, window, grouped", GROUPED),
        {"causal": True, "window": 3, "segment_ids": SEGMENTS, "mask": pairs(T)},
    ),
    ("segments of all rows", FULL, {"causal": True, "segment_ids": SEGMENTS[:1]}),
    ("one query, segments", ONE, {"causal": True, "segment_ids": 3 - SEGMENTS // 2}),
    ("blocks", SQUARE, {"causal": True, "block_ids": BLOCKS}),
    ("blocks, window, grouped", GROUPED, {"causal": True, "window": 2, "block_ids": BLOCKS}),
    (
        *("blocks, segments, mask", GROUPED),
        {"causal": True, "segment_ids": SEGMENTS, "block_ids": BLOCKS[:1], "mask": KEYS},
    ),
    ("soft cap", GROUPED, {"soft_cap": 0.5, "causal": True}),
)


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
    "mlp": mlp,
    "patch_embedding": patch_embedding,
    "quantized_dense": lambda x, kernel, scale: x @ (kernel / scale),
    "rms_norm": rms_norm,
    "rotary_embedding": rotary_embedding,
    "rotary_embedding_2d": rotary_embedding_2d,
}


RNG = np.random.default_rng(1)
LABELS = np.array([3, 0, 6, 1, 2])
WEIGHTS = np.array([1.0, 0.0, 0.5, 2.0, 1.0], "float32")
SCALE = np.array([[50.0, 60.0, 70.0]], "float32")
TURNS = np.array([[0, 1, 2, 3, 4], [7, 8, 0, 1, 900]])
PLACES = np.array(
    [
        [[0, 0], [0, 0], [-3.1, 2.5], [0.4, -1.3], [6.0, 6.2]],
        [[1, 0], [0, 1], [0, 0], [2, 5], [40.5, -7]],
    ],
    "float32",
)
ROTARY = {"positions": TURNS, "max_wavelength": 100.0, "scaling": 4.0}


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype("float32")


OpCase = tuple[str, str, list[np.ndarray], dict[str, Any]]


def cases() -> list[OpCase]:
    """Calls of every op: (op, label, arrays to differentiate by, keyword arguments)."""
    found: list[OpCase] = []
    for label, shapes, keywords in ATTENTION:
        rng = np.random.default_rng(3)
        arrays = [rng.normal(size=shape).astype("float32") for shape in shapes]
        found.append(("attention", label, arrays, keywords))
    found += [
        ("layer_norm", "with bias", [normal(2, 5, 12) + 3, normal(12), normal(12)], {}),
        ("layer_norm", "four axes", [normal(2, 3, 4, 12) + 3, normal(12), normal(12)], {}),
        ("layer_norm", "no bias", [normal(3, 12), normal(12)], {"epsilon": 0.1}),
        ("rms_norm", "three axes", [normal(2, 5, 12) * 3, normal(12)], {"epsilon": 0.01}),
        ("rms_norm", "plain scale", [normal(2, 5, 12) * 3, normal(12)], {"offset": 0.0}),
        ("rms_norm", "no scale", [normal(2, 5, 12) * 3], {"scale": None}),
        *(
            ("gelu", label, [normal(2, 5, 12) * 2], keywords)
            for label, keywords in (
                ("three axes", {}),
                ("tanh form", {"approximate": True}),
                ("sigmoid form", {"approximate": "sigmoid"}),
            )
        ),
        ("gated_gelu", "three axes", [normal(2, 5, 12) * 2, normal(2, 5, 12)], {}),
        ("gated_silu", "three axes", [normal(2, 5, 12) * 2, normal(2, 5, 12)], {}),
        (
            "mlp",
            "three axes",
            [normal(2, 5, 6), normal(6, 8), normal(8), normal(8, 4) / 3, normal(4)],
            {},
        ),
        (
            "mlp",
            "large, tanh form",
            [
                normal(2, 64, 96),
                normal(96, 192) / 10,
                normal(192),
                normal(192, 96) / 14,
                normal(96),
            ],
            {"approximate": True},
        ),
        (
            "mlp",
            "quick GELU",
            [normal(2, 5, 6), normal(6, 8), normal(8), normal(8, 4) / 3, normal(4)],
            {"approximate": "sigmoid"},
        ),
        ("dense", "three axes", [normal(2, 5, 6), normal(6, 4), normal(4)], {}),
        ("dense", "one row", [normal(1, 1, 6), normal(6, 4), normal(4)], {}),
        ("dense", "large", [normal(2, 64, 96), normal(96, 192), normal(192)], {}),
        ("dense", "four axes, no bias", [normal(2, 3, 5, 6), normal(6, 4)], {}),
        *(
            (
                "grouped_dense",
                label,
                [normal(sum(sizes), width), normal(len(sizes), width, 16)],
                {"sizes": np.array(sizes, "int32")},
            )
            for label, width, sizes in (
                ("a group without rows", 8, (3, 0, 5, 1)),
                ("all rows in one group", 8, (0, 0, 9, 0)),
                ("more groups than rows", 8, (0, 1, 0, 0, 0, 1, 0)),
                ("long groups", 32, (70, 1, 40, 17)),
                ("an odd width", 7, (3, 0, 5, 1)),
            )
        ),
        ("rotary_embedding", "row of positions", [normal(2, 5, 3, 8)], {"positions": TURNS[0]}),
        ("rotary_embedding", "two rows", [normal(2, 5, 3, 8)], ROTARY),
        ("rotary_embedding", "half turned", [normal(2, 5, 3, 8)], {**ROTARY, "turned": 0.5}),
        (
            *("rotary_embedding", "a divisor for each pair", [normal(2, 5, 3, 8)]),
            {**ROTARY, "scaling": (1.0, 1.5, 3.0, 4.0)},
        ),
        *(
            (
                "rotary_embedding_2d",
                label,
                [normal(2, 5, 3, 8)],
                {"coordinates": places, "pairs": pairs, "max_wavelength": 10.0},
            )
            for label, pairs, places in (
                ("halves", "halves", PLACES[0]),
                ("places of each", "halves", PLACES),
                ("neighbors", "neighbors", PLACES[1]),
                ("quarters", "quarters", PLACES[1]),
            )
        ),
        (
            "patch_embedding",
            "with bias",
            [normal(2, 8, 12, 3) * 0.3, normal(48, 6), normal(6)],
            {"patch_size": 4},
        ),
        (
            "patch_embedding",
            "no bias",
            [normal(1, 6, 4, 1), normal(4, 6)],
            {"patch_size": 2},
        ),
        (
            "linear_cross_entropy",
            "trainable table",
            [normal(5, 6), normal(7, 6)],
            {"labels": LABELS, "weights": WEIGHTS, "trainable_table": True},
        ),
        (
            "linear_cross_entropy",
            "soft cap",
            [normal(5, 6), normal(7, 6)],
            {"labels": LABELS, "weights": WEIGHTS, "trainable_table": True, "soft_cap": 2.0},
        ),
        (
            "quantized_dense",
            "8 bits",
            [normal(2, 5, 4)],
            {"kernel": RNG.integers(-127, 128, (4, 3)).astype("int8"), "scale": SCALE},
        ),
    ]
    return found


# Those that differ in more than a number from one named before.
TELLING = (
    *("plain", "mask with an empty row", "causal window, grouped", "mask per head, grouped"),
    *("segments, mask, window, grouped", "blocks, window, grouped", "one query, segments"),
    *("an odd width", "one query, mask of keys", "quick GELU", "soft cap", "two rows"),
    *("places of each", "neighbors", "quarters"),
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
    of_batch = ("labels", "weights")
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
