"""Records to train on, read from files in their usual forms; errors name file, line and field."""

import csv
import itertools
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kmodels.core.arguments import checked
from kmodels.core.errors import InputError, check_whole, pluralize, shown
from kmodels.core.files import is_remote, named_file, paths_below
from kmodels.core.remote import local_copy
from kmodels.data.images.any_picture import INLINE, check_local, open_picture
from kmodels.data.images.sources import (
    check_stems,
    is_image_file,
    unread_files,
    warn_of_files,
)

Record = dict[str, Any]
_PAIRS = (
    ("prompts", "responses"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "response"),
    ("instruction", "output"),
)
# The names of the images of a record, one or a list.
PICTURES = ("images", "image")
FORMS = (
    "instruction and response (or output), prompts and responses, messages, conversations, or text"
)
ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "model",
    "model": "model",
    "tool": "tool",
}
# The names of a turn's author in ShareGPT's files.
AUTHORS = {
    **{name: name for name in ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "claude"), "assistant"),
    "observation": "tool",
}
# Fields of a turn that do not change its text.
_UNUSED = ("markdown", "text")
# Fields of other packages that are a part of the prompt there, and that no form here reads.
UNREAD = {
    *("system", "system_prompt", "history", "functions"),
    *("audio", "audios", "video", "videos"),
}
# The names of the context of an instruction; the first one that has a text is read.
CONTEXTS = ("context", "input")
# Fields of texts, of which each form reads some.
FIELDS = {*itertools.chain(*_PAIRS), *CONTEXTS}
# Fields by which other packages leave a turn out of the loss, if they are false.
_LEARNT = ("loss", "train", "training")
# LLaVA's placeholder of an image in a text.
IMAGE = "<image>"


@dataclass(frozen=True)
class Records:
    """The records of a file or a folder.

    Attributes:
        rows: each one of {"text"}, {"prompts", "responses"}, {"instruction", "context",
            "response"} or {"messages": [{"role", "content"}, ...]}, the last with "tools" and
            "chat_template_kwargs" if the line has them, and each with "images" or "image" if the
            line has these. A message keeps its other fields, such as "tool_calls".
        skipped: one line for each bad record that was left out.
    """

    rows: list[Record] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)


def check_record(value: object) -> Record:
    """Returns one record in its usual form, a dictionary as in `Records.rows`.

    Raises:
        InputError: names the field that is missing, is not text, or is empty.
    """
    if not isinstance(value, dict):
        raise InputError(f"a {type(value).__name__} where an object belongs, with {FORMS}")
    if "conversations" in value and "messages" not in value:
        value = _of_conversations(value)
    return {**_texts(value), **{name: value[name] for name in PICTURES if has_value(value, name)}}


def _of_conversations(value: dict[str, Any]) -> dict[str, Any]:
    """Returns a record of ShareGPT or LLaVA with messages."""
    turns = value["conversations"]
    if not (isinstance(turns, list) and turns and all(isinstance(one, dict) for one in turns)):
        raise InputError("field 'conversations' is not a list of objects with from and value")
    messages = []
    for place, turn in enumerate(turns):
        at = f"conversations[{place}]."
        author, said = (n if n in turn else m for n, m in (("from", "role"), ("value", "content")))
        role = AUTHORS.get(check_text(turn, author, at=at))
        if role is None:
            raise InputError(
                f"field '{at}{author}' is {turn[author]!r}; known are {', '.join(AUTHORS)}"
            )
        rest = {key: part for key, part in turn.items() if key not in (author, said, *_UNUSED)}
        messages.append({**rest, "role": role, "content": check_text(turn, said, at=at)})
    system = value.get("system")
    if system and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": check_text(value, "system")})
    return {**value, **_placed(value, messages)}


def _placed(value: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns messages with the record's images in place of their placeholders."""
    name = next((name for name in PICTURES if has_value(value, name)), None)
    if name is None:
        return {"messages": messages}
    pictures = value[name] if isinstance(value[name], list) else [value[name]]
    marks = sum(message["content"].count(IMAGE) for message in messages)
    if not marks:
        return {"messages": messages}
    if marks != len(pictures):
        raise InputError(f"there are {len(pictures)} images and {marks} marks {IMAGE}")
    images = iter(pictures)
    for message in messages:
        texts = message["content"].split(IMAGE)
        if len(texts) == 1:
            continue
        parts: list[dict[str, Any]] = []
        for i, text in enumerate(texts):
            if i:
                parts.append({"type": "image", "path": next(images)})
            if text.strip():
                parts.append({"type": "text", "text": text.strip("\n")})
        message["content"] = parts
    return {"messages": messages, **dict.fromkeys(PICTURES)}


def has_value(value: Mapping[str, Any], name: str) -> bool:
    """Returns True if a record has something in a field."""
    part = value.get(name)
    return part is not None and not (isinstance(part, str | list | tuple | dict) and not part)


def holds_pictures(record: object) -> bool:
    """Returns True if a record or one of its messages has images."""
    if not isinstance(record, dict):
        return False
    messages = record.get("messages")
    return any(has_value(record, name) for name in PICTURES) or (
        isinstance(messages, list | tuple) and any(map(has_picture, messages))
    )


def has_picture(message: object) -> bool:
    """Returns True if a message's content is in parts of which one is an image."""
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list | tuple) and any(
        isinstance(part, dict) and part.get("type") == "image" for part in content
    )


def unread_fields(value: Mapping[str, Any]) -> set[str]:
    """Returns the names of fields that change a record in other packages and are not read here.

    Texts beside messages are not named, since many data sets have the first message as a prompt,
    too.
    """
    names = set(UNREAD)
    turns = value.get("messages")
    if "messages" not in value and "conversations" in value:
        names, turns = names - {"system"}, value["conversations"]
    elif "messages" not in value:
        pair = _pair(value) or ()
        names |= FIELDS - {*pair, _context(value) if "instruction" in pair else None}
    unread = {name for name in names if has_value(value, name)}
    for turn in turns or ():
        unread |= {f"messages.{name}" for name in _LEARNT if turn.get(name) == 0}
    return unread


def has_messages(value: Mapping[str, Any]) -> bool:
    """Returns True if a record is a chat in one of the forms of `check_record`."""
    lists = any(isinstance(value[name], list) for name in _pair(value) or ())
    return "messages" in value or "conversations" in value or lists


def _pair(value: Mapping[str, Any]) -> tuple[str, str] | None:
    return next((pair for pair in _PAIRS if all(name in value for name in pair)), None)


def _context(value: Mapping[str, Any]) -> str | None:
    return next((name for name in CONTEXTS if value.get(name) not in (None, "")), None)


def _texts(value: dict[str, Any]) -> Record:
    if "messages" in value:
        return {"messages": check_messages(value["messages"]), **template_fields(value)}
    pair = _pair(value)
    if pair is not None and has_messages(value):
        return {"messages": _of_parts(value, *pair), **template_fields(value)}
    if extras := [name for name, part in template_fields(value).items() if part]:
        raise InputError(f"{' and '.join(extras)} need messages; the record has texts")
    if pair is None:
        if "text" in value:
            return {"text": check_text(value, "text")}
        raise InputError(_lacking(value))
    prompt, response = pair
    if prompt != "instruction":
        return {"prompts": check_text(value, prompt), "responses": check_text(value, response)}
    context = _context(value)
    return {
        "instruction": check_text(value, "instruction"),
        "context": check_text(value, context, may_be_empty=True) if context else "",
        "response": check_text(value, response),
    }


def _of_parts(value: dict[str, Any], prompt: str, response: str) -> list[dict[str, Any]]:
    """Returns TRL's conversation of a prompt and a response, of which the response is learnt."""
    for name in (prompt, response):
        if not isinstance(value[name], list):
            kind = type(value[name]).__name__
            raise InputError(f"field {name!r} is a {kind} beside messages; give messages in both")
    asked = [
        {**one, "weight": 0}
        if isinstance(one, dict) and ROLES.get(str(one.get("role"))) == "model"
        else one
        for one in value[prompt]
    ]
    return check_messages([*asked, *value[response]], f"{prompt} + {response}")


def _lacking(value: dict[str, Any]) -> str:
    for prompt, response in _PAIRS:
        if prompt in value:
            others = [second for first, second in _PAIRS if first == prompt]
            return f"field {' or '.join(others)!r} is missing beside {prompt!r}"
        if response in value:
            return f"field {prompt!r} is missing beside {response!r}"
    return f"the fields {', '.join(value) or 'of an empty object'} are not a record: give {FORMS}"


def check_text(value: dict[str, Any], name: str, may_be_empty: bool = False, at: str = "") -> str:
    """Returns the text of a field of a record, or of a part of it at the place `at`.

    Raises:
        InputError: if it is missing, not a text, or empty, unless it may be.
    """
    text = value.get(name)
    if not isinstance(text, str):
        kind = "missing" if name not in value else f"a {type(text).__name__}, not text"
        raise InputError(f"field '{at}{name}' is {kind}")
    if not text.strip() and not may_be_empty:
        raise InputError(f"field '{at}{name}' is empty")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise InputError(f"field '{at}{name}' holds half of a surrogate pair")
    return text


def template_fields(value: dict[str, Any]) -> Record:
    """Returns the fields of a record of messages that a chat template reads besides these.

    They are "tools", JSON schemas, and "chat_template_kwargs", an object, as far as it has them.
    """
    fields = {}
    tools, variables = value.get("tools"), value.get("chat_template_kwargs")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools, object_pairs_hook=_once) if tools.strip() else None
        except (json.JSONDecodeError, RecursionError) as error:
            raise InputError(f"field 'tools' is not JSON: {error}") from error
    if tools is not None:
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise InputError("field 'tools' is not a list of JSON schemas")
        fields["tools"] = tools
    if variables is not None:
        if not isinstance(variables, dict):
            raise InputError("field 'chat_template_kwargs' is not an object of a template's values")
        fields["chat_template_kwargs"] = variables
    return fields


def check_messages(messages: object, name: str = "messages") -> list[dict[str, Any]]:
    """Returns messages with the roles "system", "user", "model" and "tool".

    Args:
        messages: a list of objects with "role" and "content" or "tool_calls", and "weight" 0 for a
            reply that is not learnt, as in OpenAI's files.
        name: name of the field, for errors.

    Raises:
        InputError: for anything else, or roles in an order that no chat has.
    """
    if not isinstance(messages, list) or not messages:
        raise InputError(f"field {name!r} is not a list of messages")
    checked = []
    for place, message in enumerate(messages):
        at = f"{name}[{place}]."
        if not isinstance(message, dict):
            raise InputError(f"field '{name}[{place}]' is not an object with role and content")
        role = check_text(message, "role", at=at)
        if role not in ROLES:
            raise InputError(f"field '{at}role' is {role!r}; known are {', '.join(ROLES)}")
        fields = {key: value for key, value in message.items() if value is not None}
        if fields.get("weight", 1) not in (0, 1):
            raise InputError(f"field '{at}weight' is {fields['weight']!r}; give 0 or 1")
        checked.append({**fields, "role": ROLES[role], **_content(fields, at)})
    if any(m["role"] == "tool" or "tool_calls" in m for m in checked):
        return checked  # their order is the template's matter
    turns = [m["role"] for m in checked if m["role"] != "system"]
    if any(m["role"] == "system" for m in checked[1:]):
        raise InputError(f"field {name!r} has a system message that is not the first")
    if turns != (["user", "model"] * len(turns))[: len(turns)] or not turns:
        raise InputError(f"field {name!r} must go user, assistant, user, assistant")
    return checked


def _content(message: dict[str, Any], at: str) -> dict[str, Any]:
    """Returns the text of a message as a field; none for parts or a call of tools."""
    content = message.get("content")
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        return {}
    if content is None and message.get("tool_calls"):
        return {}
    return {"content": check_text(message, "content", bool(message.get("tool_calls")), at)}


MAX_LINE_BYTES = 4 * 2**20
_MARK = b"\xef\xbb\xbf"
# Bytes that are searched for the first character, which tells an array from lines.
_BEGIN = 4096
# The first bytes of files that other packages read as records.
_PACKED = {
    **{b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"},
    **{b"PK\x03\x04": "zip", b"PAR1": "Parquet", b"ARROW1": "Arrow"},
}
# The place of a record, and a function that returns it or raises InputError.
Entry = tuple[str, Callable[[], Any]]


def json_records(file: Path, name: object, limit: int = MAX_LINE_BYTES) -> Iterator[Entry]:
    """Yields the records of a UTF-8 file: of its lines that are not blank, or of its one array.

    Lines end with a line feed alone: JSON strings may hold U+2028 and other characters at which
    `str.splitlines` ends a line.

    Raises:
        InputError: for an array that is not JSON, or a compressed or binary file.
    """
    with file.open("rb") as opened:
        begin = opened.read(_BEGIN)
    if kind := next((kind for start, kind in _PACKED.items() if begin.startswith(start)), None):
        raise InputError(f"{name} is a {kind} file; unpack it, or write it as JSON lines")
    begin = begin.removeprefix(_MARK).lstrip()
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
        yield f"{name} record {number}", lambda value=value: value


def _parse(line: bytes, limit: int) -> Any:
    if len(line.rstrip(b"\r\n")) > limit:
        raise InputError(f"longer than {limit} bytes")
    try:
        return json.loads(line.decode("utf-8"), object_pairs_hook=_once)
    except InputError:
        raise
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise InputError(f"not JSON at {at}column {error.colno}: {error.msg}") from error
    except ValueError as error:  # a whole number of thousands of digits
        raise InputError(f"not JSON that Python reads: {error}") from error
    except RecursionError as error:
        raise InputError("not a record: nested too deeply") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of JSON; raises InputError for a key that it has twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"field {twice!r} is there twice; give each once")
    return value


METADATA, TABLE = "metadata.jsonl", "metadata.csv"
# Hugging Face's names for one image of a line, and for several.
NAMES = ("file_name", "file_names")
# What a part of a message may name its image by, besides base64.
PATHS = ("image", "path", "url")


def folder_entries(folder: Path, limit: int) -> Iterator[Entry]:
    """Yields the records of a folder of images, see `read_records`."""
    paths = paths_below(folder)
    tables = [folder / name for name in (METADATA, TABLE) if (folder / name).is_file()]
    if len(tables) > 1:
        raise InputError(f"{folder} has {METADATA} and {TABLE}; leave one")
    images = [folder.joinpath(*parts) for parts in paths if is_image_file(parts[-1])]
    for table in tables:
        named: set[str] = set()
        entries = _table(table) if table.name == TABLE else json_records(table, table, limit)
        for where, read in entries:
            yield where, partial(_named, read, named)
        listed = {os.path.normpath(folder / name) for name in named}
        others = [image.name for image in images if os.path.normpath(image) not in listed]
        if named and others:
            warnings.warn(
                f"{shown(folder)}: {pluralize(len(others), 'image')} left out, which {table.name} "
                f"does not name: {', '.join(others[:8])}",
                stacklevel=3,
            )
        return
    if not any(path.with_suffix(".txt").is_file() for path in images):
        raise InputError(
            f"{folder} has no {METADATA}, no {TABLE} and no image with its text beside it, such as "
            "a.png and a.txt; give one of them"
        )
    warn_of_files(folder, unread_files(paths))
    check_stems(folder, images)
    for image in images:
        yield str(image), partial(_beside, image)


def _named(read: Callable[[], Any], named: set[str]) -> Record:
    """Returns a line of metadata, with its files as images, whose names are added to `named`."""
    value = read()
    if not isinstance(value, dict):
        raise InputError(f"a {type(value).__name__} where an object belongs, with {NAMES[0]!r}")
    fields = [name for name in (*NAMES, *PICTURES) if has_value(value, name)]
    if not fields or fields[0] not in NAMES:
        raise InputError(f"field {NAMES[0]!r} is missing")
    if len(fields) > 1:
        raise InputError(f"fields {' and '.join(map(repr, fields))} name images; give one of them")
    images = value[fields[0]] if isinstance(value[fields[0]], list) else [value[fields[0]]]
    named.update(image for image in images if isinstance(image, str))
    return {**{key: part for key, part in value.items() if key not in fields}, "images": images}


def _table(file: Path) -> Iterator[Entry]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines)
            names = Counter(filter(None, reader.fieldnames or ()))
            if twice := [name for name, count in names.items() if count > 1]:
                raise InputError(f"{file} has two columns {twice[0]!r}; give each once")
            for row in reader:
                yield f"{file} line {reader.line_num}", partial(_row, row)
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 at byte {error.start + 1}") from error
    except csv.Error as error:
        raise InputError(f"{file} is not a table: {error}") from error


def _row(row: dict[str | None, Any]) -> Record:
    if None in row:
        raise InputError("there are more cells than columns; put texts with a comma in quotes")
    return {name: text for name, text in row.items() if name and text}


def _beside(image: Path) -> Record:
    text = image.with_suffix(".txt")
    if not text.is_file():
        raise InputError(f"there is no {text.name} beside it")
    try:
        return {"text": text.read_text(encoding="utf-8-sig").strip(), "images": [str(image)]}
    except UnicodeDecodeError as error:
        raise InputError(f"{text.name} is not UTF-8 at byte {error.start + 1}") from error


def with_paths(record: Record, folder: str, decodes: bool) -> Record:
    """Returns a record of a file, whose images begin at the file's folder or address.

    Raises:
        InputError: for an image that is not there, is an address of the web or of another scheme
            than the folder's, or is damaged, if images are decoded to find that.
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

    fields = {name: located(value) if name in PICTURES else value for name, value in record.items()}
    for name in ("messages", "prompt"):
        if isinstance(fields.get(name), list):
            fields[name] = [message(one) for one in fields[name]]
    return fields


@checked
def read_records(
    path: str | Path, *, skip_bad: bool = False, max_line_bytes: int = MAX_LINE_BYTES
) -> Records:
    """Reads a file of one JSON object a line or one JSON array, or a folder of images with texts.

    Args:
        path: local, or an address such as "gs://bucket/file.jsonl"; UTF-8. The fields of a line are
            instruction, context and response (as in Dolly; input and output as in Alpaca), prompts
            and responses, prompt and completion as two lists of messages (as in TRL, where replies
            in the prompt are not learnt), messages with role and content, conversations with from
            and value (as in ShareGPT and LLaVA, whose "<image>" marks the place of an image), or
            text. A message with weight 0 is not learnt. Next to messages there may be tools, JSON
            schemas of functions that the model may call, and chat_template_kwargs, values of the
            template's variables. "images" has the paths of a record's images, one or a list, and
            parts of a message may have them; relative ones begin at the file's folder. Fields with
            a meaning in other packages that the form does not read, such as a system text, a
            history or a second answer, are named in a warning; other fields are ignored, blank
            lines too. A folder has metadata.jsonl or metadata.csv, whose lines name an image by
            "file_name" (or several by "file_names") and has the other fields, as in Hugging Face's
            imagefolder; or a text for each image, a.txt for a.png.
        skip_bad: leave out bad lines and list them instead of raising; images are decoded for
            that.
        max_line_bytes: a longer line is bad.

    Returns:
        The records in the order of the lines, or of the names of images.

    Raises:
        InputError: for the first bad line, an image that is not there or is an address of the web,
            or if there is no good record.
    """
    check_whole("max_line_bytes", max_line_bytes)
    records, unread = read_rows(
        path,
        lambda value: [check_record(value)],
        unread_fields,
        FORMS,
        skip_bad=skip_bad,
        limit=max_line_bytes,
    )
    warn_of_unread(path, unread, stacklevel=4)
    return records


def read_rows(
    path: str | Path,
    check: Callable[[object], list[Record]],
    unread_of: Callable[[Record], set[str]],
    forms: str,
    *,
    skip_bad: bool = False,
    limit: int = MAX_LINE_BYTES,
) -> tuple[Records, set[str]]:
    """Returns the records of a file or a folder, and the names of fields that are not read.

    Args:
        path: see `read_records`, as for skip_bad and limit.
        check: returns the records of one value in their usual form, or raises `InputError`.
        unread_of: returns the names of fields of a value that are not read.
        forms: forms of a record, for errors.
        skip_bad: leave out bad lines.
        limit: largest number of bytes of a line.
    """
    records, unread = Records(), set()
    file = local_copy(path)
    if file.is_dir():
        entries, folder = folder_entries(file, limit), str(file)
    else:
        entries = json_records(file, path, limit)
        # Of an address the images are beside it, not beside its copy.
        folder = str(path).rpartition("/")[0] if is_remote(path) else str(file.parent)
    try:
        for where, read in entries:
            try:
                value = read()
                records.rows.extend([with_paths(x, folder, skip_bad) for x in check(value)])
                unread |= unread_of(value)
            except InputError as error:
                problem = f"{where}: {error}"
                if not skip_bad:
                    raise InputError(problem) from error.__cause__
                records.skipped.append(problem)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if not records.rows:
        bad = f"; all {len(records.skipped)} lines are bad" if records.skipped else ""
        raise InputError(f"{path} holds no records{bad}; give one JSON object a line with {forms}")
    return records, unread


def warn_of_unread(path: str | Path, names: set[str], stacklevel: int) -> None:
    """Warns of fields of a file that mean something in other packages and nothing here, if any."""
    if names:
        fields = " and ".join(sorted(names))
        warnings.warn(f"{path} has {fields}, which kmodels does not read", stacklevel=stacklevel)
