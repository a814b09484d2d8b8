"""Errors that a user sees: `InputError` with a message of one line."""

from collections.abc import Callable

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
