"""Drafts: a small model, or the text itself, proposes tokens, and the model checks several."""

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard
from weakref import WeakKeyDictionary

import keras
import numpy as np
from keras import ops

from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Tensor
from kmodels.generation.generate import Rows, opened
from kmodels.generation.sampler import Sampler
from kmodels.text import Tokenizer
from kmodels.weights import gather

# Tokens of an assistant between two passes of the model.
ASSISTANT_TOKENS = 5
# The longest n-gram that is looked up; then shorter ones are.
LONGEST = 3
_vocabularies: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class Generating(Protocol):
    """A task that generates, see `kmodels.generation.task.Generates`."""

    backbone: Any
    preprocessor: Any
    generator: Any


class Drafter(Protocol):
    """Proposes tokens.

    Attributes:
        count: largest number of tokens that it proposes.
    """

    count: int

    def start(self, rows: Sequence[list[int]], steps: int, sampler: Sampler) -> None:
        """Takes in prompts, which get up to `steps` tokens that the sampler chooses."""
        ...

    def draft(self, rows: Sequence[list[int]], draws: np.ndarray) -> Any:
        """Returns tokens behind the rows, (B, n) int32; n is `count`, or 0 for none.

        Each row has a token behind its prompt unless it has ended; the model chooses these tokens
        by the draws (B, count + 1) float32.
        """
        ...

    def finish(self) -> None:
        """Frees the cache of these rows."""
        ...


class AssistantDrafter:
    """Drafts of a smaller model, which chooses by the same sampler and the same draws.

    `vocabulary` is the number of rows of the embedding table of the model that checks.
    """

    def __init__(self, assistant: Generating, count: int, vocabulary: int):
        self.assistant = assistant
        self.count = count
        self.vocabulary = vocabulary
        self.loop: Any = None

    def start(self, rows: Sequence[list[int]], steps: int, sampler: Sampler) -> None:
        """See `Drafter`."""
        backbone, generator = self.assistant.backbone, self.assistant.generator
        self.last = backbone.config.vocabulary_size - 1
        settings = sampler, generator.jit_compile, generator.draft_loops, self.count
        self.loop, token_ids, lengths = opened(backbone, rows, steps, *settings)
        self.loop.start(np.minimum(token_ids, self.last), lengths, np.zeros(len(rows), "float32"))

    def draft(self, rows: Sequence[list[int]], draws: np.ndarray) -> Any:
        """See `Drafter`."""
        # The last draft that was accepted has not come in yet, so two tokens do; the first of them
        # comes in again where it has.
        starts = np.array([max(len(row) - 2, 0) for row in rows], "int32")
        tokens = np.array([[row[at], row[-1]] for row, at in zip(rows, starts, strict=True)])
        tokens = np.minimum(tokens, self.last).astype("int32")
        parts = [self.loop.extend(tokens, starts, draws[:, [0, 0]])[:, 1:]]
        for number in range(1, self.count):
            starts_at = starts + np.int32(number + 1)
            parts.append(self.loop.extend(parts[-1], starts_at, draws[:, number : number + 1]))
        # A table may have rows beyond the tokens of its tokenizer, and the other one fewer.
        return ops.minimum(ops.concatenate(parts, axis=1), self.vocabulary - 1)

    def finish(self) -> None:
        """See `Drafter`."""
        if self.loop is not None:
            self.loop.finish()


class LookupDrafter:
    """Drafts copied from an earlier place in the row: the tokens after the same n-gram."""

    def __init__(self, count: int):
        self.count = count
        self.places: list[dict[tuple[int, ...], int]] = []
        self.seen: list[int] = []

    def start(self, rows: Sequence[list[int]], steps: int, sampler: Sampler) -> None:
        """See `Drafter`."""
        self.places, self.seen = [{} for _ in rows], [1] * len(rows)

    def draft(self, rows: Sequence[list[int]], draws: np.ndarray) -> Any:
        """See `Drafter`."""
        places = [self._place(number, row) for number, row in enumerate(rows)]
        if not any(places):
            return np.zeros((len(rows), 0), "int32")
        drafts = np.zeros((len(rows), self.count), "int32")
        for draft, row, place in zip(drafts, rows, places, strict=True):
            if place:
                text = row[place:]
                while len(text) < self.count:  # A text that repeats itself goes on doing so.
                    text += text[: self.count - len(text)]
                draft[:] = text[: self.count]
        return drafts

    def _place(self, number: int, row: list[int]) -> int:
        """Returns the place behind the latest occurrence of how a row ends, or 0."""
        places = self.places[number]
        for end in range(self.seen[number], len(row)):
            for size in range(1, min(LONGEST, end) + 1):
                places[tuple(row[end - size : end])] = end
        self.seen[number] = len(row)
        sizes = range(min(LONGEST, len(row)), 0, -1)
        return next((at for size in sizes if (at := places.get(tuple(row[-size:]), 0))), 0)

    def finish(self) -> None:
        """See `Drafter`."""
        self.places, self.seen = [], []


def drafter_of(
    model: Generating,
    assistant: object,
    num_assistant_tokens: int,
    prompt_lookup_num_tokens: int | None,
) -> Drafter | None:
    """Returns the drafter for a model, or None; the arguments are those of `generate`.

    Raises `InputError` for both kinds of drafts, or an assistant of another vocabulary.
    """
    check_whole("num_assistant_tokens", num_assistant_tokens)
    if assistant is None and num_assistant_tokens != ASSISTANT_TOKENS:
        raise InputError(
            f"num_assistant_tokens is {num_assistant_tokens} without an assistant; give assistant, "
            "or leave it out"
        )
    if prompt_lookup_num_tokens is not None:
        check_whole("prompt_lookup_num_tokens", prompt_lookup_num_tokens)
        if assistant is not None:
            raise InputError(
                "generate got assistant and prompt_lookup_num_tokens; give one of them"
            )
        return LookupDrafter(int(prompt_lookup_num_tokens))
    if assistant is None:
        return None
    if not _generates(assistant):
        raise InputError(
            f"assistant is of type {type(assistant).__name__}; give a task that generates, such as "
            "a GemmaCausalLM"
        )
    gather.check_callable(assistant, "generate")
    rows = model.backbone.config.vocabulary_size
    _check_vocabularies(model, assistant, rows)
    return AssistantDrafter(assistant, int(num_assistant_tokens), rows)


def _generates(model: object) -> TypeGuard[Generating]:
    # From Python 3.12 on `isinstance` does not find the layers of a module of torch.
    return all(hasattr(model, name) for name in ("backbone", "preprocessor", "generator"))


def _check_vocabularies(model: Generating, assistant: Generating, rows: int) -> None:
    mine, other = (getattr(task.preprocessor, "tokenizer", None) for task in (model, assistant))
    if mine is not None and other is not None:
        if not same_tokens(mine, other):
            raise InputError(
                "assistant has a tokenizer with other tokens than the model's; give a model that "
                "has the same vocabulary"
            )
    elif (size := assistant.backbone.config.vocabulary_size) != rows:
        raise InputError(
            f"assistant has a vocabulary of {size} tokens and the model one of {rows}; give a "
            "model that has the same vocabulary"
        )


def same_tokens(tokenizer: Tokenizer, other: Tokenizer) -> bool:
    """Returns True if two tokenizers have the same tokens at the same ids."""
    return tokenizer is other or _vocabulary(tokenizer) == _vocabulary(other)


def _vocabulary(tokenizer: Tokenizer) -> int:
    """Returns a hash of the tokens and their ids, except for those that were added later."""
    if tokenizer not in _vocabularies:
        vocabulary = tokenizer.core.get_vocab(with_added_tokens=False)
        _vocabularies[tokenizer] = hash(frozenset(vocabulary.items()))
    return _vocabularies[tokenizer]


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

    The drafter gets no images. Returns the rows, and the counts of passes and drafts.
    """
    rows, counts = Rows(prompts, limits, stop, on_token), DraftCounts()
    if not rows.open:
        return rows.texts, counts
    steps = rows.longest()
    ahead = drafter.count = min(drafter.count, steps)
    settings = sampler, jit_compile, loops, ahead
    loop, token_ids, lengths = opened(backbone, rows.texts, steps, *settings)
    # In the order in which the loop without drafts draws; drafts look beyond the last token.
    draws = sampler.stream().random((steps + ahead + 1, len(prompts)), "float32")
    every = np.arange(len(prompts))[:, None]
    try:
        rows.add(_numpy(loop.start(token_ids, lengths, draws[0], images))[:, None])
        counts.passes = 1
        if rows.open:
            drafter.start([list(map(int, prompt)) for prompt in prompts], steps, sampler)
        while rows.open:
            places = (rows.lengths() - lengths)[:, None] + np.arange(ahead + 1)
            numbers = draws[places, every]
            drafts = drafter.draft(rows.texts, numbers)
            last = np.array([[text[-1]] for text in rows.texts], "int32")
            tokens = ops.concatenate([last, drafts], axis=1)
            numbers = numbers[:, : tokens.shape[1]]
            choices = loop.extend(tokens, rows.lengths() - 1, numbers)
            counts.passes += 1
            counts.drafted += len(rows.open) * drafts.shape[1]
            counts.accepted += rows.add(_numpy(choices), _numpy(drafts))
    finally:
        drafter.finish()
        loop.finish()
    counts.tokens = int((rows.lengths() - lengths).sum())
    return rows.texts, counts


def _numpy(x: Tensor) -> np.ndarray:
    return np.asarray(ops.convert_to_numpy(x))
