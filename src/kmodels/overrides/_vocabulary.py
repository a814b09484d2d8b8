"""A walk over a large vocabulary by tiles, for backends that trace: losses without all logits."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from kmodels.ops._wide import wide
from kmodels.ops.linear_cross_entropy import Scoring, tile_of


class Walked(NamedTuple):
    """The results of a walk over the vocabulary, for each position."""

    total: Any  # the log of the summed exponentials
    right: Any  # the score of the label
    top: Any  # the highest score
    entropy: Any  # None if not wanted
    # The derivatives by `hidden` (M, D), if wanted: of minus the log-probability, of the entropy.
    slopes: tuple[Any, ...]


class Tile(NamedTuple):
    """Some classes of the table, and the scores of all positions for them."""

    start: Any  # first class
    rows: Any  # (v, D)
    score: Any  # (M, v)
    slope: Any  # derivative of the capped logits by the uncapped ones; None without a cap
    local: Any  # label less the first class, (M,)
    column: Any  # the same within the tile, (M,)
    here: Any  # whether the tile holds the label, (M,)


class Vocabulary(ABC):
    """Hidden states (M, D), a table (V, D) and labels (M,) int32, with scores by tile.

    A backend reads parts of the table and multiplies them; products are float32 or wider.
    """

    def __init__(self, hidden: Any, table: Any, labels: Any, scoring: Scoring, accelerator: bool):
        self.hidden, self.table, self.labels, self.scoring = hidden, table, labels, scoring
        self.size = tile_of(table.shape[0], hidden.shape[0], accelerator)
        self.dtype = wide(hidden)

    @abstractmethod
    def rows(self, start: Any, count: int) -> Any:
        """Returns rows of the table."""

    @abstractmethod
    def rows_of_labels(self) -> Any:
        """Returns the row of each label, (M, D)."""

    @abstractmethod
    def product(self, a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False) -> Any:
        """Returns the product of two matrices in the dtype of the hidden states, in `dtype`."""

    @abstractmethod
    def repeat(self, count: int, body: Callable[[Any, Any], Any], state: Any) -> Any:
        """Repeats `state = body(index, state)`, one after the other."""

    @abstractmethod
    def put(self, table: Any, rows: Any, start: Any) -> Any:
        """Returns a table with some rows replaced."""

    @abstractmethod
    def pick(self, values: Any, column: Any) -> Any:
        """(M, v), (M,) -> (M,)."""

    def each_tile(self, step: Callable[[Tile, Any], Any], state: Any) -> Any:
        """Repeats state = step(tile, state) over the whole table."""
        whole = self.table.shape[0] // self.size

        def run(start: Any, count: int, state: Any) -> Any:
            rows, slope = ops.cast(self.rows(start, count), self.hidden.dtype), None
            score = self.product(self.hidden, rows, transpose_b=True)
            if (cap := self.scoring.soft_cap) is not None:
                score = ops.tanh(score / cap)
                score, slope = score * cap, 1 - score * score
            if self.scoring.temperature != 1:
                score = score / self.scoring.temperature
            local = self.labels - start
            column, here = ops.clip(local, 0, count - 1), (local >= 0) & (local < count)
            return step(Tile(start, rows, score, slope, local, column, here), state)

        state = self.repeat(whole, lambda i, s: run(i * self.size, self.size, s), state)
        if rest := self.table.shape[0] - whole * self.size:
            state = run(whole * self.size, rest, state)
        return state

    def walk(self, gradient: bool) -> Walked:
        """Goes through the vocabulary once, with a running maximum and sum."""
        dtype, with_entropy = self.dtype, self.scoring.with_entropy
        zeros = ops.zeros_like(self.hidden[:, 0], dtype=dtype)
        lowest = float(np.finfo(dtype).min)
        state: dict[str, Any] = {"total": zeros, "right": zeros, "top": zeros + lowest}
        # The sums of exponential x (score - top) and, as the second of the means, times the rows.
        if with_entropy:
            state["below_top"] = zeros
        if gradient:
            means = (ops.zeros_like(self.hidden, dtype=dtype),) * (1 + with_entropy)
            state |= {"means": means, "slope_right": zeros + 1}

        def step(tile: Tile, old: dict[str, Any]) -> dict[str, Any]:
            right = self.pick(tile.score, tile.column)
            new: dict[str, Any] = {"right": ops.where(tile.here, right, old["right"])}
            highest = ops.max(tile.score, axis=1, initial=lowest)  # without, Keras wants positions
            new["top"] = ops.maximum(old["top"], highest)
            moved = old["top"] - new["top"]
            decay, score = ops.exp(moved), tile.score - new["top"][:, None]
            shares = [ops.exp(score)]
            new["total"] = old["total"] * decay + ops.sum(shares[0], axis=1)
            if with_entropy:
                shares.append(shares[0] * score)
                before = old["below_top"] + moved * old["total"]
                new["below_top"] = before * decay + ops.sum(shares[1], axis=1)
            if gradient:
                means = list(old["means"])
                if with_entropy:
                    means[1] += moved[:, None] * means[0]
                new["slope_right"] = old["slope_right"]
                if tile.slope is not None:
                    own = self.pick(tile.slope, tile.column)
                    new["slope_right"] = ops.where(tile.here, own, old["slope_right"])
                    shares = [share * tile.slope for share in shares]
                narrow = (ops.cast(share, self.hidden.dtype) for share in shares)
                new["means"] = tuple(
                    mean * decay[:, None] + self.product(share, tile.rows)
                    for mean, share in zip(means, narrow, strict=True)
                )
            return new

        state = self.each_tile(step, state)
        log_total, entropy, below_top = ops.log(state["total"]), None, None
        if with_entropy:
            below_top = state["below_top"] / state["total"]
            entropy = log_total - below_top
        slopes: list[Any] = []
        if gradient:
            means = [mean / state["total"][:, None] for mean in state["means"]]
            own = ops.cast(self.rows_of_labels(), dtype) * state["slope_right"][:, None]
            slopes = [means[0] - own]
            if below_top is not None:
                slopes.append(means[0] * below_top[:, None] - means[1])
            if self.scoring.temperature != 1:
                slopes = [slope / self.scoring.temperature for slope in slopes]
        total = log_total + state["top"]
        return Walked(total, state["right"], state["top"], entropy, tuple(slopes))

    def gradients(self, for_loss: Any, for_entropy: Any, walked: Walked) -> tuple[Any, Any]:
        """Returns the gradients of `hidden` and `table`; the scores of each tile are recomputed.

        Those of minus the log-probabilities and of the entropies, or None, are (M,).
        """

        def step(tile: Tile, old: tuple[Any, Any]) -> Any:
            own = ops.one_hot(tile.local, tile.rows.shape[0], dtype=self.dtype)
            log_share = tile.score - walked.total[:, None]
            share = ops.exp(log_share)
            score = (share - own) * for_loss[:, None]
            if for_entropy is not None:
                score -= share * (log_share + walked.entropy[:, None]) * for_entropy[:, None]
            if self.scoring.temperature != 1:
                score = score / self.scoring.temperature
            score = score if tile.slope is None else score * tile.slope
            score = ops.cast(score, self.hidden.dtype)
            rows = ops.cast(self.product(score, self.hidden, transpose_a=True), self.table.dtype)
            return old[0] + self.product(score, tile.rows), self.put(old[1], rows, tile.start)

        state = ops.zeros_like(self.hidden, dtype=self.dtype), ops.zeros_like(self.table)
        for_hidden, for_table = self.each_tile(step, state)
        return ops.cast(for_hidden, self.hidden.dtype), for_table
