"""Generation on TensorFlow: graphs over variables that hold the cache."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from kmodels.core.types import Tensor
from kmodels.generation.cache import Passes, ring_shapes


class Store:
    """Variables that are assigned in place."""

    def __init__(self, rings: list[tf.Variable]):
        self.rings = rings

    def fill(self, ring: int, content: Any) -> None:
        """See `kmodels.generation.cache.Store`."""
        self.rings[ring].assign(content)

    def write(self, ring: int, slot: Any, new: Any) -> Any:
        """See `kmodels.generation.cache.Store`."""
        variable = self.rings[ring]
        variable[:, slot : slot + 1].assign(new)
        return variable.value()

    def scatter(self, ring: int, slots: Tensor, new: Any) -> Any:
        """See `kmodels.generation.cache.Store`."""
        variable = self.rings[ring]
        rows = tf.broadcast_to(tf.range(slots.shape[0])[:, None], slots.shape)
        # One copy a pass; `scatter_nd_update` would have each later reading copy the variable.
        whole = tf.tensor_scatter_nd_update(variable, tf.stack([rows, slots], axis=-1), new)
        variable.assign(whole)
        return whole


class Loop:
    """The graphs of one batch shape; XLA off, since it copies the cache in every step."""

    def __init__(self, passes: Passes, jit_compile: bool | str = "auto"):
        batch, slots = passes.batch, passes.slots
        shapes = ring_shapes(passes.backbone, batch, slots, passes.ahead)
        contents = [tf.zeros(shape, passes.backbone.compute_dtype) for shape in shapes]
        if passes.sampler.looks_back:
            contents.append(tf.zeros((batch, slots), "int32"))
        self.rings = [tf.Variable(content, trainable=False) for content in contents]
        store = Store(self.rings)
        ints, floats = tf.TensorSpec((batch,), "int32"), tf.TensorSpec((batch,), "float32")
        signature = [ints, tf.TensorSpec((), "int32"), ints, floats]
        self.first = tf.function(partial(passes.first_token, store), autograph=False)
        self.following = tf.function(
            partial(passes.next_token, store), input_signature=signature, autograph=False
        )
        self.several = tf.function(partial(passes.next_tokens, store), autograph=False)

    def start(
        self,
        token_ids: np.ndarray,
        lengths: np.ndarray,
        draws: np.ndarray,
        images: Mapping[str, np.ndarray] | None = None,
    ) -> Any:
        """Takes the prompts in; returns the first tokens."""
        self.lengths = tf.constant(lengths)
        seen = None if images is None else {n: tf.constant(x) for n, x in images.items()}
        return self.first(tf.constant(token_ids), self.lengths, tf.constant(draws), seen)

    def step(self, index: int, tokens: Any, draws: np.ndarray) -> Any:
        """Takes in token `index` of each row; returns the next ones."""
        return self.following(tokens, tf.constant(index), self.lengths, tf.constant(draws))

    def extend(self, tokens: Any, starts: np.ndarray, draws: np.ndarray) -> Any:
        """Takes in some tokens of each row; returns the one behind each."""
        return self.several(tf.constant(tokens), tf.constant(starts), tf.constant(draws))

    def reorder(self, order: np.ndarray) -> None:
        """See `kmodels.generation.generate.Loop`."""
        for ring in self.rings:
            ring.assign(tf.gather(ring, order))

    def finish(self) -> None:
        """Keeps the variables for the next prompts of this shape."""
