"""Stop tokens and stop strings, and streaming of texts that may end in one."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from kmodels.core.errors import InputError

# A character takes up to four tokens; some more for tokens without text.
TOKENS_PER_CHARACTER, MORE_TOKENS = 4, 8
# The decoder writes this for a character of which some bytes are missing.
UNFINISHED = "\ufffd"


class Stop(Collection[int]):
    """Token ids and strings that end a generated text.

    Args:
        strings: strings, which may begin and end inside tokens.
        tokenizer: decodes the tokens for the strings; one that is a special token becomes an id.
    """

    def __init__(self, ids: Iterable[int], strings: Iterable[str] = (), tokenizer: Any = None):
        special = {text: _special_id(tokenizer, text) for text in strings}
        self.ids = frozenset(ids) | {i for i in special.values() if i is not None}
        self.strings = tuple(text for text, i in special.items() if i is None)
        self.tokenizer = tokenizer

    def __contains__(self, token: object) -> bool:
        return token in self.ids

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def matches(self, tokens: Sequence[int]) -> bool:
        """Returns True if the text of these tokens has one of the strings near its end."""
        if not self.strings:
            return False
        last = TOKENS_PER_CHARACTER * max(map(len, self.strings)) + MORE_TOKENS
        if self.end(self.tokenizer.detokenize(tokens[-last:])) is None:
            return False
        return self.end(self.tokenizer.detokenize(tokens)) is not None

    def end(self, text: str) -> int | None:
        """Returns the index of the first stop string in a text, or None."""
        places = [place for one in self.strings if (place := text.find(one)) >= 0]
        return min(places, default=None)

    def without(self, text: str, continuation: Sequence[int]) -> str:
        """Returns a text, whose end is the continuation, cut before the stop string in it."""
        if not self.strings:
            return text
        new = self.tokenizer.detokenize(continuation)
        at = self.end(new)
        return text if at is None else text[: len(text) - len(new) + at]

    def certain(self, text: str) -> int:
        """Returns how many characters of a growing text cannot belong to a stop string."""
        if (at := self.end(text)) is not None:
            return at
        begun = (
            size for one in self.strings for size in range(1, len(one)) if text.endswith(one[:size])
        )
        return len(text) - max(begun, default=0)


def ended(stop: Collection[int], tokens: Sequence[int]) -> bool:
    """Returns True if the last of the tokens behind a prompt, at least one, ends the text."""
    return tokens[-1] in stop or (isinstance(stop, Stop) and stop.matches(tokens))


def check_strings(name: str, strings: object) -> tuple[str, ...]:
    """Returns stop strings as a tuple; raises `InputError` for other values, or an empty string."""
    several = [strings] if isinstance(strings, str) else strings
    if not isinstance(several, list | tuple | set | frozenset) or not all(
        isinstance(one, str) and one for one in several
    ):
        raise InputError(f"{name} is {strings!r}; give a string or a list of strings, none empty")
    return tuple(dict.fromkeys(several))


class Streamer:
    """Calls a function with (row, new piece of text) as tokens come, without stop strings."""

    def __init__(self, stream: Callable[[int, str], None], rows: int, stop: Stop, tokenizer: Any):
        self.stream = stream
        self.stop = stop
        self.tokenizer = tokenizer
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.shown = [0] * rows

    def __call__(self, row: int, token: int) -> None:
        """Adds a token to a row, and shows the characters that are whole and certain."""
        self.tokens[row].append(token)
        text = self.tokenizer.detokenize(self.tokens[row])
        whole = len(text.rstrip(UNFINISHED))
        self._show(row, text[: min(whole, self.stop.certain(text))])

    def finish(self) -> None:
        """Streams the characters that were held back; no row continues."""
        for row, tokens in enumerate(self.tokens):
            text = self.tokenizer.detokenize(tokens) if tokens else ""
            self._show(row, self.stop.without(text, tokens) if tokens else text)

    def _show(self, row: int, text: str) -> None:
        if len(text) > self.shown[row]:
            self.stream(row, text[self.shown[row] :])
            self.shown[row] = len(text)


def _special_id(tokenizer: Any, text: str) -> int | None:
    """Returns the id of a special token, which decoded text does not show, or None."""
    core = getattr(tokenizer, "core", None)
    token = None if core is None else core.token_to_id(text)
    return token if token in getattr(tokenizer, "special_token_ids", ()) else None
