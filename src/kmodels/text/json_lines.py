"""Files of one JSON object a line, read line by line in bounded memory."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError

MAX_LINE_BYTES = 4 * 2**20
# Where a record stands, and a function that gives it or raises what is wrong with it.
Entry = tuple[str, Callable[[], Any]]


def json_lines(file: Path, name: object, limit: int) -> Iterator[Entry]:
    """Returns the lines of a file that are not blank, read as they are asked for.

    Args:
        file: path of it.
        name: what errors call it.
        limit: largest number of bytes of a line.
    """
    return (
        (f"{name} line {number}", partial(_parse, line, limit))
        for number, line in _numbered(file, limit)
    )


def _numbered(file: Path, limit: int) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, each cut at limit + 1 bytes so that memory stays bounded."""
    number = 0
    with file.open("rb") as lines:
        while line := lines.readline(limit + 1):
            number += 1
            end = line
            while len(end) > limit and not end.endswith(b"\n"):
                end = lines.readline(limit + 1)
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield number, line


def _parse(line: bytes, limit: int) -> Any:
    if len(line.rstrip(b"\r\n")) > limit:
        raise InputError(f"longer than {limit} bytes")
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON at column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise InputError("not a record: nested too deeply") from error
