"""Texts in which images have places: markers become the tokens that stand for an image."""

from collections.abc import Iterator, Sequence

from kmodels.core.errors import InputError
from kmodels.text.chat_template import Rendered
from kmodels.text.templates import Part, Written


def text_of(written: Written | Rendered) -> str:
    """Returns all of what a template wrote."""
    if isinstance(written, Rendered):
        return written.text
    return "".join(part.text for part in written.parts)


def expand(
    written: Written | Rendered, marker: str, soft: str, images: Sequence[str], place: int
) -> Written | Rendered:
    """Returns what a template wrote, with the tokens of an image for each marker.

    Args:
        written: a record as text.
        marker: text that stands where an image belongs.
        soft: text of the token that an image fills, of which the record may hold none itself.
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
