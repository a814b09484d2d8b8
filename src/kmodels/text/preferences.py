"""Pairs of answers, one preferred to the other, read and tokenized for preference tuning."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.core.remote import local_copy
from kmodels.text.packing import Batch, Example, pad
from kmodels.text.records import json_records

FIELDS = ("prompt", "chosen", "rejected")


def read_pairs(path: str | Path) -> list[dict[str, str]]:
    """Reads a file of JSON lines, or of one JSON array, with prompt, chosen and rejected.

    Args:
        path: local, or an address such as "gs://bucket/pairs.jsonl"; more fields are ignored.

    Returns:
        Dictionaries with these three texts, in the order of the file.

    Raises:
        InputError: for the first record without them, or a file that cannot be read.
    """
    rows = []
    try:
        for where, read in json_records(local_copy(path), path):
            try:
                row = read()
            except InputError as error:
                raise InputError(f"{where}: {error}") from error
            if not isinstance(row, dict) or not all(isinstance(row.get(x), str) for x in FIELDS):
                raise InputError(f"{where} lacks a text; give {', '.join(FIELDS)} in each")
            rows.append({name: row[name] for name in FIELDS})
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    return rows


def encode_pairs(preprocessor: Any, pairs: Sequence[Mapping[str, str]]) -> Batch:
    """Returns token ids of both answers, each after the same prompt.

    The log-probabilities of two answers are comparable only after the same prompt, so a prompt that
    has to be cut is cut for both as for the longer answer.

    Args:
        preprocessor: a `CausalLMPreprocessor` with `loss_on="responses"`.
        pairs: as `read_pairs` returns them.

    Returns:
        ({"token_ids", "padding_mask"}, labels, weights), each (pairs, 2, sequence_length): the
        chosen answer, then the rejected one.
    """
    prompts = [row["prompt"] for row in pairs]
    chosen, rejected = (
        preprocessor.encode({"prompts": prompts, "responses": [row[name] for row in pairs]})
        for name in FIELDS[1:]
    )
    both = [one for pair in zip(chosen, rejected, strict=True) for one in _with_one_prompt(*pair)]
    rows = pad(both, preprocessor.sequence_length, preprocessor.tokenizer.pad_token_id)
    return keras.tree.map_structure(lambda part: part.reshape(len(pairs), 2, -1), rows)


def _with_one_prompt(chosen: Example, rejected: Example) -> list[Example]:
    """Returns both examples with the shorter of their prompts."""
    lengths = [example.learn.index(True) for example in (chosen, rejected)]
    length = min(lengths)
    shorter = (chosen, rejected)[lengths.index(length)]
    return [
        Example(
            shorter.ids[:length] + example.ids[own:], shorter.learn[:length] + example.learn[own:]
        )
        for own, example in zip(lengths, (chosen, rejected), strict=True)
    ]
