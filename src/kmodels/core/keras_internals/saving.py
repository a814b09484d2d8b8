"""The arrays that Keras saves of a model, without a file."""

from typing import Any

import keras
from keras.src.saving import saving_lib


def saved_arrays(model: keras.Model) -> dict[str, Any]:
    """Returns what Keras would write to a .weights.h5 file, mostly variables, by path."""
    names = _Names()
    saving_lib._save_state(model, names, None, "", set())
    return names.found


class _Names(saving_lib.H5IOStore):
    """Keras' file of weights without a file: it notes what it is asked to write."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: object = None) -> Any:
        return _Entry(f"{path}/vars".lstrip("/"), self.found)


class _Entry(dict):
    def __init__(self, path: str, found: dict[str, Any]):
        super().__init__()
        self._path, self._found = path, found

    def __setitem__(self, name: str, value: object) -> None:
        self._found[f"{self._path}/{name}"] = value
