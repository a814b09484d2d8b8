"""SentencePiece .model files written without the sentencepiece and protobuf packages."""

import struct
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from kmodels.text import gguf
from kmodels.text.pieces import NORMAL, USER_DEFINED, Piece

# Field numbers of sentencepiece_model.proto: TrainerSpec's ids, and the pieces of those ids.
_IDS = {"unk": (40, 45), "bos": (41, 46), "eos": (42, 47), "pad": (43, 48)}
BPE = 2


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative numbers take ten bytes
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _piece(piece: Piece) -> bytes:
    score = _varint(2 << 3 | 5) + struct.pack("<f", piece.score)
    kind = b"" if piece.kind == NORMAL else _number(3, piece.kind)
    return _text(1, _text(1, piece.text.encode()) + score + kind)


def dump(core: Tokenizer, roles: Mapping[str, int | None], marks: Sequence[str] = ()) -> bytes:
    """The content of a .model file.

    Args:
        core: merges pieces, with blanks as SPACE and bytes for what is unknown.
        roles: ids of "bos", "eos" and "pad", None for one that is not there.
        marks: control tokens that the file shall find in texts, as kmodels does.

    Returns:
        Bytes that give the same ids; the scores are the ranks of the merges.

    Raises:
        InputError: for what such a file has no place for.
    """
    instead = "save it as tokenizer.json, or give preprocessor=False"
    found = gguf.describe(core, core.get_vocab_size(), "a SentencePiece file", instead)
    ids = {**roles, "unk": found.unknown}
    pieces = [
        Piece(text, score, USER_DEFINED if text in marks else kind)
        for text, score, kind in zip(found.texts, found.scores, found.kinds, strict=True)
    ]
    trainer = _number(3, BPE) + _number(4, len(pieces)) + _number(35, 1)
    for name, (number, piece) in _IDS.items():
        i = ids[name]
        trainer += _number(number, -1 if i is None else i)
        trainer += b"" if i is None else _text(piece, found.texts[i].encode())
    # Blanks at the ends and runs of them stay as they are; a character map there is none.
    normalizer = _text(1, b"identity") + _number(3, found.space_prefix)
    normalizer += _number(4, 0) + _number(5, 1)
    return b"".join(map(_piece, pieces)) + _text(2, trainer) + _text(3, normalizer)
