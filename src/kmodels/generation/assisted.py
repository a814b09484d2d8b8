"""The loop over drafts: the model checks several tokens in one pass, and keeps what it chooses.

The token at each place is chosen by the sampler from the model's own logits, with the number that
the loop without drafts draws for it. A draft is accepted if it is that token. So the text is the
one without drafts, whatever the sampler, and drafts alter only the number of passes.
"""

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from kmodels.core.types import Tensor
from kmodels.generation.drafters import Drafter
from kmodels.generation.generate import check_prompts, opened
from kmodels.generation.sampler import Sampler
from kmodels.generation.stop import ended


@dataclass
class DraftCounts:
    """Counts of a call of `generate` with drafts; of several batches, those of the last one.

    Attributes:
        passes: passes of the model, each over all rows; the one over the prompts is one.
        tokens: new tokens of all rows.
        drafted: drafts of all rows that the model checked.
        accepted: drafts that became tokens.
    """

    passes: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


class _Rows:
    """Texts that grow, each until its limit or a token that ends it."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        stop: Collection[int],
        on_token: Callable[[int, int], None] | None,
    ):
        self.texts = [list(map(int, prompt)) for prompt in prompts]
        self.starts = [len(text) for text in self.texts]
        self.limits = limits
        self.stop = stop
        self.on_token = on_token
        self.open = [row for row, text in enumerate(self.texts) if len(text) < limits[row]]

    def lengths(self) -> np.ndarray:
        return np.array([len(text) for text in self.texts], "int32")

    def add(self, chosen: np.ndarray, drafts: np.ndarray, counts: DraftCounts) -> None:
        """Appends to each open row the tokens up to the first that was not drafted.

        Args:
            chosen: (B, n + 1) int, the tokens that the model chooses behind each draft before.
            drafts: (B, n) int.
            counts: of tokens and drafts, which grow.
        """
        counts.passes += 1
        for row in self.open:
            counts.drafted += drafts.shape[1]
            ahead = [*drafts[row].tolist(), None]
            for token, draft in zip(chosen[row].tolist(), ahead, strict=True):
                self.texts[row].append(token)
                counts.tokens += 1
                counts.accepted += token == draft
                if self.on_token is not None:
                    self.on_token(row, token)
                if token != draft or self._ended(row):
                    break
        self.open = [row for row in self.open if not self._ended(row)]

    def _ended(self, row: int) -> bool:
        text = self.texts[row]
        return len(text) >= self.limits[row] or ended(self.stop, text[self.starts[row] :])


def continue_with_drafts(
    backbone: keras.Model,
    prompts: Sequence[Sequence[int]],
    *,
    limits: Sequence[int],
    sampler: Sampler,
    drafter: Drafter,
    stop: Collection[int] = (),
    on_token: Callable[[int, int], None] | None = None,
    jit_compile: bool | str = "auto",
    loops: MutableMapping[Any, Any] | None = None,
    images: Mapping[str, np.ndarray] | None = None,
) -> tuple[list[list[int]], DraftCounts]:
    """Continues prompts as `continue_prompts` does, in fewer passes of the model.

    Args:
        backbone: as of `continue_prompts`.
        prompts: token ids, at least one each.
        limits: limits of each prompt and its continuation together.
        sampler: chooses the tokens.
        drafter: proposes them.
        stop: ids that end a row; they are part of it.
        on_token: called with (row, token id) as tokens come.
        jit_compile: as of `continue_prompts`.
        loops: as there.
        images: as there; the drafter has none.

    Returns:
        The prompts with their continuations, and what was counted.

    Raises:
        InputError: for an empty prompt.
    """
    check_prompts(prompts)
    rows, counts = _Rows(prompts, limits, stop, on_token), DraftCounts()
    if not rows.open:
        return rows.texts, counts
    lengths = rows.lengths()
    steps, ahead = int(max(np.array(limits) - lengths)), drafter.count
    settings = sampler, jit_compile, loops, ahead
    loop, token_ids, _ = opened(backbone, rows.texts, steps, *settings)
    # In the order in which the loop without drafts draws; drafts look beyond the last token.
    draws = sampler.stream().random((steps + ahead + 1, len(prompts)), "float32")
    every = np.arange(len(prompts))[:, None]
    try:
        first = loop.start(token_ids, lengths, draws[0], images)
        rows.add(_numpy(first)[:, None], np.zeros((len(prompts), 0), "int32"), counts)
        if rows.open:
            drafter.start([list(map(int, prompt)) for prompt in prompts], steps, sampler)
        while rows.open:
            places = (rows.lengths() - lengths)[:, None] + np.arange(ahead + 1)
            numbers = draws[places, every]
            drafts = drafter.draft(rows.texts, numbers)
            last = np.array([[text[-1]] for text in rows.texts], "int32")
            tokens = ops.concatenate([last, drafts], axis=1)
            numbers = numbers[:, : tokens.shape[1]]
            chosen = loop.extend(tokens, rows.lengths() - 1, numbers)
            rows.add(_numpy(chosen), _numpy(drafts), counts)
    finally:
        drafter.finish()
        loop.finish()
    return rows.texts, counts


def _numpy(x: Tensor) -> np.ndarray:
    return np.asarray(ops.convert_to_numpy(x))
