"""The state of a loop on JAX: arrays that travel through the jitted step."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import jax
import keras

from kmodels.core.traced import Watch
from kmodels.core.types import Tree
from kmodels.training.step.metrics import Results
from kmodels.training.step.objectives import LossFunction, Objectives, WatchedScope
from kmodels.training.step.train_step_jax import Values, advance, by_id, outline, take

Arrays = tuple[list[Any], ...]


class State:
    """Arrays of variables and slots, or none where they lie in the variables."""

    objectives: Objectives
    watch: Watch

    def __init__(self) -> None:
        self._arrays: Arrays | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        jax.tree_util.register_pytree_node(cls, cls._flatten, cls._unflatten)

    @property
    def arrays(self) -> Arrays:
        """Those of the models, then those of each optimizer."""
        if self._arrays is None:
            return tuple([v.value for v in kind] for kind in _kinds(self.objectives))
        return self._arrays

    @arrays.setter
    def arrays(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def write_back(self) -> None:
        """See `TrainState`; nothing is copied, so that they are there once."""
        arrays, self._arrays = self._arrays, None
        for variables, values in zip(_kinds(self.objectives), arrays or (), strict=False):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def _flatten(self) -> tuple[Arrays, Objectives]:
        return self.arrays, self.objectives

    @classmethod
    def _unflatten(cls, objectives: Objectives, arrays: Arrays) -> Self:
        made = cls(objectives)  # type: ignore[call-arg]
        made._arrays = tuple(arrays)
        return made


def compiled(
    losses: Mapping[str, LossFunction], jit_compile: bool | str
) -> Callable[[Any, Any], Results]:
    """Takes a state, which is moved, and a batch, and returns what the objectives returned."""
    functions: dict[Any, Callable[[Arrays, Any], tuple[Results, Arrays]]] = {}

    def run(state: State, batch: Tree) -> Results:
        key = objectives, _ = state.objectives, state.watch.state()
        arrays, batch = state.arrays, _distributed(batch)
        if key not in functions:
            _check(objectives, losses, batch)
            functions[key] = _function(objectives, losses, arrays, jit_compile is not False)
        results, state.arrays = functions[key](arrays, batch)
        return results

    return run


def _function(
    objectives: Objectives, losses: Mapping[str, LossFunction], arrays: Arrays, jit: bool
) -> Callable[[Arrays, Any], tuple[Results, Arrays]]:
    function = partial(_run, objectives, losses)
    if not jit:
        return function
    placed: dict[str, Any] = {}
    if keras.distribution.distribution() is not None:
        placed["out_shardings"] = (None, jax.tree.map(lambda array: array.sharding, arrays))
    return jax.jit(function, donate_argnums=0, **placed)


def _run(
    objectives: Objectives, losses: Mapping[str, LossFunction], arrays: Arrays, batch: Tree
) -> tuple[Results, Arrays]:
    kinds = _kinds(objectives)
    values: Values = {}
    for variables, held in zip(kinds, arrays, strict=True):
        values |= by_id(variables, held)
    results, values = advance(objectives, losses, values, batch)
    return results, tuple(take(variables, values) for variables in kinds)


def _check(objectives: Objectives, losses: Mapping[str, LossFunction], batch: Tree) -> None:
    """Raises `InputError` for what a jitted step would pass over."""

    def turns(batch: Tree) -> list[Any]:
        return [objectives.loss(p, losses[p.name], batch, True)[0] for p in objectives]

    scope = WatchedScope([], collect_losses=True)
    outline(objectives, turns, scope, batch)
    scope.check(objectives.variables)


def _kinds(objectives: Objectives) -> list[list[Any]]:
    return [objectives.built_for, *(objective.optimizer.variables for objective in objectives)]


def _distributed(batch: Tree) -> Any:
    distribution = keras.distribution.distribution()
    if distribution is None:
        return batch

    def place(array: jax.Array) -> Any:
        layout = distribution.get_data_layout(array.shape)
        return keras.distribution.distribute_tensor(array, layout)

    return jax.tree.map(place, batch)
