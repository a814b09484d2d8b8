"""Records to train on out of JSON lines or a folder, with errors that name the file and line."""

import csv
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.core.files import is_remote, named_file
from kmodels.core.remote import local_copy
from kmodels.data.images.any_picture import INLINE, check_local, open_picture
from kmodels.data.images.pictures import suffixes
from kmodels.text.records import FORMS, PICTURES, Record, Records, check_record, has_picture

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


METADATA, TABLE = "metadata.jsonl", "metadata.csv"
# Hugging Face's names for one image of a line, and for several.
NAMES = ("file_name", "file_names")
# What a part of a message may name its image by, besides base64.
PATHS = ("image", "path", "url")


def folder_entries(folder: Path, limit: int) -> Iterator[Entry]:
    """Gives what a folder of images says of them, see `read_records`.

    Args:
        folder: path of it.
        limit: largest number of bytes of a line.

    Raises:
        InputError: for a folder that says nothing.
    """
    if (folder / METADATA).is_file():
        for where, read in json_records(folder / METADATA, folder / METADATA, limit):
            yield where, partial(_named, read)
        return
    if (folder / TABLE).is_file():
        yield from _table(folder / TABLE)
        return
    images = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes())
    if not any(path.with_suffix(".txt").is_file() for path in images):
        raise InputError(
            f"{folder} has no {METADATA}, no {TABLE} and no image with its text beside it, such as "
            "a.png and a.txt; give one of them"
        )
    for image in images:
        yield str(image), partial(_beside, image)


def _named(read: Callable[[], Any]) -> Record:
    """Returns a line of metadata, with its files as images."""
    value = read()
    if not isinstance(value, dict):
        raise InputError(f"a {type(value).__name__} where an object belongs, with {NAMES[0]!r}")
    given = next((value[name] for name in NAMES if value.get(name)), None)
    if given is None:
        raise InputError(f"field {NAMES[0]!r} is missing")
    rest = {key: part for key, part in value.items() if key not in (*NAMES, *PICTURES)}
    return {**rest, "images": given if isinstance(given, list) else [given]}


def _table(file: Path) -> Iterator[Entry]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines)
            for row in reader:
                found = {key: text for key, text in row.items() if key and text}
                yield f"{file} line {reader.line_num}", partial(_named, partial(dict, found))
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 at byte {error.start + 1}") from error
    except csv.Error as error:
        raise InputError(f"{file} is not a table: {error}") from error


def _beside(image: Path) -> Record:
    text = image.with_suffix(".txt")
    if not text.is_file():
        raise InputError(f"there is no {text.name} beside it")
    try:
        return {"text": text.read_text(encoding="utf-8-sig").strip(), "images": [str(image)]}
    except UnicodeDecodeError as error:
        raise InputError(f"{text.name} is not UTF-8 at byte {error.start + 1}") from error


def with_paths(record: Record, folder: str, decodes: bool) -> Record:
    """Returns a record of a file, whose images begin at the file's folder.

    Args:
        record: with "images", or images as parts of messages, or none.
        folder: path or address of the folder.
        decodes: whether each image is decoded, to find damaged ones.

    Raises:
        InputError: for an image that is not there, is an address of the web or of another scheme
            than the folder's, or, where images are decoded, is damaged.
    """

    def located(image: object) -> Any:
        if isinstance(image, list):
            return [located(one) for one in image]
        if isinstance(image, dict):
            if isinstance(image.get("bytes"), str):
                raise InputError("'bytes' of an image is a text; give its file as 'path'")
            return {**image, "path": located(image["path"])} if image.get("path") else image
        if not isinstance(image, str):
            raise InputError(f"an image is a {type(image).__name__}; give the path of a file")
        check_local(image)
        if image.startswith(INLINE):
            return image
        image = named_file(image, folder)
        if not is_remote(image) and not Path(image).is_file():
            raise InputError(f"there is no image {image}")
        if decodes:
            open_picture(image)
        return image

    def message(one: dict[str, Any]) -> dict[str, Any]:
        if not has_picture(one):
            return one
        parts = [
            {key: located(value) if key in PATHS else value for key, value in part.items()}
            if part.get("type") == "image"
            else part
            for part in one["content"]
        ]
        return {**one, "content": parts}

    found = {name: located(value) if name in PICTURES else value for name, value in record.items()}
    if "messages" in found:
        found["messages"] = [message(one) for one in found["messages"]]
    return found


def read_records(
    path: str | Path, *, skip_bad: bool = False, max_line_bytes: int = MAX_LINE_BYTES
) -> Records:
    """Reads a file of one JSON object a line or one JSON array, or a folder of images with texts.

    Args:
        path: local, or an address such as "gs://bucket/file.jsonl"; UTF-8. The fields of a line are
            instruction, context and response (as in Dolly; input and output as in Alpaca), prompts
            and responses, messages with role and content (and tools, JSON schemas of functions that
            the model may call), conversations with from and value (as in ShareGPT and LLaVA, whose
            "<image>" marks the place of an image), or text. "images" has the paths of a record's
            images, one or a list, and parts of a message may have them; relative ones begin at the
            file's folder. More fields are ignored, blank lines too. A folder has metadata.jsonl or
            metadata.csv, whose lines name an image by "file_name" (or several by "file_names")
            beside the other fields, as Hugging Face's imagefolder; or a text beside each image,
            a.txt beside a.png.
        skip_bad: leave out bad lines and list them, where they would raise; images are decoded to
            find out.
        max_line_bytes: a longer line is bad.

    Returns:
        The records in the order of the lines, or of the names of images.

    Raises:
        InputError: for the first bad line, an image that is not there or is an address of the web,
            or if there is no good record.
    """
    records = Records()
    file = local_copy(path)
    if file.is_dir():
        entries, folder = folder_entries(file, max_line_bytes), str(file)
    else:
        entries = json_records(file, path, max_line_bytes)
        # Of an address the images are beside it, not beside its copy.
        folder = str(path).rpartition("/")[0] if is_remote(path) else str(file.parent)
    try:
        for where, read in entries:
            try:
                records.rows.append(with_paths(check_record(read()), folder, skip_bad))
            except InputError as error:
                problem = f"{where}: {error}"
                if not skip_bad:
                    raise InputError(problem) from error.__cause__
                records.skipped.append(problem)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if not records.rows:
        bad = f"; all {len(records.skipped)} lines are bad" if records.skipped else ""
        raise InputError(f"{path} holds no records{bad}; give one JSON object a line with {FORMS}")
    return records
