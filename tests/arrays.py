"""Arrays of any backend as NumPy's."""

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.weights import read_safetensors, write_safetensors


def to_numpy(x: Any) -> np.ndarray:
    """The values of a tensor or a variable; of bfloat16 as float32 where NumPy compares none.

    Of outputs by name it is the first. Keras' `convert_to_numpy` warns on JAX when it is handed a
    variable.
    """
    if isinstance(x, dict):
        return to_numpy(next(iter(x.values())))
    values = keras.ops.convert_to_numpy(x.value if isinstance(x, keras.Variable) else x)
    old = np.lib.NumpyVersion(np.__version__) < "2.0.0"
    return values.astype("float32") if old and values.dtype.name == "bfloat16" else values


def assert_equal(found: Any, wanted: Any, atol: float = 0.0) -> None:
    """Two dictionaries or two rows of arrays, tensors or variables have the same values."""
    if isinstance(found, dict):
        assert set(found) == set(wanted)
        found, wanted = found.items(), [wanted[name] for name in found]
    else:
        found = [(getattr(one, "path", ""), one) for one in found]
    for (name, one), other in zip(found, wanted, strict=True):
        one, other = to_numpy(one), to_numpy(other)
        if atol:
            np.testing.assert_allclose(one, other, rtol=0, atol=atol, err_msg=name)
        else:
            np.testing.assert_array_equal(one, other, err_msg=name)


def read_npz(path: Any) -> dict[str, np.ndarray]:
    """All arrays of an `.npz` file, which is closed again."""
    with np.load(path) as held:
        return dict(held)


def remove_tensor(folder: Path, name: str) -> None:
    """Removes a tensor of several files of safetensors, and from their list."""
    listed = folder / "model.safetensors.index.json"
    index = json.loads(listed.read_text())
    file = folder / index["weight_map"].pop(name)
    left = {key: x for key, x in read_safetensors(file).items() if key != name}
    write_safetensors(folder / "left", left, {"format": "pt"})
    (folder / "left").replace(file)  # a model may map the one before into its memory
    listed.write_text(json.dumps(index))
