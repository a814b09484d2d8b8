"""Texts to vectors, and how alike vectors are; names and results as in sentence-transformers."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError, check_whole
from kmodels.generation.request import pad_rows
from kmodels.weights import gather

SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
# Prompts that `encode_document` looks for, in this order.
DOCUMENTS = ("document", "passage", "corpus")
# Rows are padded to few lengths, so that one compiled step serves many: multiples of a quarter of
# the next power of two, and at least this.
SHORTEST = 16


class Encodes(keras.Model):
    """Gives an embedder `encode` and its kin.

    Attributes:
        prompts: what stands in front of texts, by name.
        default_prompt_name: name of the prompt where none is asked for, or None.
        similarity_fn_name: what `similarity` computes.
        truncate_dim: numbers of each vector that `encode` keeps, or None for all.
    """

    preprocessor: Any

    def use_encoding(
        self,
        prompts: Mapping[str, str] | None,
        default_prompt_name: str | None,
        similarity_fn_name: str,
        truncate_dim: int | None,
    ) -> None:
        """Sets what the attributes of these names hold.

        Raises:
            InputError: for a default that is none of the prompts, another similarity, or a width
                that the vectors do not have.
        """
        # Around Keras' __setattr__, which would make a tracked dictionary of it.
        object.__setattr__(self, "prompts", dict(prompts or {}))
        self.default_prompt_name = default_prompt_name
        self.similarity_fn_name = similarity_fn_name
        self.truncate_dim = truncate_dim
        if similarity_fn_name not in SIMILARITIES:
            raise InputError(
                f"similarity_fn_name is {similarity_fn_name!r}; choose one of "
                f"{', '.join(SIMILARITIES)}"
            )
        self._prompt(default_prompt_name, None)
        self._width(truncate_dim)

    @property
    def encoding_settings(self) -> dict[str, Any]:
        """The arguments of `use_encoding`."""
        return {
            "prompts": dict(self.prompts),
            "default_prompt_name": self.default_prompt_name,
            "similarity_fn_name": self.similarity_fn_name,
            "truncate_dim": self.truncate_dim,
        }

    def encode(
        self,
        texts: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        truncate_dim: int | None = None,
        normalize_embeddings: bool = True,
        show_progress_bar: bool = False,
    ) -> np.ndarray:
        """Returns one vector for each text.

        Texts are cut to the preprocessor's `sequence_length`. Those of equal length are computed
        together, whatever the order in which they are given.

        Args:
            texts: a text, or a list or an array of texts.
            prompt_name: name of one of `prompts`, which stands in front of each text;
                `default_prompt_name` by default.
            prompt: the prompt itself.
            batch_size: largest number of texts computed at a time.
            truncate_dim: numbers of each vector to keep, the first ones; the model's `truncate_dim`
                by default.
            normalize_embeddings: divides the vectors by their length once they are cut. Without it
                they are what the model gives.
            show_progress_bar: prints one.

        Returns:
            float32, (N, D) in the order of the texts, or (D,) for a single text.

        Raises:
            InputError: for an unknown prompt, a width that the vectors do not have, what is not
                text, or a model without a preprocessor.
        """
        check_whole("batch_size", batch_size)
        if self.preprocessor is None:
            raise InputError(
                "encode needs a preprocessor, and the model has none; attach one, or call the "
                "model on token ids"
            )
        gather.check_callable(self, "encode")
        width = self._width(self.truncate_dim if truncate_dim is None else truncate_dim)
        single = isinstance(texts, str | bytes)
        first = self._prompt(prompt_name or self.default_prompt_name, prompt)
        given = [_text(text) for text in ([texts] if single else texts)]
        rows = self.preprocessor.token_rows([first + text for text in given])
        found = np.zeros((len(rows), width), "float32")
        order = np.argsort([-len(row) for row in rows], kind="stable")
        bar = keras.utils.Progbar(len(rows), unit_name="text") if show_progress_bar else None
        for start in range(0, len(rows), batch_size):
            places = order[start : start + batch_size]
            found[places] = self._vectors([rows[i] for i in places], batch_size)[:, :width]
            if bar is not None:
                bar.update(start + len(places))
        if normalize_embeddings:
            found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        return found[0] if single else found

    def encode_text(self, text: str | Sequence[str], **kwargs: Any) -> np.ndarray:
        """Returns one vector for each text as the model gives it, with keras-hub's name.

        Args:
            text: a text, or a list of texts.
            **kwargs: of `predict`.

        Returns:
            float32 (N, D), also for a single text.
        """
        return self.predict([text] if isinstance(text, str) else text, **kwargs)

    def encode_query(self, texts: str | Sequence[str], **settings: Any) -> np.ndarray:
        """Returns the vectors of queries: `encode` with the prompt "query" where there is one.

        Args:
            texts: as of `encode`.
            **settings: see there.
        """
        return self._encode_as(("query",), texts, settings)

    def encode_document(self, texts: str | Sequence[str], **settings: Any) -> np.ndarray:
        """Returns the vectors of documents: `encode` with the first of their prompts there is.

        They are called "document", "passage" and "corpus".

        Args:
            texts: as of `encode`.
            **settings: see there.
        """
        return self._encode_as(DOCUMENTS, texts, settings)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> np.ndarray:
        """Returns how alike vectors are, each of the first with each of the second.

        Args:
            embeddings1: (N, D), or (D,) for one.
            embeddings2: (M, D), or (D,).

        Returns:
            float32 (N, M): cosines, dot products or negative distances, as `similarity_fn_name`
                says.
        """
        a, b = (np.atleast_2d(np.asarray(x, "float32")) for x in (embeddings1, embeddings2))
        if self.similarity_fn_name == "cosine":
            a, b = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (a, b))
        if self.similarity_fn_name in ("cosine", "dot"):
            return a @ b.T
        order = 2 if self.similarity_fn_name == "euclidean" else 1
        return np.stack([-np.linalg.norm(x - b, ord=order, axis=1) for x in a])

    def _encode_as(
        self, names: Sequence[str], texts: str | Sequence[str], settings: dict[str, Any]
    ) -> np.ndarray:
        if settings.get("prompt") is None and settings.get("prompt_name") is None:
            name = next((name for name in names if name in self.prompts), None)
            settings = {**settings, "prompt_name": name}
        return self.encode(texts, **settings)

    def _vectors(self, rows: list[list[int]], batch_size: int) -> np.ndarray:
        """Returns the vectors of rows of token ids, longest first, (N, D)."""
        count = min(batch_size, 1 << (len(rows) - 1).bit_length())
        length = min(_rounded(max(map(len, rows))), self.preprocessor.sequence_length)
        filled = [*rows, *[rows[-1]] * (count - len(rows))]
        x = pad_rows(filled, length, self.preprocessor.tokenizer.pad_token_id)
        return np.asarray(self.predict_on_batch(x), "float32")[: len(rows)]

    def _prompt(self, name: str | None, prompt: str | None) -> str:
        if prompt is not None or name is None:
            return prompt or ""
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise InputError(f"there is no prompt {name!r}; the model's are {known}")
        return self.prompts[name]

    def _width(self, wanted: int | None) -> int:
        width = self.outputs[0].shape[-1]
        if wanted is None:
            return width
        check_whole("truncate_dim", wanted)
        if wanted > width:
            raise InputError(f"truncate_dim is {wanted}; the vectors have {width} numbers")
        return wanted


def _text(text: object) -> str:
    if not isinstance(text, str | bytes):
        raise InputError(f"encode got a {type(text).__name__} among the texts; give texts")
    return text if isinstance(text, str) else text.decode()


def _rounded(length: int) -> int:
    """Returns the next of few lengths."""
    step = max(SHORTEST, 1 << max((length - 1).bit_length() - 2, 0))
    return -(-length // step) * step
