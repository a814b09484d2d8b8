"""SentencePiece models as keras-hub's tokenizers take them: a path, the content, or base64."""

import base64
import binascii
from pathlib import Path

from kmodels.core.errors import InputError
from kmodels.core.remote import local_copy

# keras-hub takes a text that is longer, and in base64, for the content of a file.
LONGEST_PATH = 2048


def content_of(proto: str | Path | bytes) -> tuple[bytes, object]:
    """Returns the content of a SentencePiece model, and its name in errors.

    Args:
        proto: the path of a file, its content, or that in base64.

    Raises:
        InputError: for a file that cannot be read.
    """
    if isinstance(proto, bytes):
        return proto, "proto"
    if not isinstance(proto, str | Path):
        raise InputError(
            f"proto is a {type(proto).__name__}; give the path of a SentencePiece model, or its "
            "content as bytes"
        )
    if isinstance(proto, str) and len(proto) > LONGEST_PATH:
        try:
            return base64.b64decode(proto, validate=True), "proto"
        except binascii.Error:
            pass
    try:
        return local_copy(proto).read_bytes(), proto
    except OSError as error:
        raise InputError(f"{str(proto)[:200]} cannot be read: {error.strerror}") from error
