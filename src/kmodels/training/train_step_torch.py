"""One training step on torch: each objective's turn changes the variables themselves."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import torch

from kmodels.core.keras_internals import results_of
from kmodels.core.types import Tree
from kmodels.data.pipeline.arrays import rows
from kmodels.training.loop import Loop
from kmodels.training.objectives import LossFunction, Objective, Objectives, Results
from kmodels.training.step_torch import TaskStep


def advance(
    objectives: Objectives, losses: Mapping[str, LossFunction], batch: Tree, parallel: Any = None
) -> Results:
    """Makes one step of each objective in turn.

    Args:
        objectives: all objectives of the step.
        losses: loss functions by objective.
        batch: a batch of this process.
        parallel: see `kmodels.training.step_torch.TaskStep`.
    """
    results: Results = {}
    for objective in objectives:
        variables = objective.variables
        with _alone(objectives, objective):
            loss, logs = objectives.loss(objective, losses[objective.name], batch, True)
            scaled = objective.optimizer.scale_loss(loss)
            if not scaled.requires_grad:
                raise objectives.unmoved(objective)
            if parallel is None:
                values = [variable.value for variable in variables]
                gradients = torch.autograd.grad(scaled, values, allow_unused=True)
            else:
                gradients = parallel.gradients(scaled, variables, objective.optimizer)
        with torch.no_grad():
            objective.optimizer.apply(list(gradients), variables)
        # The parts that are kept of them must not keep the activations.
        results[objective.name] = _detached((loss, logs))
    with torch.no_grad():
        objectives.move_averages()
    return results


@contextmanager
def _alone(objectives: Objectives, objective: Objective) -> Iterator[None]:
    """Keeps nothing for gradients of variables that are not this objective's.

    The backward pass belongs in the block too: rematerialized layers must see the same.
    """
    own = {id(variable) for variable in objective.variables}
    others = [v.value for v in objectives.variables if id(v) not in own]
    others = [value for value in others if value.requires_grad]
    try:
        for value in others:
            value.requires_grad_(False)
        yield
    finally:
        for value in others:
            value.requires_grad_(True)


def _detached(tree: Tree) -> Any:
    return keras.tree.map_structure(
        lambda x: x.detach() if isinstance(x, torch.Tensor) else x, tree
    )


def evaluate(objectives: Objectives, losses: Mapping[str, LossFunction], batch: Tree) -> Results:
    """Computes each objective's loss outside of training."""
    with torch.no_grad():
        return {p.name: objectives.loss(p, losses[p.name], batch, False) for p in objectives}


def outline(
    objectives: Objectives,
    run: Callable[[Any], list[Any]],
    scope: keras.StatelessScope,
    batch: Tree,
) -> None:
    """Makes one forward pass of all objectives; only variables that are created in it stay."""
    del objectives
    # Dropout draws from torch's own generators, which are to be as if this had not been.
    with torch.no_grad(), torch.random.fork_rng(), scope:
        run(batch)


class Step(Loop, TaskStep, keras.Model):
    """Keras' model whose steps are those above."""

    _players: Objectives
    _loss_functions: Mapping[str, LossFunction]

    def train_step(self, data: Tree) -> Any:
        """Moves the variables; the logs."""
        batch = self._batch(data)
        results = advance(self._players, self._loss_functions, batch, self.parallel)
        return self._logs(self._update_metrics(results, rows(batch)))

    def test_step(self, data: Tree) -> Any:
        """Returns the logs."""
        batch = self._batch(data)
        results = evaluate(self._players, self._loss_functions, batch)
        return self._logs(self._update_metrics(results, rows(batch)))

    def _logs(self, fed: list[Any]) -> Any:
        return results_of(fed) if self.parallel is None else self.parallel.results(fed)

    def train(self, mode: bool = True) -> Any:
        """Tells the models too, for layers that are torch's own: they hang in a dictionary here."""
        for layer in self._players.layers if "_players" in vars(self) else ():
            layer.train(mode)
        return super().train(mode)  # type: ignore[misc]


if TYPE_CHECKING:
    from kmodels.training.train_step import TrainState


class State:
    """An empty state: the values stay in the variables."""

    def write_back(self) -> None:
        """Does nothing: the values are in the variables."""


def compiled(
    losses: Mapping[str, LossFunction], jit_compile: bool | str
) -> Callable[[Any, Any], Results]:
    """Updates a state by a batch, and returns losses and logs by objective."""
    del jit_compile  # Blocks and models are compiled by themselves.

    def run(state: "TrainState", batch: Tree) -> Results:
        state.watch.state()
        return advance(state.objectives, losses, batch)

    return run
