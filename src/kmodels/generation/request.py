"""Inputs and arguments of `generate`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError, check_names, check_whole, one_line
from kmodels.core.types import Data
from kmodels.generation.generation_config import LENGTHS
from kmodels.generation.sampler import Sampler
from kmodels.text.chat_template import as_chats

# What models call the arrays of their images: whole ones, or patches with their places.
PIXELS = ("images", "pixel_values", "pixel_position_ids")


def is_data(inputs: Data) -> bool:
    """Returns True for an iterable of batches, False for one batch."""
    if isinstance(inputs, str | bytes | list | tuple | Mapping) or hasattr(inputs, "dtype"):
        return False
    return hasattr(inputs, "__iter__")


def batches(inputs: Data) -> Any:
    """Returns the batches of a dataset, as NumPy arrays if it supports `as_numpy_iterator`."""
    iterator = getattr(inputs, "as_numpy_iterator", None)
    return inputs if iterator is None else iterator()


def joined(parts: list[Any]) -> Any:
    """Returns the results of `generate` for several batches as one."""
    if parts and isinstance(parts[0], dict):
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return [text for part in parts for text in ([part] if isinstance(part, str) else part)]


def is_raw(inputs: Data) -> bool:
    """Returns True for token ids, alone or by name."""
    if isinstance(inputs, Mapping):
        return "token_ids" in inputs
    return "int" in str(getattr(inputs, "dtype", ""))  # of any package's arrays


def token_inputs(inputs: Data, takes: Sequence[str]) -> Mapping[str, Any]:
    """Returns token ids by name; `takes` are the names of the model's inputs.

    Others are refused: `generate` numbers the tokens itself.
    """
    if not isinstance(inputs, Mapping):
        return {"token_ids": inputs}
    stated = [name for name, value in inputs.items() if value is not None]
    known = [name for name in takes if name not in ("positions", "segment_ids")]
    check_names("generate", stated, known)
    return inputs


def is_empty(inputs: Data) -> bool:
    """Returns True for a batch without prompts."""
    if isinstance(inputs, Mapping):
        inputs = inputs.get("prompts")
    if (shape := getattr(inputs, "shape", None)) is not None:
        return len(shape) > 0 and shape[0] == 0
    return isinstance(inputs, list | tuple) and not inputs


def images_of(taken: Mapping[str, Any], is_batch: bool) -> dict[str, dict[str, np.ndarray]]:
    """Returns {"images": arrays by name} for prompts with images, else {}."""
    arrays = {name: as_numpy(taken[name]) for name in PIXELS if taken.get(name) is not None}
    images = {name: x if is_batch else x[None] for name, x in arrays.items()}
    return {"images": images} if any(x.shape[1] for x in images.values()) else {}


def repeated(images: Mapping[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Returns the images of prompts, those of each prompt `count` times in a row."""
    return {name: np.repeat(x, count, axis=0) for name, x in images.items()}


def as_numpy(x: object) -> np.ndarray:
    """Returns an array of any framework on the host."""
    return x if isinstance(x, np.ndarray) else np.asarray(keras.ops.convert_to_numpy(x))


def ids_and_mask(taken: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids (B, T) or (T,), and True for those that are no padding."""
    try:
        ids, mask = as_numpy(taken["token_ids"]), taken.get("padding_mask")
        mask = np.ones(ids.shape, bool) if mask is None else as_numpy(mask).astype(bool)
    except ValueError as error:  # rows of different lengths
        raise InputError(f"token_ids and padding_mask are not arrays: {one_line(error)}") from error
    if ids.ndim not in (1, 2) or mask.shape != ids.shape:
        raise InputError(
            f"token_ids has shape {ids.shape} and padding_mask {mask.shape}; give both as "
            "(rows, length), or as (length,) for one row"
        )
    return ids, mask


@dataclass(kw_only=True)
class GenerateRequest:
    """Arguments of `Generates.generate`, checked, with the sampler of the call.

    Raises:
        InputError: for values out of range, or two lengths.
    """

    sampler: Sampler
    stop_token_ids: Collection[int] | str | None
    stop: str | Collection[str] | None
    strip_prompt: bool
    stream: Callable[[int, Any], None] | None
    max_length: int | None = None
    max_new_tokens: int | None
    num_return_sequences: int
    assistant: object
    num_assistant_tokens: int
    prompt_lookup_num_tokens: int | None

    def __post_init__(self) -> None:
        for name in (*LENGTHS, "num_return_sequences"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
                setattr(self, name, int(getattr(self, name)))  # NumPy's integers overflow.
        if self.max_length is not None and self.max_new_tokens is not None:
            raise InputError("generate got max_length and max_new_tokens; give one of them")
        if self.stream is not None and not callable(self.stream):
            raise InputError(
                f"stream is {self.stream!r}; give a function that is called with the number of "
                "the row and its new piece of text"
            )


def chat_prompts(preprocessor: Any, messages: Sequence[Any], **options: Any) -> dict[str, Any]:
    """Returns the inputs of a model for chats, as `generate_preprocess` does, but never cut.

    Options are those of the preprocessor's `chat_token_ids`. Raises `InputError` if it cannot write
    chats.
    """
    if not hasattr(preprocessor, "chat_examples"):
        raise InputError(
            "a chat needs a preprocessor, whose tokenizer writes it; attach one, or give generate "
            "token ids"
        )
    chats, is_batch = as_chats(messages)
    inputs = preprocessor.prompt_inputs(preprocessor.chat_examples(chats, **options))
    return inputs if is_batch else {name: value[0] for name, value in inputs.items()}


def pad_rows(
    rows: Sequence[Sequence[int | None]], length: int, pad: int | None
) -> dict[str, np.ndarray]:
    """Returns rows of token ids padded behind to one length, and their mask, (B, length) int32."""
    ids = np.full((len(rows), length), pad, "int32")
    mask = np.zeros((len(rows), length), "int32")
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return {"token_ids": ids, "padding_mask": mask}
