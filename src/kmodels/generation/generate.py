"""The loop over tokens and the loop over drafts, the same on every backend."""

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import keras
import numpy as np
from keras import ops

from kmodels.core import traced
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.generation.drafters import Drafter
from kmodels.generation.sampler import Sampler
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

        They are written over what stood there. A row may start up to `ahead` tokens before the
        farthest one that came in.
        """
        ...

    def reorder(self, order: np.ndarray) -> None:
        """Lets row i continue from what row `order[i]` holds."""
        ...

    def finish(self) -> None:
        """Frees the cache where that is not kept for the next prompts."""
        ...


class LoopBackend(Protocol):
    """Generation on one backend."""

    def Loop(
        self,
        backbone: keras.Model,
        sampler: Sampler,
        batch: int,
        prompt: int,
        slots: int,
        jit_compile: bool | str = "auto",
        ahead: int = 0,
    ) -> Loop:
        """Makes the steps for `batch` prompts padded to `prompt` and texts of up to `slots`.

        With `ahead`, the largest number of drafts that `extend` may take back, the steps are
        `start` and `extend`; without, `start` and `step`.
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
    rows = [list(map(int, prompt)) for prompt in prompts]
    check_prompts(rows)
    limits = [max_length] * len(rows) if isinstance(max_length, int) else list(max_length)
    steps = max((limit - len(row) for limit, row in zip(limits, rows, strict=True)), default=0)
    if steps < 1:
        return rows
    loop, token_ids, lengths = opened(backbone, rows, steps, sampler, jit_compile, loops)
    stream = sampler.stream()
    open_rows = {row for row in range(len(rows)) if len(rows[row]) < limits[row]}
    try:
        tokens = loop.start(token_ids, lengths, _draws(stream, len(rows)), images)
        for step in range(steps):
            # The next step is under way while the host looks at the tokens of this one.
            following = None
            if step + 1 < steps:
                following = loop.step(step, tokens, _draws(stream, len(rows)))  # type: ignore[arg-type]
            for row, token in enumerate(keras.ops.convert_to_numpy(tokens).tolist()):
                if row not in open_rows:
                    continue
                rows[row].append(token)
                if on_token is not None:
                    on_token(row, token)
                if len(rows[row]) >= limits[row] or ended(stop, rows[row][lengths[row] :]):
                    open_rows.discard(row)
            if not open_rows:
                break
            tokens = following
    finally:
        loop.finish()
    return rows


def check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    """Raises `InputError` for a prompt without tokens."""
    if empty := [row for row, prompt in enumerate(prompts) if not len(prompt)]:
        raise InputError(f"prompt {empty[0]} is empty; give at least one token to begin with")


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
    for held, row in zip(token_ids, rows, strict=True):
        held[: len(row)] = row
    slots = prompt + bucket(steps + ahead)
    loop = _loop(backbone, (sampler, len(rows), prompt, slots, jit_compile, ahead), loops)
    return loop, token_ids, lengths


def _draws(stream: np.random.Generator, rows: int) -> np.ndarray:
    return stream.random(rows, "float32")


def _loop(
    backbone: keras.Model, settings: tuple[Any, ...], loops: MutableMapping[Any, Any] | None
) -> Loop:
    engine = backend_module("kmodels.generation.loop", LoopBackend)
    if type(settings[0]) is Sampler:  # The numbers that are drawn come from the host.
        settings = (replace(settings[0], seed=None), *settings[1:])
    if loops is None:
        return engine.Loop(backbone, *settings)
    key = (*settings, traced.TracedState(backbone))
    if key not in loops:
        while len(loops) >= KEPT:
            del loops[next(iter(loops))]
        loops[key] = engine.Loop(backbone, *settings)
    return loops[key]


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
