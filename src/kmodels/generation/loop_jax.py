"""Generation on JAX: jitted functions, the cache donated from step to step."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import keras
import numpy as np
from jax import numpy as jnp

from kmodels.core.types import Tensor
from kmodels.generation.cache import Passes


class Store:
    """Arrays that are replaced, not changed; XLA reuses the memory of a donated one."""

    def __init__(self, rings: dict[int, jax.Array]):
        self.rings = dict(rings)

    def fill(self, ring: int, content: Any) -> None:
        """See `kmodels.generation.cache.Store`."""
        self.rings[ring] = content

    def write(self, ring: int, slot: Any, new: Any) -> Any:
        """See `kmodels.generation.cache.Store`."""
        content = self.rings[ring]
        self.rings[ring] = jax.lax.dynamic_update_slice_in_dim(content, new, slot, 1)
        return self.rings[ring]

    def scatter(self, ring: int, slots: Tensor, new: Any) -> Any:
        """See `kmodels.generation.cache.Store`."""
        rows = jnp.arange(slots.shape[0])[:, None]
        self.rings[ring] = self.rings[ring].at[rows, slots].set(new, unique_indices=True)
        return self.rings[ring]


class Loop:
    """The compiled steps of one batch shape."""

    def __init__(self, passes: Passes, jit_compile: bool | str = "auto"):
        self.variables = passes.backbone.variables

        def stateless(run: Callable[..., Any]) -> Callable[..., Any]:
            def body(weights: list[jax.Array], rings: dict[int, jax.Array], *inputs: Any) -> Any:
                store = Store(rings)
                mapping = list(zip(self.variables, weights, strict=True))
                with keras.StatelessScope(state_mapping=mapping):
                    tokens = run(store, *inputs)
                return tokens, store.rings

            return body

        self.first = jax.jit(stateless(passes.first_token))
        self.following = jax.jit(stateless(passes.next_token), donate_argnums=1)
        self.several = jax.jit(stateless(passes.next_tokens), donate_argnums=1)
        self.rings: Any = None

    def start(
        self,
        token_ids: np.ndarray,
        lengths: np.ndarray,
        draws: np.ndarray,
        images: Mapping[str, np.ndarray] | None = None,
    ) -> Any:
        """Takes the prompts in; returns the first tokens."""
        self.weights = [variable.value for variable in self.variables]
        put = _put_rows(len(token_ids))
        self.lengths = put(lengths)
        tokens, self.rings = self.first(
            self.weights, {}, put(token_ids), self.lengths, put(draws), images
        )
        return tokens

    def step(self, index: int, tokens: Tensor, draws: np.ndarray) -> Any:
        """Takes in token `index` of each row; returns the next ones."""
        tokens, self.rings = self.following(
            self.weights, self.rings, tokens, np.int32(index), self.lengths, draws
        )
        return tokens

    def extend(self, tokens: Tensor, starts: np.ndarray, draws: np.ndarray) -> Any:
        """Takes in some tokens of each row; returns the one behind each."""
        tokens, self.rings = self.several(self.weights, self.rings, tokens, starts, draws)
        return tokens

    def reorder(self, order: np.ndarray) -> None:
        """See `kmodels.generation.generate.Loop`."""
        self.rings = _taken(self.rings, order)

    def finish(self) -> None:
        """Frees the cache."""
        self.rings = self.weights = None


def _put_rows(rows: int) -> Callable[[np.ndarray], jax.Array]:
    """Returns what places rows of a batch: each device of a mesh takes its own, if they divide.

    Several processes compute all rows, since each one needs all tokens.
    """
    mesh = keras.distribution.distribution()
    if mesh is None or jax.process_count() > 1:
        return jnp.asarray
    if rows % getattr(mesh, "num_model_replicas", mesh.device_mesh.shape[0]):
        return jnp.asarray
    layout = mesh.get_data_layout((rows,)).backend_layout
    return partial(jax.device_put, device=layout)


@partial(jax.jit, donate_argnums=0)
def _taken(rings: dict[int, jax.Array], order: jax.Array) -> dict[int, jax.Array]:
    return {ring: jnp.take(content, order, axis=0) for ring, content in rings.items()}
