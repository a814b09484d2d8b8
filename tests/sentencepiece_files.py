"""SentencePiece models written field by field, without the package or code of kmodels."""

import struct
from collections.abc import Sequence

NORMAL, UNKNOWN, CONTROL = 1, 2, 3
BPE, WORD = 2, 3


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number: int, value: bytes | float | int) -> bytes:
    """One field of a protobuf message."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


def sentencepiece_model(
    pieces: Sequence[tuple[str, float, int]], kind: int = BPE, prefix: bool = False
) -> bytes:
    """The content of a .model file of (text, score, sort of piece)."""
    listed = b"".join(
        field(1, field(1, text.encode()) + field(2, score) + field(3, sort))
        for text, score, sort in pieces
    )
    control = {text for text, _, sort in pieces if sort == CONTROL}
    named = [(46, "<bos>"), (47, "<eos>"), (48, "<pad>")]
    roles = b"".join(field(number, text.encode()) for number, text in named if text in control)
    trainer = field(2, field(3, kind) + field(35, int(kind == BPE)) + roles)
    return listed + trainer + field(3, field(1, b"identity") + field(3, int(prefix)) + field(4, 0))


def words_model(words: Sequence[str], special: Sequence[str] = ()) -> bytes:
    """A model of whole words: <pad>, <bos>, <eos> and <unk> are 0 to 3, then what is special."""
    control = [(text, 0.0, CONTROL) for text in ("<pad>", "<bos>", "<eos>")]
    more = [(text, 0.0, CONTROL) for text in special]
    rest = [("\u2581" + word, -1.0, NORMAL) for word in words]
    pieces = [*control, ("<unk>", 0.0, UNKNOWN), *more, *rest]
    return sentencepiece_model(pieces, WORD, prefix=True)
