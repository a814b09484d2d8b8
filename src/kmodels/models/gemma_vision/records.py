"""Records with images: their texts, their images, and the positions of the images in the texts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.types import Data
from kmodels.data.images.any_picture import check_local
from kmodels.models.blocks.records import one_by_one
from kmodels.text.chat_template import Rendered
from kmodels.text.records import PICTURES, has_picture
from kmodels.text.templates import Part, Written
from kmodels.text.texts import as_text, in_graph

# === Records ===

# What a part of a message may name its image by.
SOURCES = ("image", "path", "url", "base64")


class Sample(NamedTuple):
    """A record without its images, and these.

    Attributes:
        record: a text, or fields of texts, or messages with {"type": "image"} for each image in
            their content.
        images: images in the order of their places, in any form that `open_picture` reads.
    """

    record: Any
    images: list[Any]


def samples(x: Data, reader: str, marker: str) -> tuple[list[Sample], bool]:
    """Returns records one by one, and whether there was more than one to begin with.

    Args:
        x: input of a preprocessor of images and texts.
        reader: name of the model, for errors.
        marker: placeholder of an image in texts.

    Raises:
        InputError: for anything but a record, or columns of different lengths.
    """
    if isinstance(x, Mapping):
        x, is_batch = _rows(x)
    elif isinstance(x, list | tuple) and any(isinstance(one, Mapping) for one in x):
        x, is_batch = list(x), True
    else:
        texts, is_batch = one_by_one(x, reader)
        return [Sample(text, []) for text in texts], is_batch
    return [_sample(one, reader, marker) for one in x], is_batch


def _rows(x: Mapping[str, Any]) -> tuple[list[Any], bool]:
    """Returns the records of columns, or the one record that x is."""
    columns = {name: value for name, value in x.items() if value is not None}
    texts = {name: value for name, value in columns.items() if name not in PICTURES}
    single = all(map(_is_single, texts.values()))
    if single:
        return [columns], False
    lists = {name: _listed(value) for name, value in columns.items()}
    if len(sizes := {len(column) for column in lists.values()}) > 1:
        raise InputError(
            "the columns differ in length: "
            + ", ".join(f"{name} {len(column)}" for name, column in lists.items())
        )
    return [{name: lists[name][row] for name in lists} for row in range(sizes.pop())], True


def _is_single(value: object) -> bool:
    """Returns whether this is a text, or the messages of one chat, and not a column of them."""
    if isinstance(value, str | bytes):
        return True
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(one, Mapping) for one in value)
    return getattr(value, "ndim", 0) == 0


def _listed(value: Iterable[Any]) -> list[Any]:
    return value.tolist() if _is_objects(value) else list(value)


def _is_zero(value: object) -> bool:
    """Returns whether this is a text in an array, as tf.data gives one."""
    return isinstance(value, np.ndarray) and value.ndim == 0


def _is_objects(value: object) -> TypeGuard[np.ndarray]:
    return isinstance(value, np.ndarray) and value.dtype.kind == "O"


def _sample(one: object, reader: str, marker: str) -> Sample:
    if not isinstance(one, Mapping):
        return Sample(one_by_one(one, reader)[0][0], [])
    pictures = [picture for name in PICTURES for picture in _several(one.get(name))]
    rest = {
        name: as_text(value) if isinstance(value, bytes) or _is_zero(value) else value
        for name, value in one.items()
        if name not in PICTURES and value is not None
    }
    if "messages" in rest:
        messages, images = parts_of(rest["messages"], pictures, marker)
        return Sample({**rest, "messages": messages}, images)
    if pictures and not rest.keys() & {"prompts", "prompt", "instruction", "text"}:
        # transformers' processor fills in the same if there is no text.
        rest = {"prompts": " ".join([marker] * len(pictures)), **rest}
    record = one_by_one([rest], reader)[0][0]
    if pictures and isinstance(record.get("text"), str) and marker not in record["text"]:
        # A caption, which is learnt behind its images.
        prompt = " ".join([marker] * len(pictures))
        record = {"prompts": prompt, "responses": record["text"]}
    return Sample(record, pictures)


def _several(value: object) -> list[Any]:
    """Returns images that may be none, one, or several."""
    if value is None:
        return []
    if _is_objects(value):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return list(value)
    shape = getattr(value, "shape", ())
    return list(cast("Any", value)) if len(shape) == 4 else [value]


def parts_of(
    messages: object, images: Sequence[Any], marker: str
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Returns messages without their images, and the images in the order of their places.

    Args:
        messages: whose content is a text, or a list of {"type": "text", "text"} and {"type":
            "image"}, the latter with its image as "image", "path", "url" or "base64", or without.
        images: images of the places that name none, in order. Where no message has a place, they
            stand before the first text of the user, as in TRL.
        marker: placeholder of an image in contents that are texts.

    Raises:
        InputError: for parts of another type, or images for other places than there are.
    """
    messages = [dict(one) if isinstance(one, Mapping) else one for one in _plain(messages)]
    if not _has_place(messages, marker):
        messages = _with_places(messages, len(images))
    left = list(images)
    all_images: list[Any] = []
    for place, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            for _ in range(min(content.count(marker), len(left))):
                all_images.append(left.pop(0))
        elif isinstance(content, list | tuple):
            parts = [_part(part, place, left, all_images) for part in content]
            messages[place] = {**message, "content": parts}
    # What is left has no place, and is counted beside the markers of the text.
    return messages, all_images + left


def _has_place(messages: Sequence[Any], marker: str) -> bool:
    contents = [one.get("content") for one in messages if isinstance(one, dict)]
    marked = any(isinstance(content, str) and marker in content for content in contents)
    return marked or any(map(has_picture, messages))


def _with_places(messages: list[Any], count: int) -> list[Any]:
    first = next(
        (
            place
            for place, one in enumerate(messages)
            if isinstance(one, dict) and one.get("role") == "user"
        ),
        None,
    )
    if first is None or not count:
        return messages
    content = messages[first].get("content")
    texts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
    opened = {**messages[first], "content": [*({"type": "image"} for _ in range(count)), *texts]}
    return [*messages[:first], opened, *messages[first + 1 :]]


def _part(part: object, place: int, left: list[Any], images: list[Any]) -> dict[str, Any]:
    """Returns a part of a message without its image, which moves to `images`."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if not isinstance(part, Mapping) or kind != "image":
        said = f"a part of type {kind!r}" if isinstance(part, Mapping) else repr(part)[:40]
        raise InputError(
            f'messages[{place}] has {said}; a part is {{"type": "text", "text": ...}} or '
            '{"type": "image", "image": ...}'
        )
    source = next((name for name in SOURCES if part.get(name) is not None), None)
    if source is None:
        if not left:
            raise InputError(
                f'messages[{place}] has an image without its file; give it as "image" in the '
                'part, or in the list "images" beside the messages'
            )
        images.append(left.pop(0))
        return {"type": "image"}
    picture = part[source]
    if source == "url" and isinstance(picture, str):
        check_local(picture)
    if source == "base64" and isinstance(picture, str) and not picture.startswith("data:"):
        picture = f"data:image/any;base64,{picture}"
    images.append(picture)
    return {"type": "image"}


def _plain(messages: object) -> list[Any]:
    if isinstance(messages, np.ndarray):
        messages = messages.tolist()
    if not isinstance(messages, list | tuple):
        raise InputError("field 'messages' is not a list of messages")
    return list(messages)


# === Positions of images in a text ===


def text_of(written: Written | Rendered) -> str:
    """Returns the whole text that a template wrote."""
    if isinstance(written, Rendered):
        return written.text
    return "".join(part.text for part in written.parts)


def expand(
    written: Written | Rendered, marker: str, soft: str, images: Sequence[str], place: int
) -> Written | Rendered:
    """Returns the text of a template, with the tokens of an image for each marker.

    Args:
        written: a record as text.
        marker: placeholder of an image.
        soft: text of the token that an image fills, which the record must not contain.
        images: texts of the images, in order.
        place: number of the record, for errors.

    Raises:
        InputError: for more or fewer markers than images, or a soft token in the record.
    """
    text = text_of(written)
    if soft in text and soft != marker:
        raise InputError(
            f"example {place} holds {soft} itself, which an image fills; write {marker} where an "
            "image belongs"
        )
    if (count := text.count(marker)) != len(images):
        raise InputError(
            f"example {place} has {count} {marker} in its text and {len(images)} images; write "
            f"{marker} once for each image"
        )
    if not images:
        return written
    if isinstance(written, Written):
        left = iter(images)
        parts = [Part(_filled(part.text, marker, left), part.learn) for part in written.parts]
        return Written(parts, written.ends)
    pieces = text.split(marker)
    shifts, at, moved = [], 0, 0
    for piece, image in zip(pieces, images, strict=False):
        at += len(piece)
        moved += len(image) - len(marker)
        shifts.append((at, moved))
        at += len(marker)

    def shifted(character: int) -> int:
        return character + max((by for start, by in shifts if start < character), default=0)

    spans = [(shifted(start), shifted(end)) for start, end in written.replies]
    return Rendered(_filled(text, marker, iter(images)), spans)


def _filled(text: str, marker: str, left: Iterator[str]) -> str:
    first, *rest = text.split(marker)
    return first + "".join(next(left) + piece for piece in rest)


# === Symbolic records, inside tf.data ===


def check_graph(x: Data, crops: bool) -> None:
    """Raises `InputError` for symbolic images whose number is not known before they are read.

    Args:
        x: input of a preprocessor.
        crops: whether images may get crops, whose number depends on their shape.
    """
    images = list(_images(x).values())
    if not any(in_graph(leaf) for leaf in images):
        return
    if crops:
        raise InputError(
            "images with do_pan_and_scan cannot be preprocessed inside tf.data's map; give fit the "
            "records, or an iterable of batches"
        )


def without_images(x: Data) -> tuple[Any, int | None]:
    """Returns symbolic texts without their images, and how many images each of them has.

    The number is None for ragged images, which are as many as the row with the most of them has.

    Args:
        x: texts, or columns of texts and images, as `keras.KerasTensor`.

    Raises:
        InputError: for images without texts, or of another number of axes.
    """
    images = _images(x)
    if not isinstance(x, Mapping) or not images:
        return x, 0
    texts = {name: value for name, value in x.items() if name not in images}
    if not texts:
        raise InputError("a preprocessor in tf.data got images without texts; give prompts too")
    axes = len(keras.tree.flatten(texts)[0].shape)
    count: int | None = 0
    for name, spec in images.items():
        shape = (1, *spec.shape[axes:])[-4:]
        if len(shape) != 4 or len(spec.shape) > axes + 4:
            raise InputError(
                f"{name!r} has shape {tuple(spec.shape)} in tf.data; give (height, width, 3) or "
                "(images, height, width, 3) for each text"
            )
        count = None if count is None or shape[0] is None else count + shape[0]
    return texts, count


def _images(x: Data) -> dict[str, Any]:
    """Returns the columns of images in the input of a preprocessor."""
    columns = x if isinstance(x, Mapping) else {}
    return {name: columns[name] for name in PICTURES if columns.get(name) is not None}
