"""The loops over tokens, the same on every backend: one token per row, and beam search.

Beam search is that of transformers: the device ranks tokens, the host keeps the beams.
"""

import math
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import keras
import numpy as np

from kmodels.core import traced
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError, human, pluralize
from kmodels.core.runtime import available_bytes, width_of
from kmodels.core.types import Tensor
from kmodels.generation.cache import Passes, ring_shapes
from kmodels.generation.request import repeated
from kmodels.generation.sampler import Sampler
from kmodels.generation.samplers import BeamSampler
from kmodels.generation.stop import ended

# Compiled shapes that a model keeps; on TensorFlow each holds its own cache.
KEPT = 4
SMALLEST, STRIDE = 16, 256
# Token ids on the device, (B,) int, as one step gives them to the next.
Tokens: TypeAlias = Tensor


class Loop(Protocol):
    """The steps of one batch shape on one backend."""

    def start(
        self,
        token_ids: np.ndarray,
        lengths: np.ndarray,
        draws: np.ndarray,
        images: Mapping[str, np.ndarray] | None = None,
    ) -> Tokens:
        """Takes in prompts (B, P) int32, their lengths (B,), draws (B,); returns first tokens.

        The images of the prompts go by the names of the model's inputs.
        """
        ...

    def step(self, index: int, tokens: Tokens, draws: np.ndarray) -> Tokens:
        """Takes in token `index` of each row; returns the next ones."""
        ...

    def extend(self, tokens: Tensor, starts: np.ndarray, draws: np.ndarray) -> Tokens:
        """Takes in (B, T) tokens from position `starts` (B,) on; returns the one behind each.

        They replace the tokens at these positions. A row may start up to `ahead` tokens before the
        farthest one that came in.
        """
        ...

    def reorder(self, order: np.ndarray) -> None:
        """Replaces the cache of row i by that of row `order[i]`."""
        ...

    def finish(self) -> None:
        """Frees the cache, unless the backend keeps it for the next prompts."""
        ...


class LoopBackend(Protocol):
    """Generation on one backend."""

    def Loop(self, passes: Passes, jit_compile: bool | str = "auto") -> Loop:
        """Makes the steps of these passes: `start`, and `extend` if they are `ahead`, else `step`.

        `jit_compile` is as in `Generates.use_sampler`.
        """
        ...


def bucket(length: int) -> int:
    """Returns a length that many share: powers of two from 16 to 256, then multiples of 256."""
    if length >= STRIDE:
        return -(-length // STRIDE) * STRIDE
    return max(SMALLEST, 1 << (length - 1).bit_length())


def continue_prompts(
    backbone: keras.Model,
    prompts: Sequence[Sequence[int]],
    *,
    max_length: int | Sequence[int],
    sampler: Sampler,
    stop: Collection[int] = (),
    on_token: Callable[[int, int], None] | None = None,
    jit_compile: bool | str = "auto",
    loops: MutableMapping[Any, Any] | None = None,
    images: Mapping[str, np.ndarray] | None = None,
) -> list[list[int]]:
    """Continues prompts of any lengths in one batch.

    Args:
        backbone: with `extend`, `cache_shapes`, `cache_windows`, `cache_numbers` and
            `token_embedding.logits`.
        prompts: token ids, at least one each.
        max_length: length of prompt and continuation together; one for all, or one for each.
        sampler: chooses the tokens.
        stop: ids that end a row, which are part of it, or a `Stop`.
        on_token: called with (row, token id) as tokens come.
        jit_compile: as in `Generates.use_sampler`.
        loops: keeps compiled steps from call to call.
        images: arrays of the images of each prompt, by the names of the model's inputs.

    Returns:
        The prompts with their continuations.

    Raises:
        InputError: for an empty prompt.
    """
    limits = [max_length] * len(prompts) if isinstance(max_length, int) else max_length
    rows = Rows(prompts, limits, stop, on_token)
    check_prompts(rows.texts)
    if not rows.open:
        return rows.texts
    steps, count = rows.longest(), len(rows.texts)
    loop, token_ids, lengths = opened(backbone, rows.texts, steps, sampler, jit_compile, loops)
    stream = sampler.stream()
    try:
        tokens = loop.start(token_ids, lengths, stream.random(count, "float32"), images)
        for step in range(steps):
            # The next step is under way while the host looks at the tokens of this one.
            following: Any = None
            if step + 1 < steps:
                following = loop.step(step, tokens, stream.random(count, "float32"))
            rows.add(keras.ops.convert_to_numpy(tokens)[:, None])
            if not rows.open:
                break
            tokens = following
    finally:
        loop.finish()
    return rows.texts


class Rows:
    """Texts that grow, each until its limit or a token that ends it.

    Attributes:
        texts: token ids of each text, the prompt included.
        open: numbers of the texts that are not at their end.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        stop: Collection[int],
        on_token: Callable[[int, int], None] | None,
    ):
        self.texts = [list(map(int, prompt)) for prompt in prompts]
        self.starts = [len(text) for text in self.texts]
        self.limits, self.stop, self.on_token = limits, stop, on_token
        self.open = [row for row, text in enumerate(self.texts) if len(text) < limits[row]]

    def longest(self) -> int:
        """Returns the largest number of tokens that a text may still get."""
        return max(self.limits[row] - len(self.texts[row]) for row in self.open)

    def lengths(self) -> np.ndarray:
        """Returns the number of tokens of each text, (B,) int32."""
        return np.array([len(text) for text in self.texts], "int32")

    def add(self, choices: np.ndarray, drafts: np.ndarray | None = None) -> int:
        """Appends to each open text the tokens up to the first that was not drafted.

        The choices (B, n + 1) are behind the text and behind each of its drafts (B, n), which None
        leaves out. Returns the number of drafts that became tokens.
        """
        accepted = 0
        for row in self.open:
            ahead = [] if drafts is None else drafts[row].tolist()
            for token, draft in zip(choices[row].tolist(), [*ahead, None], strict=True):
                self.texts[row].append(token)
                accepted += token == draft
                if self.on_token is not None:
                    self.on_token(row, token)
                if token != draft or self._ended(row):
                    break
        self.open = [row for row in self.open if not self._ended(row)]
        return accepted

    def _ended(self, row: int) -> bool:
        text = self.texts[row]
        return len(text) >= self.limits[row] or ended(self.stop, text[self.starts[row] :])


def check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    """Raises `InputError` for a prompt without tokens."""
    if empty := [row for row, prompt in enumerate(prompts) if not len(prompt)]:
        raise InputError(f"prompt {empty[0]} is empty; give at least one token to begin with")


def check_memory(shapes: Sequence[Sequence[int]], dtype: str, rows: int, tokens: int) -> None:
    """Raises `InputError` for a KV cache that exceeds the free memory."""
    size = sum(map(math.prod, shapes)) * width_of(dtype)
    free = None if keras.distribution.distribution() else available_bytes()  # A mesh splits it.
    if free is not None and size > free:
        raise InputError(
            f"the KV cache of {pluralize(rows, 'text')} of {tokens:,} tokens takes {human(size)}, "
            f"and {human(free)} of memory are free; give a smaller max_length or max_new_tokens, "
            "or fewer texts at a time"
        )


def opened(
    backbone: keras.Model,
    rows: Sequence[Sequence[int]],
    steps: int,
    sampler: Sampler,
    jit_compile: bool | str,
    loops: MutableMapping[Any, Any] | None,
    ahead: int = 0,
) -> tuple[Loop, np.ndarray, np.ndarray]:
    """Returns the loop for these prompts, and the token ids and lengths for its `start`."""
    lengths = np.array([len(row) for row in rows], "int32")
    prompt = bucket(int(lengths.max()))
    token_ids = np.zeros((len(rows), prompt), "int32")
    for padded, row in zip(token_ids, rows, strict=True):
        padded[: len(row)] = row
    slots = prompt + bucket(steps + ahead)
    if type(sampler) is Sampler:  # The numbers that are drawn come from the host.
        sampler = replace(sampler, seed=None)
    loops = {} if loops is None else loops
    key = sampler, len(rows), prompt, slots, jit_compile, ahead, traced.TracedState(backbone)
    if key not in loops:
        while len(loops) >= KEPT:
            del loops[next(iter(loops))]
        shapes = ring_shapes(backbone, len(rows), slots, ahead)
        check_memory(shapes, backbone.compute_dtype, len(rows), slots)
        engine = backend_module("kmodels.generation.loop", LoopBackend)
        passes = Passes(backbone, sampler, len(rows), prompt, slots, ahead)
        loops[key] = engine.Loop(passes, jit_compile)
    return loops[key], token_ids, lengths


# === Beam search ===

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
        scores = (self.likely[:, None] + values).reshape(-1)
        best = np.argsort(-scores, kind="stable")
        texts, likely, source = [], [], []
        for rank, place in enumerate(best.tolist()):
            beam, token = place // count, int(tokens[place // count, place % count])
            text = [*self.texts[beam], token]
            if ended(stop, text):
                if rank < self.beams:
                    self._end(float(scores[place]), text)
                continue
            texts.append(text)
            likely.append(scores[place])
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
    """Returns the prompts with their `count` most likely continuations by beam search, best first.

    Other arguments are those of `continue_prompts`.
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
            candidates = loop.start(token_ids, lengths, draws, pictures)
            for step in range(steps):
                order, tokens = _continued(searches, candidates, stop)
                if step + 1 == steps or not any(search.open for search in searches):
                    break
                if (order != np.arange(len(rows))).any():
                    loop.reorder(order)
                candidates = loop.step(step, keras.ops.convert_to_tensor(tokens), draws)
        finally:
            loop.finish()
    return [search.prompt + text for search in searches for _, text in search.ended[:count]]


def _continued(
    searches: list[_Search], candidates: Any, stop: Collection[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Lets every search continue; (rows,) int32 that each row continues from, and its token."""
    beams = searches[0].beams
    values, ranked = (np.asarray(keras.ops.convert_to_numpy(x)) for x in candidates)
    order = np.arange(len(searches) * beams, dtype="int32")
    tokens = np.zeros(len(order), "int32")
    for number, search in enumerate(searches):
        if search.open:
            own = slice(number * beams, (number + 1) * beams)
            source, tokens[own] = search.go_on(values[own].astype("float64"), ranked[own], stop)
            order[own] = np.array(source) + number * beams
    return order, tokens
