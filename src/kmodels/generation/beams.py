"""Beam search as transformers does it: the device ranks tokens, the host keeps the beams."""

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from kmodels.generation.generate import opened
from kmodels.generation.request import repeated
from kmodels.generation.samplers import BeamSampler
from kmodels.generation.stop import ended

# Log probability of a beam that is none yet.
NONE = -1e9


@dataclass
class _Search:
    """The beams of one prompt."""

    prompt: list[int]
    limit: int
    beams: int
    penalty: float
    texts: list[list[int]] = field(default_factory=list)
    likely: np.ndarray = field(default_factory=lambda: np.zeros(0))
    ended: list[tuple[float, list[int]]] = field(default_factory=list)
    open: bool = True

    def __post_init__(self) -> None:
        self.texts = [[] for _ in range(self.beams)]
        self.likely = np.array([0.0] + [NONE] * (self.beams - 1))
        self.open = len(self.prompt) < self.limit
        if not self.open:
            self.ended = [(0.0, [])] * self.beams

    def go_on(
        self, values: np.ndarray, tokens: np.ndarray, stop: Collection[int]
    ) -> tuple[list[int], list[int]]:
        """Takes (beams, K) log probabilities and tokens; returns which beam each continues from."""
        count = tokens.shape[1]
        found = (self.likely[:, None] + values).reshape(-1)
        best = np.argsort(-found, kind="stable")
        texts, likely, source = [], [], []
        for rank, place in enumerate(best.tolist()):
            beam, token = place // count, int(tokens[place // count, place % count])
            text = [*self.texts[beam], token]
            if ended(stop, text):
                if rank < self.beams:
                    self._end(float(found[place]), text)
                continue
            texts.append(text)
            likely.append(found[place])
            source.append(beam)
            if len(texts) == self.beams:
                break
        self.texts, self.likely = texts, np.array(likely)
        length = len(texts[0])
        if len(self.ended) >= self.beams:
            possible = float(likely[0]) / length**self.penalty
            self.open = self.ended[-1][0] < possible
        if self.open and len(self.prompt) + length >= self.limit:
            for score, text in zip(self.likely, texts, strict=True):
                self._end(float(score), text)
            self.open = False
        return source, [text[-1] for text in texts]

    def _end(self, score: float, text: list[int]) -> None:
        self.ended.append((score / len(text) ** self.penalty, text))
        self.ended = sorted(self.ended, key=lambda entry: -entry[0])[: self.beams]


def continue_by_beams(
    backbone: keras.Model,
    prompts: Sequence[Sequence[int]],
    *,
    limits: Sequence[int],
    sampler: BeamSampler,
    count: int = 1,
    stop: Collection[int] = (),
    jit_compile: bool | str = "auto",
    loops: MutableMapping[Any, Any] | None = None,
    images: Mapping[str, np.ndarray] | None = None,
) -> list[list[int]]:
    """Returns the most likely continuations that beam search finds.

    Args:
        backbone: as of `continue_prompts`.
        prompts: token ids, at least one each.
        limits: limits of each prompt and its continuation together.
        sampler: says how many beams.
        count: texts of each prompt, best first.
        stop: ids that end a text; they are part of it.
        jit_compile: as of `continue_prompts`.
        loops: as there.
        images: as there.

    Returns:
        The prompts with their continuations, `count` for each.
    """
    beams = sampler.num_beams
    searches = [
        _Search(list(map(int, prompt)), limit, beams, sampler.length_penalty)
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    steps = max(search.limit - len(search.prompt) for search in searches)
    if steps >= 1:
        rows = [search.prompt for search in searches for _ in range(beams)]
        settings = (steps, sampler, jit_compile, loops)
        loop, token_ids, lengths = opened(backbone, rows, *settings)
        draws = np.zeros(len(rows), "float32")
        try:
            pictures = None if images is None else repeated(images, beams)
            found = loop.start(token_ids, lengths, draws, pictures)
            for step in range(steps):
                order, tokens = _chosen(searches, found, stop)
                if step + 1 == steps or not any(search.open for search in searches):
                    break
                if (order != np.arange(len(rows))).any():
                    loop.reorder(order)
                found = loop.step(step, keras.ops.convert_to_tensor(tokens), draws)
        finally:
            loop.finish()
    return [search.prompt + text for search in searches for _, text in search.ended[:count]]


def _chosen(
    searches: list[_Search], found: Any, stop: Collection[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Lets every search continue; (rows,) int32 that each row continues from, and its token."""
    beams = searches[0].beams
    values, ranked = (np.asarray(keras.ops.convert_to_numpy(x)) for x in found)
    order = np.arange(len(searches) * beams, dtype="int32")
    tokens = np.zeros(len(order), "int32")
    for number, search in enumerate(searches):
        if search.open:
            own = slice(number * beams, (number + 1) * beams)
            source, tokens[own] = search.go_on(values[own].astype("float64"), ranked[own], stop)
            order[own] = np.array(source) + number * beams
    return order, tokens
