"""The same step in a loop of your own: a state, a step, and the way back into the models."""

import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import keras

from kmodels.core import traced
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError
from kmodels.core.types import Tree
from kmodels.data.pipeline import arrays
from kmodels.training.step.metrics import Results
from kmodels.training.step.objectives import ONLY, LossFunction, Objectives, Train


class State(Protocol):
    """The state that one backend keeps from step to step."""

    def write_back(self) -> None:
        """Puts into the models and optimizers what the last finished step left."""
        ...


class TrainStateBackend(Protocol):
    """Steps in a loop of your own on one backend."""

    @property
    def State(self) -> type[State]:
        """Is the base of `TrainState`."""
        ...

    def compiled(
        self, losses: Mapping[str, LossFunction], jit_compile: bool | str
    ) -> Callable[[Any, Any], Results]:
        """Makes the step: from a state, which it moves, and a batch to what the losses returned."""
        ...


_native = backend_module("kmodels.training.step.train_state", TrainStateBackend)
if TYPE_CHECKING:

    class _State:
        def write_back(self) -> None: ...

else:
    _State = _native.State


def train_state(
    model: keras.Model,
    optimizer: keras.Optimizer,
    train: Train = None,
    auto_scale_loss: bool = True,
) -> "TrainState":
    """Returns what a loop of your own carries from step to step.

        step = kmodels.train_step(loss_fn)
        with kmodels.train_state(model, keras.optimizers.Adam(1e-3)) as state:
            for batch in batches:
                state, logs = step(state, batch)

    Models and optimizers hold what the last finished step left at the end of the block, whatever
    ends it; Ctrl-C waits for the step that is running. Without a block call `write_back`.

    Args:
        model: a built model; or models, layers and seed generators by name, as in
            `kmodels.training.TrainStep`.
        optimizer: an optimizer of all that is trained; or one for each objective, by name.
        train: names of the models that are trained, or of those of each objective; see `TrainStep`.
        auto_scale_loss: under "mixed_float16".

    Raises:
        InputError: for models without variables, and names that fit none.
    """
    objectives = Objectives(model, optimizer if isinstance(optimizer, Mapping) else None, train)
    objectives.set_optimizers(optimizer, auto_scale_loss)
    objectives.build()
    return TrainState(objectives)


def train_step(
    loss: LossFunction | Mapping[str, LossFunction], jit_compile: bool | str = "auto"
) -> "StepFunction":
    """Returns a training step for `train_state`: `state, logs = step(state, batch)`.

    Args:
        loss: loss_fn(models, batch, training), or one per objective by name, as in
            `kmodels.training.TrainStep`.
        jit_compile: False runs eagerly; True has XLA compile the step on JAX and TensorFlow; "auto"
            does so on JAX, and makes a graph on TensorFlow. Nothing is compiled here on torch:
            compile the model, or its layers.
    """
    return StepFunction(loss, jit_compile)


class TrainState(_State):
    """Weights, slots and states of seeds between two steps.

    It is a pytree on JAX, whose arrays the next step takes over: between a step and `write_back`
    the models themselves have no values. Elsewhere the values stay in the variables.

    Args:
        objectives: built.
    """

    def __init__(self, objectives: Objectives):
        super().__init__()
        self.objectives = objectives
        self.watch = traced.Watch(objectives.layers, objectives.check)
        self._running = self._asked = False
        self._former: Any = None

    def write_back(self) -> None:
        """Puts everything into models and optimizers; the next step continues from there."""
        super().write_back()

    def __enter__(self) -> Self:
        former = signal.getsignal(signal.SIGINT)
        if callable(former) and threading.current_thread() is threading.main_thread():
            self._former = former
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.write_back()
        finally:
            if self._former is not None:
                signal.signal(signal.SIGINT, self._former)
                self._former = None

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._running and not self._asked:
            self._asked = True
        else:
            self._former(signum, frame)

    def _whole(self, running: bool) -> None:
        """A step begins or is over; an interrupt that came within is raised in between."""
        self._running = running
        if not running and self._asked:
            self._asked = False
            raise KeyboardInterrupt


class StepFunction:
    """See `train_step`.

    Args:
        loss: one function, or one per objective by name.
        jit_compile: see `train_step`.
    """

    def __init__(
        self,
        loss: LossFunction | Mapping[str, LossFunction],
        jit_compile: bool | str = "auto",
    ):
        self.losses = dict(loss) if isinstance(loss, Mapping) else {ONLY: loss}
        self._advance = _native.compiled(self.losses, jit_compile)

    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, Any]]:
        """Makes one step.

        Args:
            state: it is moved, and given back.
            batch: arrays, in any structure that the loss functions take.

        Returns:
            The state, and logs on the device: "loss", with several objectives each one's
            "<objective>_loss", and what the loss functions logged.

        Raises:
            InputError: where losses and objectives do not fit, a loss is not a scalar, or the
                models have other variables than the state.
        """
        names = state.objectives.names
        if sorted(names) != sorted(self.losses):
            raise InputError(
                f"the step has a loss for {_listed(self.losses)}, the state optimizers for "
                f"{_listed(names)}; give both by the same names"
            )
        state._whole(True)
        try:
            results = self._advance(state, arrays.tensors(batch))
        finally:
            state._whole(False)
        logs = {"loss": sum(loss for loss, _ in results.values())}
        for name, (loss, more) in results.items():
            logs |= ({} if name == ONLY else {f"{name}_loss": loss}) | more
        return state, logs


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name or "the only objective" for name in names)
