"""safetensors files written tensor by tensor, so that a model is never in memory twice."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kmodels.weights.readers import _DTYPES
from kmodels.weights.tensors import LazyArray

_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write_safetensors(
    path: Path,
    tensors: Mapping[str, LazyArray | np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a safetensors file, reading one tensor at a time.

    Args:
        path: path of the file to make.
        tensors: by name; each is asked for its values once, in the order given. Arrays are values.
        metadata: text for the header.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[np.dtype(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in tensors.items():
            values = tensor if isinstance(tensor, np.ndarray) else tensor.read()
            array = np.ascontiguousarray(values, dtype=tensor.dtype)
            if array.shape != tensor.shape and array.size != 1:
                raise ValueError(f"{name} was announced as {tensor.shape} but is {array.shape}")
            # NumPy's buffers do not know bfloat16; its bytes are the same as any other's.
            file.write(array.reshape(-1).view(np.uint8).data)
