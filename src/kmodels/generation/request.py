"""The settings of one call of `generate` or `chat`."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from kmodels.core.errors import InputError, check_whole
from kmodels.generation.sampler import Sampler


@dataclass
class GenerateRequest:
    """Arguments of `generate`, checked.

    Args:
        sampler: chooses the tokens.
        stop_token_ids: ids that end a row, "auto" for those of the preprocessor, None for none.
        stop: string or strings that end a row; None for those of generation_config.json.
        strip_prompt: leave the prompt out of the result.
        stream: function that gets a row's number and its new piece of text.
        max_length: most tokens of a row, the prompt included.
        max_new_tokens: most tokens behind the prompt, in place of `max_length`.
        num_return_sequences: continuations of each prompt.
        drafts: `assistant`, `num_assistant_tokens` and `prompt_lookup_num_tokens`, by name.

    Raises:
        InputError: for values out of range, or two lengths.
    """

    sampler: Sampler
    stop_token_ids: Collection[int] | str | None = "auto"
    stop: str | Collection[str] | None = None
    strip_prompt: bool = False
    stream: Callable[[int, Any], None] | None = None
    max_length: int | None = None
    max_new_tokens: int | None = None
    num_return_sequences: int = 1
    drafts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_length", "max_new_tokens"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        if self.max_length is not None and self.max_new_tokens is not None:
            raise InputError("generate got max_length and max_new_tokens; give one of them")
        check_whole("num_return_sequences", self.num_return_sequences)
        if self.stream is not None and not callable(self.stream):
            raise InputError(
                f"stream is {self.stream!r}; give a function that is called with the number of "
                "the row and its new piece of text"
            )
