"""Files that torch pickled, read without running what they say."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kmodels.core.errors import InputError
from kmodels.core.files import check_zip
from kmodels.weights.host_torch import to_numpy
from kmodels.weights.tensors import LazyArray


def read(path: Path) -> dict[str, LazyArray]:
    """Returns the tensors of a state dictionary.

    Raises:
        InputError: for a file that is damaged, or holds anything else.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                check_zip(archive, path)
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except Exception:
        # torch's message says how to run the code in the file all the same.
        raise InputError(
            f"{path} is damaged or holds more than tensors; write it again as safetensors"
        ) from None
    if not isinstance(content, dict):
        raise InputError(
            f"{path} holds a {type(content).__name__}; a dictionary of tensors is needed"
        )
    wrong = [name for name, value in content.items() if not _is_plain(name, value)]
    if wrong:
        raise InputError(f"{path}: {wrong[0]!r} is not a tensor; write it again as safetensors")
    return {name: _lazy(tensor) for name, tensor in content.items()}


def _is_plain(name: object, value: object) -> bool:
    return (
        isinstance(name, str)
        and isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_complex())
        # Strides of zero make a tensor of any size out of one value.
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )


def _lazy(tensor: torch.Tensor) -> LazyArray:
    dtype = to_numpy(tensor.new_zeros(())).dtype
    return LazyArray(tuple(tensor.shape), np.dtype(dtype), lambda: to_numpy(tensor))
