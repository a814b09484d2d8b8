"""`generate`, for tasks whose backbone can be extended token by token."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import keras
import numpy as np

from kmodels.errors import InputError, check_whole
from kmodels.generation.generate import continue_prompts
from kmodels.generation.sampler import Sampler, get
from kmodels.weights import gather


class Generates:
    """Adds `generate`; `compile(sampler=...)` chooses how tokens are drawn."""

    backbone: Any
    preprocessor: Any

    def use_sampler(self, sampler: str | Sampler, jit_compile: bool | str = "auto") -> None:
        """Draws tokens this way from now on.

        Args:
            sampler: "greedy", "random", "top_k", "top_p", or a `kmodels.generation.Sampler`.
            jit_compile: whether torch compiles the token step; "auto" for on accelerators only. The
                other backends always compile it.

        Raises:
            InputError: for an unknown name.
        """
        self.generator = _Generator(get(sampler), jit_compile)

    def generate(
        self,
        inputs: Any,
        max_length: int | None = None,
        stop_token_ids: Collection[int] | str | None = "auto",
        strip_prompt: bool = False,
        stream: Callable[[int, Any], None] | None = None,
    ) -> Any:
        """Continues prompts; names and results as in keras-hub.

        Prompts may have different lengths. Lengths are rounded up to a few sizes, so that one
        compiled step serves many prompts.

        Args:
            inputs: what the preprocessor takes, such as a text or a list of texts; or token ids
                (B, T), alone or in {"token_ids", "padding_mask"} with padding on either side.
            max_length: of prompt and continuation together; the preprocessor's `sequence_length`,
                or T, by default.
            stop_token_ids: end a row; "auto" asks the tokenizer, None goes on to `max_length`.
            strip_prompt: gives the continuation only.
            stream: called as tokens come, with the row's number and its new piece of text (without
                a preprocessor: the token's id).

        Returns:
            Texts, or for token ids {"token_ids", "padding_mask"} as NumPy arrays (B, max_length);
            the mask covers what was given and what came, stop tokens included.

        Raises:
            InputError: for "auto" without a preprocessor, a prompt without tokens, a `max_length`
                below 1, or on torch a model whose weights lie in parts.
        """
        if max_length is not None:
            check_whole("max_length", max_length)
        gather.check_callable(self, "generate")
        is_raw = _is_raw(inputs)
        if is_raw:
            taken = inputs if isinstance(inputs, Mapping) else {"token_ids": inputs}
        elif self.preprocessor is None:
            raise InputError(
                'generate got no token ids and the model has no preprocessor; give {"token_ids", '
                '"padding_mask"} or attach one'
            )
        else:
            taken = self.preprocessor.generate_preprocess(inputs, sequence_length=max_length)
        ids = _numpy(taken["token_ids"])
        mask = taken.get("padding_mask")
        mask = np.ones(ids.shape, "bool") if mask is None else _numpy(mask)
        is_batch = ids.ndim > 1
        ids, mask = np.atleast_2d(ids), np.atleast_2d(mask).astype(bool)
        length = max_length or ids.shape[1]
        prompts = [row[there][:length].tolist() for row, there in zip(ids, mask, strict=True)]
        rows = continue_prompts(
            self.backbone,
            prompts,
            max_length=length,
            sampler=self.generator.sampler,
            stop=self._stop_tokens(stop_token_ids),
            on_token=self._streamer(stream, len(prompts), is_raw),
            jit_compile=self.generator.jit_compile,
            loops=self.generator.loops,
        )
        if strip_prompt:
            rows = [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
        found = _pad(rows, length, 0 if is_raw else self.preprocessor.tokenizer.pad_token_id)
        if not is_batch:
            found = {name: value[0] for name, value in found.items()}
        return found if is_raw else self.preprocessor.generate_postprocess(found)

    def _stop_tokens(self, given: Collection[int] | str | None) -> frozenset[int]:
        if given is None:
            return frozenset()
        if not isinstance(given, str):
            return frozenset(int(token) for token in given)
        if given != "auto" or self.preprocessor is None:
            raise InputError(
                f"stop_token_ids is {given!r}; without a preprocessor give ids, or None for no end"
            )
        return frozenset(self.preprocessor.tokenizer.stop_token_ids)

    def _streamer(
        self, stream: Callable[[int, Any], None] | None, rows: int, is_raw: bool
    ) -> Callable[[int, int], None] | None:
        if stream is None or is_raw:
            return stream
        tokens: list[list[int]] = [[] for _ in range(rows)]
        shown = [""] * rows

        def on_token(row: int, token: int) -> None:
            tokens[row].append(token)
            text = self.preprocessor.tokenizer.detokenize(tokens[row])
            # A character may take several tokens; show it when it is whole.
            if not text.endswith("\ufffd") and text != shown[row]:
                stream(row, text[len(shown[row]) :])
                shown[row] = text

        return on_token


class _Generator:
    """Keeps sampler and compiled steps out of Keras' tracking of attributes."""

    def __init__(self, sampler: Sampler, jit_compile: bool | str):
        self.sampler = sampler
        self.jit_compile = jit_compile
        self.loops: dict[Any, Any] = {}


def _is_raw(inputs: Any) -> bool:
    if isinstance(inputs, Mapping):
        return "token_ids" in inputs
    return "int" in str(getattr(inputs, "dtype", ""))  # of any package's arrays


def _numpy(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else np.asarray(keras.ops.convert_to_numpy(x))


def _pad(rows: list[list[int]], length: int, pad: int) -> dict[str, np.ndarray]:
    ids = np.full((len(rows), length), pad, "int32")
    mask = np.zeros((len(rows), length), "int32")
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return {"token_ids": ids, "padding_mask": mask}
