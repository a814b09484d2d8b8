"""One step on torch: it moves the variables themselves."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import keras
import numpy as np
import torch

from kmodels.core.types import Tree


class Step:
    """Runs a step, with the model in the mode of torch that it needs.

    Args:
        model: to train or evaluate, compiled.
        kind: "train", "test" or "predict".
        function: of `compiled`.
    """

    last_output = None

    def __init__(self, model: keras.Model, kind: str, function: Callable[..., Any]):
        self._model, self._kind, self._function = model, kind, function

    def __enter__(self) -> Self:
        self._model.train(self._kind == "train")
        return self

    def __exit__(self, *error: object) -> None:
        self._model.eval()

    def __call__(self, batches: Sequence[Any]) -> Any:
        """Runs a step for the only batch and returns its logs, or its outputs."""
        return self._function(batches[0])


def compiled(model: keras.Model, kind: str) -> Callable[[Any], Any]:
    """Returns a function of a batch that returns logs, or outputs."""
    step = getattr(model, f"{kind}_step")
    if kind != "train":
        step = _without_gradients(step)
    return torch.compile(step) if model.jit_compile else step


def _without_gradients(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(batch: Tree) -> Any:
        with torch.no_grad():
            return step(batch)

    return run


def build(
    model: keras.Model,
    make: Callable[[Callable[[], Tree]], None],
    first: Callable[[], Tree],
    at_once: bool,
) -> None:
    """Has a model make what its first step needs; no trace makes it."""
    make(first)


def build_to_predict(model: keras.Model, batch: Callable[[], Tree]) -> None:
    """Does nothing: the first step makes what is missing."""


def joined(parts: Sequence[Any]) -> np.ndarray:
    """Returns the predictions of all batches as one array of NumPy."""
    return np.concatenate([keras.ops.convert_to_numpy(part) for part in parts])
