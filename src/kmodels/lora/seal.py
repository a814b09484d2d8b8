"""A hash in an adapter's file over all that `load_adapter` takes from its directory.

It stands in the header of the safetensors file, where PEFT does not look. A program that writes the
file again writes it without the hash, whereas a list of hashes beside it would stay and be wrong.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kmodels.core.errors import InputError
from kmodels.lora.peft import Described

KEY = "kmodels_sha256"


def digest(described: Described, arrays: Mapping[str, np.ndarray]) -> str:
    """Returns sha256 over the settings and over name, dtype, shape and bytes of each array."""
    found = hashlib.sha256(json.dumps(described.counted(), sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        found.update(f"\n{name} {array.dtype} {array.shape}\n".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def verify(
    metadata: Mapping[str, str],
    described: Described,
    arrays: Mapping[str, np.ndarray],
    origin: Path,
) -> None:
    """Compares a directory with the hash in its file, where there is one.

    Args:
        metadata: metadata of the file's header.
        described: its settings, as read.
        arrays: as read.
        origin: the directory, for the message.

    Raises:
        InputError: where a bit of what counts is not as it was written.
    """
    if KEY in metadata and metadata[KEY] != digest(described, arrays):
        raise InputError(
            f"{origin} is damaged: settings or weights are not those that were saved (sha256); "
            "copy it again"
        )
