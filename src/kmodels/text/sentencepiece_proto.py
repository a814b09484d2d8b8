"""The messages of a SentencePiece .model file, as far as kmodels reads and writes them."""

import functools
from typing import Any

from kmodels.data.formats.protobuf import Field, message_classes

# Field numbers and defaults of sentencepiece_model.proto. Its enumerations stand as whole numbers,
# which are the same on the wire, and its texts as bytes, which may be told not to be UTF-8.
_TABLE = {
    "Piece": (
        Field("piece", 1, "bytes"),
        Field("score", 2, "float"),
        Field("type", 3, "int32", default="1"),
    ),
    "TrainerSpec": (
        Field("model_type", 3, "int32", default="1"),
        Field("vocab_size", 4, "int32"),
        Field("byte_fallback", 35, "bool"),
        Field("unk_id", 40, "int32"),
        Field("bos_id", 41, "int32"),
        Field("eos_id", 42, "int32"),
        Field("pad_id", 43, "int32"),
        Field("unk_piece", 45, "bytes"),
        Field("bos_piece", 46, "bytes"),
        Field("eos_piece", 47, "bytes"),
        Field("pad_piece", 48, "bytes"),
    ),
    "NormalizerSpec": (
        Field("name", 1, "bytes"),
        Field("precompiled_charsmap", 2, "bytes"),
        Field("add_dummy_prefix", 3, "bool", default="true"),
        Field("remove_extra_whitespaces", 4, "bool", default="true"),
        Field("escape_whitespaces", 5, "bool", default="true"),
    ),
    "ModelProto": (
        Field("pieces", 1, "Piece", repeated=True),
        Field("trainer_spec", 2, "TrainerSpec"),
        Field("normalizer_spec", 3, "NormalizerSpec"),
    ),
}


@functools.cache
def model_class() -> Any:
    """Returns the class of the message that such a file is."""
    return message_classes("kmodels.sentencepiece", _TABLE, "proto2")["ModelProto"]
