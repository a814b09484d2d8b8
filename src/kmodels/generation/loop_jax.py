"""Generation on JAX: two jitted functions, the cache donated from step to step."""

from typing import Any

import jax
import keras
import numpy as np
from jax import numpy as jnp

from kmodels.generation import steps
from kmodels.generation.sampler import Sampler


class Store:
    """Arrays that are replaced, not changed; XLA reuses the memory of a donated one."""

    def __init__(self, keys: list[jax.Array], values: list[jax.Array]):
        self.keys = list(keys)
        self.values = list(values)

    def write(self, layer: int, slot: Any, key: Any, value: Any) -> tuple[Any, Any]:
        """See `kmodels.generation.cache.Store`."""
        at = (0, jnp.asarray(slot, "int32"), 0, 0)
        for held, new in ((self.keys, key), (self.values, value)):
            held[layer] = jax.lax.dynamic_update_slice(held[layer], new, at)
        return self.keys[layer], self.values[layer]


class Loop:
    """The compiled steps of one batch shape."""

    def __init__(self, backbone: Any, sampler: Sampler, batch: int, prompt: int, slots: int):
        self.variables = backbone.variables
        self.shape = (batch, slots, *backbone.cache_shape)
        self.layers = len(backbone.blocks)
        self.dtype = backbone.dtype_policy.compute_dtype

        def scope(weights: list[jax.Array]) -> Any:
            mapping = list(zip(self.variables, weights, strict=True))
            return keras.StatelessScope(state_mapping=mapping)

        def first(weights: Any, keys: Any, values: Any, ids: Any, lengths: Any, draws: Any) -> Any:
            store = Store(keys, values)
            history = jnp.pad(ids, ((0, 0), (0, slots - prompt)))
            with scope(weights):
                tokens = steps.first_token(backbone, sampler, store, ids, lengths, history, draws)
            return tokens, store.keys, store.values, history

        def following(
            weights: Any, keys: Any, values: Any, history: Any, tokens: Any, *rest: Any
        ) -> Any:
            step, lengths, draws = rest
            store = Store(keys, values)
            history = jax.lax.dynamic_update_slice(history, tokens[:, None], (0, prompt + step))
            with scope(weights):
                tokens = steps.next_token(
                    backbone, sampler, store, tokens, step, lengths, history, prompt, draws
                )
            return tokens, store.keys, store.values, history

        self.first = jax.jit(first, donate_argnums=(1, 2))
        self.following = jax.jit(following, donate_argnums=(1, 2, 3))
        self.state: Any = None

    def start(self, token_ids: np.ndarray, lengths: np.ndarray, draws: np.ndarray) -> Any:
        """Takes the prompts in; returns the first tokens."""
        self.weights = [variable.value for variable in self.variables]
        self.lengths = jnp.asarray(lengths)
        keys, values = (
            [jnp.zeros(self.shape, self.dtype) for _ in range(self.layers)] for _ in range(2)
        )
        tokens, *self.state = self.first(self.weights, keys, values, token_ids, self.lengths, draws)
        return tokens

    def step(self, index: int, tokens: Any, draws: np.ndarray) -> Any:
        """Takes in token `index` of each row; returns the next ones."""
        tokens, *self.state = self.following(
            self.weights, *self.state, tokens, np.int32(index), self.lengths, draws
        )
        return tokens

    def finish(self) -> None:
        """Frees the cache."""
        self.state = self.weights = None
