"""One training step on JAX: values in, values out, each objective by `jax.value_and_grad`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import jax
import keras
from jax.extend.core import Literal
from jax.numpy import floating, issubdtype
from jax.typing import ArrayLike

from kmodels.core.keras_internals import results_of
from kmodels.core.traced import Watch
from kmodels.core.types import Tree
from kmodels.data.pipeline.arrays import rows
from kmodels.training.loop import Loop
from kmodels.training.objectives import (
    LossFunction,
    Objective,
    Objectives,
    Results,
    WatchedScope,
    once,
    unseeded,
)

# The value of each variable by its id.
Values = dict[int, Any]


def by_id(variables: Iterable[Any], values: Iterable[Any]) -> Values:
    """Returns the value of each variable."""
    return {id(v): value for v, value in zip(variables, values, strict=True)}


def take(variables: Iterable[Any], values: Values) -> list[Any]:
    """Returns the values of these variables, in their order."""
    return [values[id(v)] for v in variables]


def advance(
    objectives: Objectives, losses: Mapping[str, LossFunction], values: Values, batch: Tree
) -> tuple[Results, Values]:
    """Makes one step of each objective in turn, as a pure function of values and batch."""
    results: Results = {}
    for objective in objectives:
        optimizer = objective.optimizer
        trained = take(objective.variables, values)
        slots = take(optimizer.variables, values)

        def scaled(
            trained: list[Any], objective: Objective = objective, values: Values = values
        ) -> Any:
            values = {**values, **by_id(objective.variables, trained)}
            with _scope([*objectives.variables, *objective.optimizer.variables], values) as scope:
                loss, logs = objectives.loss(objective, losses[objective.name], batch, True)
                scaled = objective.optimizer.scale_loss(loss)
            moved = {id(v): scope.get_current_value(v) for v in objectives.variables}
            return scaled, (loss, logs, moved)

        gradient = jax.value_and_grad(scaled, has_aux=True)
        (_, (loss, logs, moved)), gradients = gradient(trained)
        trained, slots = optimizer.stateless_apply(slots, gradients, trained)
        values = {**values, **moved, **by_id(objective.variables, trained)}
        values |= by_id(optimizer.variables, slots)
        results[objective.name] = loss, logs
    if moved := objectives.averages.moved:
        counted = objectives.objectives[0].optimizer.variables
        with _scope([*objectives.variables, *counted], values) as scope:
            objectives.move_averages()
        values |= {id(v): scope.get_current_value(v) for v in moved}
    return results, values


def evaluate(
    objectives: Objectives, losses: Mapping[str, LossFunction], values: Values, batch: Tree
) -> tuple[Results, Values]:
    """Computes each objective's loss outside of training."""
    with _scope(objectives.variables, values) as scope:
        results = {p.name: objectives.loss(p, losses[p.name], batch, False) for p in objectives}
    return results, values | {id(v): scope.get_current_value(v) for v in objectives.variables}


def outline(
    objectives: Objectives,
    run: Callable[[Any], list[Any]],
    scope: keras.StatelessScope,
    batch: Tree,
) -> None:
    """Traces one turn of all objectives without computing it, and checks that gradients reach.

    Args:
        objectives: objectives of the step.
        run: returns the objectives' losses of a batch; its assignments stay within the scope.
        scope: to run it in.
        batch: a batch of the data.

    Raises:
        InputError: if a loss does not depend on the variables of its objective, or a random number
            has no seed.
    """
    variables = once(v for objective in objectives for v in objective.variables)

    def traced(values: Sequence[Any], batch: Tree) -> Any:
        with scope:
            for variable, value in zip(variables, values, strict=True):
                scope.add_update((variable, value))
            return run(batch)

    shapes = jax.tree.map(_shape, ([v.value for v in variables], batch))
    try:
        # Around the other scope, so that what is made in it gets its values out here.
        with keras.StatelessScope():
            program = jax.make_jaxpr(traced)(*shapes).jaxpr
    except ValueError as error:
        if "[JAX RNG]" in str(error):
            raise unseeded() from None
        raise
    for objective, loss in zip(objectives if variables else (), program.outvars, strict=False):
        own = {id(v) for v in objective.variables}
        first = [x for v, x in zip(variables, program.invars, strict=False) if id(v) in own]
        if not _reaches(program, first, loss):
            raise objectives.unmoved(objective)


def _reaches(program: Any, start: list[Any], end: object) -> bool:
    """Returns True if a gradient can reach `end`; calls of other programs pass it on."""
    reached = set(start)
    for equation in program.eqns:
        if equation.primitive.name == "stop_gradient":
            continue
        if any(not isinstance(x, Literal) and x in reached for x in equation.invars):
            # Whole numbers and truth values have no gradient.
            reached |= {x for x in equation.outvars if issubdtype(x.aval.dtype, floating)}
    return not isinstance(end, Literal) and end in reached


def _shape(x: ArrayLike) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)  # type: ignore[union-attr]
    return jax.ShapeDtypeStruct(x.shape, dtype)  # type: ignore[union-attr]


def _scope(variables: list[Any], values: Values) -> keras.StatelessScope:
    mapping = [(v, values[id(v)]) for v in variables]
    return keras.StatelessScope(state_mapping=mapping, collect_losses=True)


class Step(Loop, keras.Model):
    """Keras' model whose steps are those above."""

    _players: Objectives
    _loss_functions: Mapping[str, LossFunction]

    def train_step(self, state: tuple, data: Tree) -> Any:
        """Takes weights, other variables, slots and metrics, and returns logs and all of them."""
        batch = self._batch(data)
        kinds = self._kinds()
        values = {}
        for variables, arrays in zip(kinds, state[:3], strict=True):
            values |= by_id(variables, arrays)
        results, values = advance(self._players, self._loss_functions, values, batch)
        logs, metrics = self._measure(results, batch, state[3])
        return logs, (*(take(variables, values) for variables in kinds), metrics)

    def test_step(self, state: tuple, data: Tree) -> Any:
        """Takes weights, other variables and metrics, and returns logs and all of them."""
        batch = self._batch(data)
        kinds = self._kinds()[:2]
        values = by_id(kinds[0], state[0]) | by_id(kinds[1], state[1])
        results, values = evaluate(self._players, self._loss_functions, values, batch)
        logs, metrics = self._measure(results, batch, state[2])
        return logs, (*(take(variables, values) for variables in kinds), metrics)

    def _kinds(self) -> list[list[Any]]:
        optimizer = self.optimizer
        return [self.trainable_variables, self.non_trainable_variables, optimizer.variables]

    def _measure(
        self, results: Results, batch: Tree, values: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        mapping = list(zip(self.metrics_variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            logs = results_of(self._update_metrics(results, rows(batch)))
        return logs, [scope.get_current_value(v) for v, _ in mapping]


Arrays = tuple[list[Any], ...]


class State:
    """Arrays of variables and slots, or none while they are in the variables."""

    objectives: Objectives
    watch: Watch

    def __init__(self) -> None:
        self._arrays: Arrays | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        jax.tree_util.register_pytree_node(
            cls, lambda state: (state.arrays, state.objectives), cls._unflatten
        )

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

    @classmethod
    def _unflatten(cls, objectives: Objectives, arrays: Arrays) -> Self:
        state = cls(objectives)  # type: ignore[call-arg]
        state._arrays = tuple(arrays)
        return state


def compiled(
    losses: Mapping[str, LossFunction], jit_compile: bool | str
) -> Callable[[Any, Any], Results]:
    """Updates a state by a batch, and returns losses and logs by objective."""
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
    for variables, kind in zip(kinds, arrays, strict=True):
        values |= by_id(variables, kind)
    results, values = advance(objectives, losses, values, batch)
    return results, tuple(take(variables, values) for variables in kinds)


def _check(objectives: Objectives, losses: Mapping[str, LossFunction], batch: Tree) -> None:
    """Raises `InputError` for changes that a jitted step would ignore."""

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
