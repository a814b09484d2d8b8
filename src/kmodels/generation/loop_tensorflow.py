"""Generation on TensorFlow: graphs over variables that hold the cache."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmodels.core.types import Tensor
from kmodels.generation import cache
from kmodels.generation.cache import ring_shapes
from kmodels.generation.sampler import Sampler


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

    def __init__(
        self,
        backbone: keras.Model,
        sampler: Sampler,
        batch: int,
        prompt: int,
        slots: int,
        jit_compile: bool | str = "auto",
        ahead: int = 0,
    ):
        dtype = backbone.dtype_policy.compute_dtype
        contents = [tf.zeros(shape, dtype) for shape in ring_shapes(backbone, batch, slots, ahead)]
        if sampler.looks_back:
            contents.append(tf.zeros((batch, slots), "int32"))
        self.rings = [tf.Variable(content, trainable=False) for content in contents]
        store = Store(self.rings)
        ints, floats = tf.TensorSpec((batch,), "int32"), tf.TensorSpec((batch,), "float32")

        @tf.function(autograph=False)
        def first(
            ids: tf.Tensor,
            lengths: tf.Tensor,
            draws: tf.Tensor,
            images: dict[str, tf.Tensor] | None,
        ) -> Any:
            return cache.first_token(
                backbone, sampler, store, ids, lengths, slots, draws, ahead, images
            )

        @tf.function(
            input_signature=[ints, tf.TensorSpec((), "int32"), ints, floats], autograph=False
        )
        def following(
            tokens: tf.Tensor, step: tf.Tensor, lengths: tf.Tensor, draws: tf.Tensor
        ) -> Any:
            return cache.next_token(
                backbone, sampler, store, tokens, step, lengths, prompt, slots, draws
            )

        @tf.function(autograph=False)
        def several(tokens: tf.Tensor, starts: tf.Tensor, draws: tf.Tensor) -> Any:
            return cache.next_tokens(backbone, sampler, store, tokens, starts, slots, draws, ahead)

        self.first = first
        self.following = following
        self.several = several

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
