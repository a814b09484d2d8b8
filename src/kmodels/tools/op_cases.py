"""Calls of each op, with which `kmodels parity --op` and the tests compare an op's bodies."""

from typing import Any

import numpy as np

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
    mask = np.random.default_rng(4).random((2, 4, length, S)) > 0.4
    mask[0, :, length // 2] = False
    return mask


# A mask of keys: one row is all padding.
KEYS = np.random.default_rng(4).random((2, 1, 1, S)) > 0.4
KEYS[1] = False

# Label, shapes, and the other arguments of the call.
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

RNG = np.random.default_rng(1)
LABELS = np.array([3, 0, 6, 1, 2])
WEIGHTS = np.array([1.0, 0.0, 0.5, 2.0, 1.0], "float32")
# Whose products are exact in every dtype.
TEACHER = {
    "teacher_hidden": np.random.default_rng(6).integers(-8, 8, (5, 4)).astype("float32") / 4,
    "teacher_table": np.random.default_rng(7).integers(-8, 8, (7, 4)).astype("float32") / 4,
}
TABLE = np.random.default_rng(8).normal(size=(7, 6)).astype("float32")
# Powers of two, by which weights in float32 are exact.
SCALE = np.array([[32.0, 64.0, 128.0]], "float32")
STEPS = np.array([[0.5, 0.25, 0.125], [2.0, 1.0, 0.25]], "float32")
ZEROS = np.array([[0, 3, -8], [7, -1, 2]], "int8")
GROUPS = np.stack([STEPS, STEPS[::-1], 2 * STEPS])
# Of the numbers of 8 bits those that are the same in every dtype: 1 and 0.
SCALES = np.array([[255, 127, 255], [127, 255, 127]], "uint8")
NESTED, OFFSET = np.array([[0.25]], "float32"), np.array([[0.25]], "float32")
# Bits of float8_e4m3fn: numbers of usual size, subnormal ones and zeros, of both signs.
FLOATS = np.array([[56, 184, 63], [1, 135, 74], [0, 128, 58], [196, 9, 60]], "uint8")
TURNS = np.array([[0, 1, 2, 3, 4], [7, 8, 0, 1, 900]])
PLACES = np.array(
    [
        [[0, 0], [0, 0], [-3.1, 2.5], [0.4, -1.3], [6.0, 6.2]],
        [[1, 0], [0, 1], [0, 0], [2, 5], [40.5, -7]],
    ],
    "float32",
)
ROTARY = {"positions": TURNS, "max_wavelength": 100.0, "scaling": 4.0}


def _normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype("float32")


def _bytes(kind: str, *shape: int) -> np.ndarray:
    """Returns all numbers that a byte can be, but the lowest."""
    return RNG.integers(1, 256, shape).astype("uint8").view(kind)


OpCase = tuple[str, str, list[np.ndarray], dict[str, Any]]


def cases() -> list[OpCase]:
    """Calls of every op: (op, label, arrays to differentiate by, keyword arguments)."""
    calls: list[OpCase] = []
    for label, shapes, keywords in ATTENTION:
        rng = np.random.default_rng(3)
        arrays = [rng.normal(size=shape).astype("float32") for shape in shapes]
        calls.append(("attention", label, arrays, keywords))
    calls += [
        ("layer_norm", "with bias", [_normal(2, 5, 12) + 3, _normal(12), _normal(12)], {}),
        ("layer_norm", "four axes", [_normal(2, 3, 4, 12) + 3, _normal(12), _normal(12)], {}),
        ("layer_norm", "no bias", [_normal(3, 12), _normal(12)], {"epsilon": 0.1}),
        ("rms_norm", "three axes", [_normal(2, 5, 12) * 3, _normal(12)], {"epsilon": 0.01}),
        ("rms_norm", "plain scale", [_normal(2, 5, 12) * 3, _normal(12)], {"offset": 0.0}),
        ("rms_norm", "no scale", [_normal(2, 5, 12) * 3], {"scale": None}),
        *(
            ("gelu", label, [_normal(2, 5, 12) * 2], keywords)
            for label, keywords in (
                ("three axes", {}),
                ("tanh form", {"approximate": True}),
                ("sigmoid form", {"approximate": "sigmoid"}),
            )
        ),
        ("gated_gelu", "three axes", [_normal(2, 5, 12) * 2, _normal(2, 5, 12)], {}),
        ("gated_silu", "three axes", [_normal(2, 5, 12) * 2, _normal(2, 5, 12)], {}),
        (
            "mlp",
            "three axes",
            [_normal(2, 5, 6), _normal(6, 8), _normal(8), _normal(8, 4) / 3, _normal(4)],
            {},
        ),
        (
            "mlp",
            "large, tanh form",
            [
                _normal(2, 64, 96),
                _normal(96, 192) / 10,
                _normal(192),
                _normal(192, 96) / 14,
                _normal(96),
            ],
            {"approximate": True},
        ),
        (
            "mlp",
            "quick GELU",
            [_normal(2, 5, 6), _normal(6, 8), _normal(8), _normal(8, 4) / 3, _normal(4)],
            {"approximate": "sigmoid"},
        ),
        ("dense", "three axes", [_normal(2, 5, 6), _normal(6, 4), _normal(4)], {}),
        ("dense", "one row", [_normal(1, 1, 6), _normal(6, 4), _normal(4)], {}),
        ("dense", "large", [_normal(2, 64, 96), _normal(96, 192), _normal(192)], {}),
        ("dense", "four axes, no bias", [_normal(2, 3, 5, 6), _normal(6, 4)], {}),
        *(
            (
                "grouped_dense",
                label,
                [_normal(sum(sizes), width), _normal(len(sizes), width, 16)],
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
        ("rotary_embedding", "row of positions", [_normal(2, 5, 3, 8)], {"positions": TURNS[0]}),
        ("rotary_embedding", "two rows", [_normal(2, 5, 3, 8)], ROTARY),
        ("rotary_embedding", "half turned", [_normal(2, 5, 3, 8)], {**ROTARY, "turned": 0.5}),
        (
            *("rotary_embedding", "a divisor for each pair", [_normal(2, 5, 3, 8)]),
            {**ROTARY, "scaling": (1.0, 1.5, 3.0, 4.0)},
        ),
        *(
            (
                "rotary_embedding_2d",
                label,
                [_normal(2, 5, 3, 8)],
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
            [_normal(2, 8, 12, 3) * 0.3, _normal(48, 6), _normal(6)],
            {"patch_size": 4},
        ),
        ("patch_embedding", "no bias", [_normal(1, 6, 4, 1), _normal(4, 6)], {"patch_size": 2}),
        (
            "linear_cross_entropy",
            "trainable table",
            [_normal(5, 6), _normal(7, 6)],
            {"labels": LABELS, "weights": WEIGHTS, "trainable_table": True},
        ),
        (
            "linear_cross_entropy",
            "soft cap",
            [_normal(5, 6), _normal(7, 6)],
            {"labels": LABELS, "weights": WEIGHTS, "trainable_table": True, "soft_cap": 2.0},
        ),
        (
            "linear_log_probs",
            "trainable table",
            [_normal(5, 6), _normal(7, 6)],
            {"labels": LABELS, "weights": WEIGHTS, "trainable_table": True},
        ),
        (
            "linear_log_probs",
            "soft cap, temperature",
            [_normal(5, 6), _normal(7, 6)],
            {"labels": LABELS, "trainable_table": True, "soft_cap": 2.0, "temperature": 0.7},
        ),
        *(
            ("linear_divergence", label, [_normal(5, 6)], {**TEACHER, "table": TABLE, **keywords})
            for label, keywords in (
                ("frozen table", {"soft_cap": 2.0, "temperature": 0.7}),
                ("frozen table, reverse_kl", {"kind": "reverse_kl", "weights": WEIGHTS}),
                ("frozen table, jsd", {"kind": "jsd", "beta": 0.3, "teacher_soft_cap": 3.0}),
            )
        ),
        *(
            (
                "linear_divergence",
                label,
                [_normal(5, 6), _normal(7, 6)],
                {**TEACHER, "trainable_table": True, **keywords},
            )
            for label, keywords in (
                ("trainable table", {}),
                ("trainable table, jsd", {"kind": "jsd", "soft_cap": 2.0, "weights": WEIGHTS}),
            )
        ),
        *(
            ("quantized_dense", label, [_normal(2, 5, 4)], {"mode": mode, "arrays": arrays})
            for label, mode, arrays in (
                ("8 bits", "int8", [_bytes("int8", 4, 3), SCALE]),
                ("4 bits", "int4", [_bytes("int8", 2, 3), STEPS, ZEROS]),
                ("4 bits of a table", "nf4", [_bytes("uint8", 2, 3), STEPS]),
                (
                    "4 bits of a table, scales in 8",
                    "fp4",
                    [_bytes("uint8", 2, 3), SCALES, NESTED, OFFSET],
                ),
                ("floats of 8 bits", "fp8", [FLOATS, STEPS]),
            )
        ),
        *(
            (
                "quantized_dense",
                f"{label}, groups",
                [_normal(6, 4)],
                {"mode": mode, "arrays": arrays, "sizes": np.array([2, 0, 4], "int32")},
            )
            for label, mode, arrays in (
                ("8 bits", "int8", [_bytes("int8", 3, 4, 3), np.stack([SCALE, SCALE / 2, SCALE])]),
                ("4 bits", "int4", [_bytes("int8", 3, 2, 3), GROUPS, np.stack([ZEROS] * 3)]),
                ("4 bits of a table", "nf4", [_bytes("uint8", 3, 2, 3), GROUPS]),
            )
        ),
    ]
    return calls


def large_cases() -> list[OpCase]:
    """Calls of attention in shapes that kernels are made for, which often decline smaller ones."""
    rng = np.random.default_rng(5)
    calls: list[OpCase] = []
    for label, groups, keywords in (
        ("128 tokens", 2, {}),
        ("128 tokens, causal", 2, {"causal": True}),
        ("128 tokens, causal, grouped", 1, {"causal": True}),
        ("128 tokens, causal, window", 2, {"causal": True, "window": 32}),
    ):
        shapes = ((1, 128, 2, 64), (1, 128, groups, 64), (1, 128, groups, 64))
        arrays = [rng.normal(size=shape).astype("float32") for shape in shapes]
        calls.append(("attention", label, arrays, keywords))
    return calls


# float16 (eps 1e-3): as many roundings as 2e-2 is in bfloat16 (eps 8e-3). float64 (eps 2e-16): a
# hundred times as many as 1e-5 is in float32, and far less than a single rounding to float32.
HALF_AND_DOUBLE = {"float16": 2.5e-3, "float64": 1e-12}

# Largest difference from the exact result, by op and dtype: absolute for values of order one, and
# relative to the largest for others. Gradients keep to the same.
TOLERANCES: dict[str, dict[str, float]] = {
    **{
        op: {"float32": 1e-5, "bfloat16": 2e-2, **HALF_AND_DOUBLE}
        for op in (
            *("attention", "layer_norm", "rms_norm", "rotary_embedding", "rotary_embedding_2d"),
            *("dense", "mlp", "grouped_dense", "quantized_dense", "patch_embedding"),
            *("linear_cross_entropy", "linear_log_probs", "linear_divergence"),
        )
    },
    **{
        op: {"float32": 1e-6, "bfloat16": 2e-2, **HALF_AND_DOUBLE}
        for op in ("gelu", "gated_gelu", "gated_silu")
    },
    "dropout": {"float32": 1e-6, "bfloat16": 1e-2},
}
