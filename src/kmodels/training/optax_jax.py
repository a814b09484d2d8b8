"""The state of an optax optimizer as arrays by name, and a step over them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, keystr

from kmodels.core.types import GradientTransformation

Arrays = Mapping[str, jax.Array]


@dataclass(frozen=True)
class Structure:
    """The pytree of a state, and the generator of each leaf that is a random key, else None."""

    tree: Any
    generators: list[Any]


def begin(
    transformation: GradientTransformation, params: Arrays
) -> tuple[dict[str, Any], Structure]:
    """See `OptaxBackend`; random keys are arrays of their words."""
    state = transformation.init(dict(params))
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    values = {_name(path, params): jnp.asarray(_words(leaf)) for path, leaf in leaves}
    keys = [jax.random.key_impl(leaf) if _is_key(leaf) else None for _, leaf in leaves]
    return values, Structure(tree, keys)


def _name(path: tuple[Any, ...], params: Arrays) -> str:
    """Returns `<weight>:<rest of the path>` for a leaf of one weight, the path for others."""
    of = [entry for entry in path if isinstance(entry, DictKey) and entry.key in params]
    rest = [entry for entry in path if entry not in of]
    text = keystr(tuple(rest), simple=True, separator="/")
    return f"{of[-1].key}:{text}" if of else text


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _words(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def step(
    transformation: GradientTransformation,
    structure: Structure,
    gradients: Arrays,
    state: Arrays,
    params: Arrays,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """See `OptaxBackend`; the weights are updated as by `optax.apply_updates`."""
    leaves = [
        value if generator is None else jax.random.wrap_key_data(value, impl=generator)
        for generator, value in zip(structure.generators, state.values(), strict=True)
    ]
    before = structure.tree.unflatten(leaves)
    updates, after = transformation.update(dict(gradients), before, dict(params))
    moved = jax.tree.map(lambda p, u: jnp.asarray(p + u).astype(p.dtype), dict(params), updates)
    values = [_words(leaf) for leaf in jax.tree.leaves(after)]
    return moved, dict(zip(state, values, strict=True))
