"""One step on TensorFlow: a graph that moves the variables themselves, on every replica."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from kmodels.core import malloc
from kmodels.core.types import Tree


class Step:
    """Runs a step.

    Args:
        model: to train or evaluate, compiled.
        kind: "train", "test" or "predict".
        function: of `compiled`.
    """

    last_output = None

    def __init__(self, model: keras.Model, kind: str, function: Callable[..., Any]):
        self._function = function

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, batches: Sequence[Any]) -> Any:
        """Runs a step for each batch and returns the last logs, or all outputs of predict."""
        return self._function(batches)


def compiled(model: keras.Model, kind: str) -> Callable[[Any], Any]:
    """Returns a function of the batches of one execution: the last logs, or all outputs."""
    step, strategy = getattr(model, f"{kind}_step"), model.distribute_strategy

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(step)  # by whose name TensorFlow counts traces
    def one(batch: Tree) -> Any:
        outputs = strategy.run(step, args=(keras.tree.map_structure(_present, batch),))
        return keras.tree.map_structure(reduced, outputs)

    def reduced(output: Any) -> Any:
        replicas = strategy.experimental_local_results(output)
        if len(replicas) == 1:
            return replicas[0]
        return _concatenated(replicas) if kind == "predict" else tf.reduce_mean(replicas, axis=0)

    if not model.run_eagerly:
        one = tf.function(one, reduce_retracing=True, jit_compile=model.jit_compile)
    if model.steps_per_execution == 1:
        return _trimmed(lambda batches: one(batches[0]))

    @tf.autograph.experimental.do_not_convert
    def several(batches: list[Any]) -> Any:
        # One graph: each batch is a call of the same function in it.
        found = [one(batch) for batch in batches]
        if kind != "predict":
            return found[-1]
        return keras.tree.map_structure(lambda *parts: _concatenated(parts), *found)

    return _trimmed(several if model.run_eagerly else tf.function(several, reduce_retracing=True))


def _trimmed(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns the function; the heap is trimmed after its first call, which traces it.

    Graphs are many small pieces, and the heap keeps their room: 55 MiB for a ViT-S/16, which the
    second step and the ones after would need beside it.
    """
    traced = False

    def call(batches: Any) -> Any:
        nonlocal traced
        outputs = function(batches)
        if not traced:
            traced = True
            malloc.malloc_trim()
        return outputs

    return call


def _present(part: Any) -> Any:
    """Returns None for the Optional by which tf.data says that there is nothing."""
    return None if isinstance(part, tf.experimental.Optional) else part


def build(
    model: keras.Model,
    make: Callable[[Callable[[], Tree]], None],
    first: Callable[[], Tree],
    at_once: bool,
) -> None:
    """Has a model make what its first step needs, if its trace will not.

    It does without a strategy. Slots and metrics for several replicas are made in its scope.
    """
    strategy = model.distribute_strategy
    scoped = tf.distribute.has_strategy() or strategy is not tf.distribute.get_strategy()
    if not scoped and not at_once:
        return

    def part_of_one() -> Any:
        # A mean of the replicas' batches, as Keras takes it, would not do for masks.
        local = strategy.experimental_local_results
        return keras.tree.map_structure(lambda x: _present(local(x)[0]), first())

    with strategy.scope():
        make(part_of_one)


def build_to_predict(model: keras.Model, batch: Callable[[], Tree]) -> None:
    """Does nothing: the first step makes what is missing."""


def joined(parts: Sequence[Any]) -> Any:
    """Returns the predictions of all batches as one array, ragged where their shapes differ."""
    whole = _concatenated(parts)
    return whole if isinstance(whole, tf.RaggedTensor | tf.SparseTensor) else whole.numpy()


def _concatenated(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=list(parts))
    if isinstance(parts[0], tf.RaggedTensor):
        return tf.concat(parts, axis=0)
    if not parts[0].shape.rank:
        return tf.stack(parts)
    if tf.executing_eagerly():
        shapes = np.array([part.shape[1:].as_list() for part in parts])
        differing = np.flatnonzero(np.ptp(shapes, axis=0))
        if differing.size:
            ragged: Any = tf.RaggedTensor
            rank = int(differing[-1]) + 1
            parts = [ragged.from_tensor(part, ragged_rank=rank) for part in parts]
    return tf.concat(parts, axis=0)
