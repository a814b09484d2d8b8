"""The image files of records: a folder of images with texts, and paths beside a file of lines."""

import csv
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.core.files import is_remote, named_file
from kmodels.data.images.any_picture import INLINE, check_local, open_picture
from kmodels.data.images.pictures import suffixes
from kmodels.text.json_lines import Entry, json_records
from kmodels.text.records import PICTURES, Record, has_picture

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
