"""Records as token ids that fit a length, and as rows of one length: one a row, or several."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kmodels.core.arguments import checked
from kmodels.core.errors import InputError
from kmodels.data.rows import assign
from kmodels.text.chat_template import Rendered
from kmodels.text.templates import Written
from kmodels.text.tokenizer import Tokenizer


class Example(NamedTuple):
    """Token ids of one record.

    Attributes:
        ids: start and end tokens included.
        learn: for each, whether it counts in the loss when it is predicted.
        images: inputs of the model for its images, in the order of their places.
    """

    ids: list[int]
    learn: list[bool]
    images: Sequence[np.ndarray] = ()


@dataclass
class Cut:
    """The tokens that were cut so that examples fit.

    Attributes:
        examples: how many lost something.
        prompt_tokens: tokens that were to be read.
        response_tokens: tokens that were to be learnt.
        dropped: preference records without a token of an answer, which are left out.
    """

    examples: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    dropped: int = 0

    def __str__(self) -> str:
        dropped = f"; {self.dropped} dropped, whose answer is empty" if self.dropped else ""
        return (
            f"{self.examples} examples cut to fit: {self.prompt_tokens} tokens of prompts and "
            f"{self.response_tokens} of responses{dropped}"
        )


@checked
def encode(
    tokenizer: Tokenizer,
    written: Sequence[Written | Rendered],
    length: int,
    *,
    start: bool = True,
    end: bool = True,
    loss_on: str = "all",
    cut: Cut | None = None,
) -> list[Example]:
    """Returns texts as token ids, none longer than `length`.

    A text that is too long loses its end and keeps the end token, as in keras-hub. A prompt with a
    response first loses the middle of the prompt, down to a quarter of the room, then the end of
    the response together with the end token, since nothing ended there.

    Args:
        tokenizer: makes the ids.
        written: the records as text. What the tokenizer's own chat template wrote gets neither
            start nor end token.
        length: most tokens of an example, at least 2.
        start: put the start token in front.
        end: append the end token if the record asks for it.
        loss_on: "all", or "responses" to leave prompts out of the loss.
        cut: counts the tokens and texts that are cut.

    Returns:
        One example for each record.

    Raises:
        InputError: for an example of which no token would be learnt.
    """
    cut = cut if cut is not None else Cut()
    chats = iter(tokenizer.encode_rendered([w for w in written if isinstance(w, Rendered)]))
    plain = [w for w in written if isinstance(w, Written)]
    ids = iter(tokenizer.encode_batch([part.text for w in plain for part in w.parts]))
    examples = []
    for place, one in enumerate(written):
        if isinstance(one, Rendered):
            flat, learn = next(chats)
            learn = learn if loss_on == "responses" else [True] * len(flat)
            flat, learn = _fit(flat, learn, [], length, cut)
            examples.append(_example(place, flat, learn, 0, loss_on))
            continue
        flat, learn = [], []
        for part in one.parts:
            new = next(ids)
            flat += new
            learn += [part.learn] * len(new)
        # A prompt that itself holds the start token, as rendered chats do, gets no second one.
        begin = [] if not start or tokenizer.start_token_id is None else [tokenizer.start_token_id]
        if begin and flat[:1] == begin:
            flat, learn = flat[1:], learn[1:]
        close = [tokenizer.end_token_id] if end and one.ends else []
        flat, learn = _fit(flat, learn, close, length - len(begin), cut)
        examples.append(_example(place, begin + flat, learn, len(begin), loss_on))
    return examples


def _example(place: int, ids: list[int], learn: list[bool], begin: int, loss_on: str) -> Example:
    """Returns an example whose first `begin` tokens are never learnt."""
    learn = learn if loss_on == "responses" else [True] * (len(ids) - begin)
    learn = [False] * begin + learn
    if not any(learn[1:]):
        raise InputError(f"example {place} has no token to learn: it is empty")
    return Example(ids, learn)


def _fit(
    ids: list[int], learn: list[bool], close: list[int], room: int, cut: Cut
) -> tuple[list[int], list[bool]]:
    excess = len(ids) + len(close) - room
    if excess <= 0:
        return ids + close, learn + [True] * len(close)
    cut.examples += 1
    prompt = learn.index(True) if True in learn else len(ids)
    if prompt == 0:
        cut.response_tokens += excess
        keep = room - len(close)
        return ids[:keep] + close, learn[:keep] + [True] * len(close)
    ids, learn = ids + close, learn + [True] * len(close)
    places, rest = fit_prompt(prompt, len(ids) - prompt, room)
    cut.prompt_tokens += prompt - len(places)
    cut.response_tokens += len(ids) - prompt - rest
    places += range(prompt, prompt + rest)
    return [ids[i] for i in places], [learn[i] for i in places]


def fit_prompt(prompt: int, response: int, room: int) -> tuple[list[int], int]:
    """Returns the places of a prompt's tokens that fit, and how many tokens of a response do.

    The prompt loses its middle, down to a quarter of the room, then the response its end.
    """
    rest = min(response, max(room - prompt, room - room // 4))
    left = min(prompt, room - rest)
    return [*range(left - left // 2), *range(prompt - left // 2, prompt)], rest


Batch = tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]


def pad(examples: Sequence[Example], length: int, pad_id: int) -> Batch:
    """Returns one example a row, padded at the right.

    Args:
        examples: examples of at most length + 1 tokens.
        length: tokens of a row.
        pad_id: id of the padding token.

    Returns:
        ({"token_ids", "padding_mask"}, labels, weights), each (B, length), int32 and float32
        weights. Labels are the ids one further on; a label that is not learnt weighs 0.
    """
    ids = np.full((len(examples), length + 1), pad_id, "int32")
    mask, learn = np.zeros_like(ids), np.zeros_like(ids)
    for row, example in enumerate(examples):
        size = len(example.ids)
        ids[row, :size], mask[row, :size], learn[row, :size] = example.ids, 1, example.learn
    x = {"token_ids": ids[:, :-1].copy(), "padding_mask": mask[:, :-1].copy()}
    return x, ids[:, 1:].copy(), learn[:, 1:].astype("float32")


def pack(examples: Sequence[Example], length: int, pad_id: int) -> Batch:
    """Packs several examples into a row, each with the loss it has alone.

    Args:
        examples: examples of at most length + 1 tokens.
        length: tokens of a row.
        pad_id: id of the padding token.

    Returns:
        The arrays of `pad`, with "segment_ids" (1, 2, ... by example, 0 for padding; attention
        stays inside a segment) and "positions" (from 0 in each segment) besides.
    """
    # The last token of an example predicts nothing that counts, so it is no input here.
    rows = assign([len(example.ids) - 1 for example in examples], length)
    ids = np.full((len(rows), length), pad_id, "int32")
    labels = ids.copy()
    segments, positions = np.zeros_like(ids), np.zeros_like(ids)
    weights = np.zeros(ids.shape, "float32")
    for row, members in enumerate(rows):
        at = 0
        for segment, member in enumerate(members, start=1):
            example = examples[member]
            place = np.s_[row, at : at + len(example.ids) - 1]
            ids[place], labels[place] = example.ids[:-1], example.ids[1:]
            weights[place], segments[place] = example.learn[1:], segment
            positions[place] = np.arange(len(example.ids) - 1)
            at += len(example.ids) - 1
    x = {
        "token_ids": ids,
        "padding_mask": (segments > 0).astype("int32"),
        "segment_ids": segments,
        "positions": positions,
    }
    return x, labels, weights
