"""Examples as rows of one length: one example a row, or several."""

from collections.abc import Sequence

import numpy as np

from kmodels.data.packing import assign
from kmodels.text.examples import Example

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
