"""Random numbers that depend on their purpose, never on when they are drawn.

All are read from the raw stream of NumPy's Philox generator, whose values are fixed by its
paper (Salmon et al. 2011). NumPy may change functions on top of a stream (`permutation`, `beta`)
between versions, so they are not used: runs can be repeated later.
"""

import hashlib

import numpy as np

_TO_UNIT = 2.0**-53


def philox(seed: int, *purpose: object) -> np.random.Philox:
    """Returns the stream of one seed and one purpose, such as ("order", epoch)."""
    text = "/".join(map(str, (seed, *purpose)))
    digest = hashlib.sha256(text.encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little"))


def order(n: int, seed: int, epoch: int) -> np.ndarray:
    """Returns a permutation of 0..n-1, int64 (n,), as a pure function of the arguments."""
    return np.argsort(philox(seed, "order", epoch).random_raw(n), kind="stable")


def uniforms(seed: int, purpose: str, epoch: int, keys: np.ndarray, count: int) -> np.ndarray:
    """Returns numbers in [0, 1), float64 (B, count); row i depends on keys[i] alone.

    Keys are int (B,), for example sample numbers; `purpose` separates streams, such as "crop".
    """
    bits = philox(seed, purpose, epoch)
    state = bits.state
    raw = np.empty((len(keys), count), np.uint64)
    for row, key in enumerate(np.asarray(keys).tolist()):
        # The counter's second word is the key, so that streams of two keys never meet. Setting the
        # state costs 2 microseconds; making a generator for each key costs 13.
        state["state"]["counter"][:] = (0, key, 0, 0)
        state["buffer_pos"] = 4
        bits.state = state
        raw[row] = bits.random_raw(count)
    return (raw >> np.uint64(11)) * _TO_UNIT


def symmetric_beta(uniform: np.ndarray, alpha: float) -> np.ndarray:
    """Draws Beta(alpha, alpha) numbers by inverting its distribution function numerically.

    `uniform` is in [0, 1), of any shape; the result is float64 in [0, 1] of this shape.
    """
    if alpha == 1.0:
        return uniform
    # With x = sin(t)^2 the density in t is sin(t)^(2a-1) cos(t)^(2a-1): for small alpha its poles
    # at the ends are integrable on a midpoint grid that is dense there.
    edges = np.linspace(0.0, 1.0, 4097) ** 4 / 2
    edges = np.concatenate([edges, 1.0 - edges[-2::-1]]) * (np.pi / 2)
    middle = (edges[1:] + edges[:-1]) / 2
    density = (np.sin(middle) * np.cos(middle)) ** (2 * alpha - 1)
    total = np.concatenate([[0.0], np.cumsum(density * np.diff(edges))])
    return np.sin(np.interp(uniform, total / total[-1], edges)) ** 2
