"""Amounts and counts, as users write and read them."""

from kmodels.core.errors import InputError

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def human(size: int) -> str:
    """Returns bytes as "1.2 GiB"."""
    name, factor = [(unit, step) for unit, step in UNITS.items() if size >= step or unit == "B"][-1]
    return f"{size} B" if name == "B" else f"{size / factor:.1f} {name}"


def parse_bytes(text: str) -> int:
    """Returns the bytes that a text such as "80GiB" means.

    Raises:
        InputError: for anything else.
    """
    number = text.strip().rstrip("KMGTiB")
    unit = text.strip()[len(number) :]
    try:
        return int(float(number) * UNITS[unit or "B"])
    except (KeyError, ValueError):
        raise InputError(f"{text!r} is not an amount of memory; give one such as 80GiB") from None


def pluralize(number: int, thing: str) -> str:
    """Returns a number of things: "1 worker", "2 workers"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
