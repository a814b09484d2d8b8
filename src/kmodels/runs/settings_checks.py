"""Checks of a recipe's settings, and values read from them."""

from typing import Any

from kmodels.core.errors import InputError


def given(**values: object) -> dict[str, Any]:
    """Returns those that are not None: a flag left out leaves the preset's own value."""
    return {name: value for name, value in values.items() if value is not None}


def at_least(settings: Any, **limits: float) -> None:
    """Checks lower bounds: `at_least(settings, epochs=1)`."""
    for name, limit in limits.items():
        value = getattr(settings, name)
        if value is not None and not value >= limit:
            raise InputError(f"--{name.replace('_', '-')} is {value}; give at least {limit}")


def check_fractions(settings: Any, *names: str) -> None:
    """Checks that these are in [0, 1)."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 <= value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}; give at least 0, below 1")


def numbers(settings: Any, name: str, count: int) -> tuple[float, ...] | None:
    """Returns a setting such as "2,9" as numbers; whole ones are int. None stays None."""
    text = getattr(settings, name)
    if text is None:
        return None
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) != count:
        raise InputError(
            f"--{name.replace('_', '-')} is {text!r}; give {count} numbers, a comma between them"
        )
    return tuple(int(value) if value == int(value) else value for value in values)
