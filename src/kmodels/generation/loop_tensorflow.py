"""Generation on TensorFlow: two graphs over variables that hold the cache."""

from typing import Any

import numpy as np
import tensorflow as tf

from kmodels.generation import steps
from kmodels.generation.sampler import Sampler


class Store:
    """Variables that are assigned in place."""

    def __init__(self, keys: list[tf.Variable], values: list[tf.Variable]):
        self.keys = keys
        self.values = values

    def write(self, layer: int, slot: Any, key: Any, value: Any) -> tuple[Any, Any]:
        """See `kmodels.generation.cache.Store`."""
        whole = []
        for held, new in ((self.keys[layer], key), (self.values[layer], value)):
            held[:, slot : slot + new.shape[1]].assign(new)
            whole.append(held.value())
        return whole[0], whole[1]


class Loop:
    """The graphs of one batch shape; XLA off, since it copies the cache in every step."""

    def __init__(self, backbone: Any, sampler: Sampler, batch: int, prompt: int, slots: int):
        shape = (batch, slots, *backbone.cache_shape)
        dtype = backbone.dtype_policy.compute_dtype
        keys, values = (
            [tf.Variable(tf.zeros(shape, dtype), trainable=False) for _ in backbone.blocks]
            for _ in range(2)
        )
        store = Store(keys, values)
        history = tf.Variable(tf.zeros((batch, slots), "int32"), trainable=False)
        ints, floats = tf.TensorSpec((batch,), "int32"), tf.TensorSpec((batch,), "float32")

        @tf.function(
            input_signature=[tf.TensorSpec((batch, prompt), "int32"), ints, floats], autograph=False
        )
        def first(ids: Any, lengths: Any, draws: Any) -> Any:
            history[:, :prompt].assign(ids)
            return steps.first_token(backbone, sampler, store, ids, lengths, history.value(), draws)

        @tf.function(
            input_signature=[ints, tf.TensorSpec((), "int32"), ints, floats], autograph=False
        )
        def following(tokens: Any, step: Any, lengths: Any, draws: Any) -> Any:
            slot = prompt + step
            history[:, slot : slot + 1].assign(tokens[:, None])
            return steps.next_token(
                backbone, sampler, store, tokens, step, lengths, history.value(), prompt, draws
            )

        self.first = first
        self.following = following

    def start(self, token_ids: np.ndarray, lengths: np.ndarray, draws: np.ndarray) -> Any:
        """Takes the prompts in; returns the first tokens."""
        self.lengths = tf.constant(lengths)
        return self.first(tf.constant(token_ids), self.lengths, tf.constant(draws))

    def step(self, index: int, tokens: Any, draws: np.ndarray) -> Any:
        """Takes in token `index` of each row; returns the next ones."""
        return self.following(tokens, tf.constant(index), self.lengths, tf.constant(draws))

    def finish(self) -> None:
        """The variables stay for the next prompts of this shape."""
