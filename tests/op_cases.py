"""Inputs and NumPy float64 references of the ops, shared by the tests of both bodies."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    name: str
    shapes: tuple[tuple[int, ...], ...]
    keywords: dict[str, Any] = field(default_factory=dict)
    mask: str | None = None


T, S, H = 5, 7, 8
FULL = ((2, T, 4, H), (2, S, 4, H), (2, S, 4, H))
GROUPED = ((2, T, 4, H), (2, S, 2, H), (2, S, 2, H))
ONE = ((2, 1, 4, H), (2, S, 2, H), (2, S, 2, H))
SQUARE = ((2, S, 4, H), (2, S, 4, H), (2, S, 4, H))

# Texts of a packed row, of which the last is padding, and one row that is a single text.
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1]], "int32")
# Two images inside a text, and a text alone.
BLOCKS = np.array([[-1, 0, 0, 0, -1, 1, 1], [-1, -1, -1, -1, -1, -1, -1]], "int32")

ATTENTION = (
    Case("plain", FULL),
    Case("scale", FULL, {"scale": 0.7}),
    Case("causal", SQUARE, {"causal": True}),
    Case("causal, more keys", FULL, {"causal": True}),
    Case("window", SQUARE, {"window": 2}),
    Case("causal window, grouped", GROUPED, {"causal": True, "window": 3}),
    Case("mask with an empty row", FULL, mask="pairs"),
    Case("mask of keys, grouped, causal", GROUPED, {"causal": True}, mask="keys"),
    Case("mask per head, grouped", GROUPED, mask="pairs"),
    Case("one query, grouped, causal", ONE, {"causal": True, "scale": 0.3}),
    Case("one query, causal window", ONE, {"causal": True, "window": 3}),
    Case("one query, mask of keys", ONE, mask="keys"),
    Case("one query, mask per head", ONE, mask="pairs"),
    Case("segments", FULL, {"segment_ids": SEGMENTS}),
    Case("segments, causal", SQUARE, {"causal": True, "segment_ids": SEGMENTS}),
    Case(
        "segments, mask, window, grouped",
        GROUPED,
        {"causal": True, "window": 3, "segment_ids": SEGMENTS},
        mask="pairs",
    ),
    Case("segments of all rows", FULL, {"causal": True, "segment_ids": SEGMENTS[:1]}),
    Case("one query, segments", ONE, {"causal": True, "segment_ids": 3 - SEGMENTS // 2}),
    Case("blocks", SQUARE, {"causal": True, "block_ids": BLOCKS}),
    Case("blocks, window, grouped", GROUPED, {"causal": True, "window": 2, "block_ids": BLOCKS}),
    Case(
        "blocks, segments, mask",
        GROUPED,
        {"causal": True, "segment_ids": SEGMENTS, "block_ids": BLOCKS[:1]},
        mask="keys",
    ),
    Case("soft cap", GROUPED, {"soft_cap": 0.5, "causal": True}),
)


def arrays(case: Case) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.normal(size=shape).astype("float32") for shape in case.shapes]


def mask(case: Case) -> np.ndarray | None:
    """`pairs`: (B, N, T, S), one query sees nothing; `keys`: (B, 1, 1, S), one row all padding."""
    (batch, length, heads, _), keys = case.shapes[0], case.shapes[1][1]
    rng = np.random.default_rng(4)
    if case.mask == "pairs":
        found = rng.random((batch, heads, length, keys)) > 0.4
        found[0, :, length // 2] = False
        return found
    if case.mask == "keys":
        found = rng.random((batch, 1, 1, keys)) > 0.4
        found[1] = False
        return found
    return None


def reference_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    mask: np.ndarray | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    segment_ids: np.ndarray | None = None,
    block_ids: np.ndarray | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> np.ndarray:
    """The definition, pair by pair in float64."""
    query, key, value = (x.astype("float64") for x in (query, key, value))
    batch, length, heads, head_dim = query.shape
    keys, groups = key.shape[1:3]
    allowed = np.ones((batch, heads, length, keys), bool)
    if mask is not None:
        allowed &= np.broadcast_to(mask, allowed.shape)
    output = np.zeros((batch, length, heads, value.shape[-1]))
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    for b, i, n in np.ndindex(batch, length, heads):
        g = n // (heads // groups)
        position = i + keys - length
        seen, scores = [], []
        for j in range(keys):
            inside = False
            if block_ids is not None:
                blocks = block_ids[b % len(block_ids)]
                inside = blocks[j] == blocks[position] and blocks[j] >= 0
            if not allowed[b, n, i, j] or (causal and j > position and not inside):
                continue
            behind = position - j if causal else abs(position - j)
            if window is not None and behind >= window:
                continue
            if segment_ids is not None:
                segments = segment_ids[b % len(segment_ids)]
                if segments[j] != segments[position]:
                    continue
            score = scale * float(query[b, i, n] @ key[b, j, g])
            seen.append(j)
            scores.append(score if soft_cap is None else soft_cap * math.tanh(score / soft_cap))
        if seen:
            weights = np.exp(np.array(scores) - max(scores))
            output[b, i, n] = weights / weights.sum() @ value[b, seen, g]
    return output


def reference_layer_norm(
    x: np.ndarray, scale: np.ndarray, bias: np.ndarray | None, epsilon: float
) -> np.ndarray:
    x = x.astype("float64")
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon) * scale
    return y if bias is None else y + bias


def reference_patch_embedding(
    images: np.ndarray, kernel: np.ndarray, bias: np.ndarray, patch: int
) -> np.ndarray:
    batch, height, width, _ = images.shape
    tokens = [
        images[:, r : r + patch, c : c + patch].reshape(batch, -1).astype("float64") @ kernel + bias
        for r in range(0, height, patch)
        for c in range(0, width, patch)
    ]
    return np.stack(tokens, axis=1)


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
    found = [
        (
            "attention",
            case.name,
            arrays(case),
            case.keywords | ({"mask": mask(case)} if case.mask else {}),
        )
        for case in ATTENTION
    ]
    found += [
        ("layer_norm", "with bias", [normal(2, 5, 12) + 3, normal(12), normal(12)], {}),
        ("layer_norm", "four axes", [normal(2, 3, 4, 12) + 3, normal(12), normal(12)], {}),
        ("layer_norm", "no bias", [normal(3, 12), normal(12)], {"epsilon": 0.1}),
        ("rms_norm", "three axes", [normal(2, 5, 12) * 3, normal(12)], {"epsilon": 0.01}),
        ("rms_norm", "plain scale", [normal(2, 5, 12) * 3, normal(12)], {"offset": 0.0}),
        ("rms_norm", "no scale", [normal(2, 5, 12) * 3], {"scale": None}),
        ("gelu", "three axes", [normal(2, 5, 12) * 2], {}),
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
