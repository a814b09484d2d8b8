"""Keras' optional import of TensorFlow, left to those who use it.

Where a config is written or read, Keras asks whether an object is one of TensorFlow's types, and
imports TensorFlow for that question where it is installed: seconds, a gigabyte and lines of log in
a process that computes with another backend. No public name turns that off. An object of a package
that nobody has imported cannot exist, so the answer is the same without the import.
"""

import sys
from typing import Any

import keras
from keras.src.legacy.saving import json_utils
from keras.src.saving import serialization_lib
from keras.src.utils import rng_utils

# They ask `tf.available and isinstance(obj, tf.<type>)`, and nothing else of it.
ASKING = (serialization_lib, json_utils)


class OnceImported:
    """A module that Keras imports lazily, as available only after somebody else imported it."""

    def __init__(self, lazy: Any):
        self.lazy = lazy

    @property
    def available(self) -> bool:
        """Whether it is imported, and can be."""
        return self.lazy.name in sys.modules and self.lazy.available

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lazy, name)


def leave_unimported() -> None:
    """Has Keras' questions about types import nothing; on Keras' own backend it stays as it is."""
    for module in ASKING:
        if module.tf.name != keras.backend.backend() and not isinstance(module.tf, OnceImported):
            module.tf = OnceImported(module.tf)


def set_random_seed(seed: int) -> None:
    """Calls `keras.utils.set_random_seed`, which seeds what is imported and imports nothing."""
    lazy = rng_utils.tf
    rng_utils.tf = OnceImported(lazy)
    try:
        keras.utils.set_random_seed(seed)
    finally:
        rng_utils.tf = lazy
