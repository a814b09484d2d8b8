"""Files of records: one JSON object a line, read in bounded memory, or one JSON array."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError

MAX_LINE_BYTES = 4 * 2**20
_MARK = b"\xef\xbb\xbf"
# Bytes among which the first that is no space tells an array from lines.
_BEGIN = 4096
# Where a record stands, and a function that gives it or raises what is wrong with it.
Entry = tuple[str, Callable[[], Any]]


def json_records(file: Path, name: object, limit: int = MAX_LINE_BYTES) -> Iterator[Entry]:
    """Returns the records of a file: of its lines that are not blank, or of its one array.

    Lines end with a line feed alone: JSON strings may hold U+2028 and other characters at which
    `str.splitlines` ends a line.

    Args:
        file: path of it, UTF-8.
        name: what errors call it.
        limit: largest number of bytes of a line.

    Raises:
        InputError: for an array that is not JSON.
    """
    with file.open("rb") as opened:
        begin = opened.read(_BEGIN).removeprefix(_MARK).lstrip()
    if begin.startswith(b"["):
        yield from _of_array(file, name)
        return
    for number, line in _numbered(file, limit):
        yield f"{name} line {number}", partial(_parse, line, limit)


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
                line = line.removeprefix(_MARK)
            if line.strip():
                yield number, line


def _of_array(file: Path, name: object) -> Iterator[Entry]:
    content = file.read_bytes().removeprefix(_MARK)
    try:
        values = _parse(content, len(content))
    except InputError as error:
        raise InputError(f"{name}: {error}") from error.__cause__
    for number, value in enumerate(values, 1):
        yield f"{name} record {number}", partial(_parsed, value)


def _parsed(value: Any) -> Any:
    return value


def _parse(line: bytes, limit: int) -> Any:
    if len(line.rstrip(b"\r\n")) > limit:
        raise InputError(f"longer than {limit} bytes")
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise InputError(f"not JSON at {at}column {error.colno}: {error.msg}") from error
    except ValueError as error:  # a whole number of thousands of digits
        raise InputError(f"not JSON that Python reads: {error}") from error
    except RecursionError as error:
        raise InputError("not a record: nested too deeply") from error
