"""Errors that a user sees: `InputError` with a message of one line."""

from collections.abc import Callable, Mapping

import pytest

from kmodels.core.errors import InputError


def refused(message: str, call: Callable, *arguments, **options) -> str:
    """Returns the message of the `InputError` that a call raises.

    Args:
        message: a pattern that the message has to match.
        call: the function, with its arguments.
    """
    with pytest.raises(InputError, match=message) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def messages(attempts: Mapping[str, Callable[[], object]]) -> dict[str, str | None]:
    """Returns the message of the `InputError` that each call raises, None where it raises none."""
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = None
        except InputError as error:
            found[name] = str(error)
    return found
