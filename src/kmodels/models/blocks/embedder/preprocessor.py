"""Preprocessors of embedders: texts, and pairs of texts for training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError, check_choice
from kmodels.core.types import Data
from kmodels.models.blocks.text_preprocessor import TextPreprocessor, check_same_fields, one_by_one
from kmodels.text import Tokenizer
from kmodels.text.texts import as_text

QUERIES = ("anchor", "anchors", "query", "queries")
DOCUMENTS = ("positive", "positives", "document", "documents")
NEGATIVE = "negative"
TRUNCATE = ("round_robin", "waterfall")


def columns_of(names: Sequence[str]) -> list[str] | None:
    """Returns the columns of pairs as query, document and hard negatives; None for other names."""
    queries = [name for name in names if name in QUERIES]
    documents = [name for name in names if name in DOCUMENTS]
    negatives = [name for name in names if name.startswith(NEGATIVE)]
    columns = [*queries, *documents, *negatives]
    whole = len(queries) == len(documents) == 1 and len(columns) == len(names)
    return columns if whole else None


class TextEmbedderPreprocessor(TextPreprocessor):
    """Turns texts into token ids and a mask, and pairs of texts into batches for `fit`.

    The base of each family's own, which names its tokenizer.

    Args:
        tokenizer: as of `TextPreprocessor`.
        sequence_length: tokens of a row; may be set later.
        add_start_token: puts the start token in front; None to follow the tokenizer's files.
        add_end_token: appends the token with which the files end a text, or else the end token,
            also if a text is cut; None for the same default.
        query_prompt: stands in front of each query of a pair.
        document_prompt: stands in front of each document of a pair, the negatives included.
        **kwargs: of `keras.layers.Layer`, such as `name`.

    Call:
        x: texts as of `TextPreprocessor`; or columns of pairs, {"anchor": texts, "positive":
            texts}, and a list of such records. The first may also be called "query" or "queries",
            the second "document" or "documents"; columns whose names begin with "negative" are hard
            negatives. Dictionaries that hold "token_ids" go through untouched.
        y: None for pairs.
        sample_weight: one number for each pair.
        sequence_length: in place of the one set.

        For texts same as `TextPreprocessor`. For pairs ({"token_ids",
        "padding_mask"}, labels), each of the first (B, C, sequence_length) int32 with C the number
        of columns, and the labels zeros (B,), followed by weights if there are any.

    Raises:
        InputError: for anything but text, other columns, or labels of pairs.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | Mapping[str, Any] | str | Path,
        sequence_length: int = 2048,
        add_start_token: bool | None = None,
        add_end_token: bool | None = None,
        query_prompt: str = "",
        document_prompt: str = "",
        **kwargs: Any,
    ):
        super().__init__(tokenizer, sequence_length, **kwargs)
        starts = self.tokenizer.start_token_id in self.tokenizer.encode("")
        ends = self.tokenizer.closing_token_id is not None
        self.add_start_token = starts if add_start_token is None else add_start_token
        self.add_end_token = ends if add_end_token is None else add_end_token
        self.query_prompt = query_prompt
        self.document_prompt = document_prompt

    @property
    def _end_token_id(self) -> int | None:
        closing = self.tokenizer.closing_token_id
        return super()._end_token_id if closing is None else closing

    def _converted(self, x: Data, y: Data, sample_weight: Data, length: int) -> Any:
        records, is_batch = one_by_one(x, self.reader)
        first = records[0] if records else None
        if not isinstance(first, Mapping) or set(first) == {"prompts"}:
            return super()._converted(x, y, sample_weight, length)
        _check_labels(y)
        x = self._pairs(records, length)
        labels = np.zeros(len(records), "int32")
        if not is_batch:
            x, labels = {name: value[0] for name, value in x.items()}, labels[0]
        return keras.utils.pack_x_y_sample_weight(x, labels, sample_weight)

    def _pairs(self, records: Sequence[Mapping[str, str]], length: int) -> dict[str, np.ndarray]:
        names = list(records[0])
        if (order := columns_of(names)) is None:
            raise InputError(
                f"{self.reader} got the columns {', '.join(names)}; give texts, or pairs of anchor "
                "and positive, and hard negatives whose names begin with negative"
            )
        check_same_fields(records)
        prompts = [self.query_prompt, *(self.document_prompt,) * (len(order) - 1)]
        columns = list(zip(order, prompts, strict=True))
        texts = [prompt + as_text(record[name]) for record in records for name, prompt in columns]
        rows = self._rows(texts, length)
        return {name: ids.reshape(len(records), len(order), -1) for name, ids in rows.items()}

    def _spec(self, x: Data, y: Data, sample_weight: Data, length: int) -> Any:
        order = columns_of(list(x)) if isinstance(x, Mapping) else None
        if order is None:
            return super()._spec(x, y, sample_weight, length)
        _check_labels(y)
        spec = self._inputs_spec(x, length)
        *batch, _ = spec["token_ids"].shape
        pairs = {name: keras.KerasTensor((*batch, len(order), length), "int32") for name in spec}
        labels = keras.KerasTensor(tuple(batch), "int32")
        return keras.utils.pack_x_y_sample_weight(pairs, labels, sample_weight)

    def _settings(self) -> dict[str, Any]:
        prompts = {"query_prompt": self.query_prompt, "document_prompt": self.document_prompt}
        return {**super()._settings(), **prompts}


class HubEmbedderPreprocessor(TextEmbedderPreprocessor):
    """`TextEmbedderPreprocessor` by keras-hub's arguments and defaults.

    The base of each family's own. `truncate` is "round_robin" or "waterfall", by which keras-hub
    shares a row among several texts; a row has one text here, so that both are the same.

    Raises:
        InputError: for another `truncate`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | Mapping[str, Any] | str | Path,
        sequence_length: int = 256,
        truncate: str = "round_robin",
        add_start_token: bool | None = True,
        add_end_token: bool | None = True,
        **kwargs: Any,
    ):
        check_choice("truncate", truncate, TRUNCATE)
        super().__init__(tokenizer, sequence_length, add_start_token, add_end_token, **kwargs)
        self.truncate = truncate

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "truncate": self.truncate}


def _check_labels(y: Data) -> None:
    if y is not None:
        raise InputError(
            "pairs have no labels: each document belongs to the query beside it; leave y out"
        )
