"""TrainStep: any loss over any models, trained by `fit` on every backend."""

import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import keras

from kmodels.core import keras_internals, traced
from kmodels.core.arguments import checked
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError
from kmodels.core.types import MetricsLike, OptimizerLike, Tensor, Tree
from kmodels.data.pipeline import arrays
from kmodels.data.pipeline.arrays import one_piece
from kmodels.layers import block_compile as compiling
from kmodels.training.objectives import (
    ONLY,
    LossFunction,
    Objectives,
    Optimizers,
    Results,
    Running,
    Train,
    WatchedScope,
    WeightAverage,
)


class State(Protocol):
    """The state of a step outside of `fit`, from call to call."""

    def write_back(self) -> None:
        """Writes the values after the last finished step into models and optimizers."""
        ...


class TrainStepBackend(Protocol):
    """The steps of `TrainStep` and of `train_step` on one backend."""

    @property
    def Step(self) -> type[keras.Model]:
        """Is the base of `TrainStep`, a `keras.Model` whose steps are those of its objectives."""
        ...

    @property
    def State(self) -> type[State]:
        """Is the base of `TrainState`."""
        ...

    def compiled(
        self, losses: Mapping[str, LossFunction], jit_compile: bool | str
    ) -> Callable[[Any, Any], Results]:
        """Returns the step: it updates a state by a batch, and returns losses and logs."""
        ...

    def outline(
        self,
        objectives: Objectives,
        run: Callable[[Any], list[Any]],
        scope: keras.StatelessScope,
        batch: Tree,
    ) -> None:
        """Runs or traces all objectives once; only variables that are created in it stay."""
        ...


_native = backend_module("kmodels.training.train_step", TrainStepBackend)
if TYPE_CHECKING:
    _Step = keras.Model

    class _State:
        def write_back(self) -> None: ...

else:
    _Step, _State = _native.Step, _native.State


class TrainStep(_Step):
    """A model around models, whose loss is yours: one function for JAX, torch and TensorFlow.

        def loss_fn(models, batch, training):
            x, y = batch
            wanted = keras.ops.softmax(models["teacher"](x, training=False) / 2)
            logits = models["student"](x, training=training)
            loss = keras.ops.mean(keras.losses.categorical_crossentropy(
                wanted, logits / 2, from_logits=True))
            return loss, {"accuracy": (y, logits)}

        step = TrainStep({"student": student, "teacher": teacher}, loss_fn, train=["student"])
        step.compile("adam", metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")])
        step.fit(x, y, epochs=3)

    `fit` compiles it as it does any model: with XLA on JAX, as a graph on TensorFlow. Optimizers,
    gradient accumulation, clipping, moving averages and loss scaling are those of `compile`;
    regularisers of the models that are trained count; states of batch norm and dropout continue;
    callbacks, `keras.distribution`, and `kmodels.callbacks.Checkpoint` with its exact resume work,
    for all models and optimizers. The models are trained in place: save them themselves.

    Several losses make several objectives, a GAN's two for instance. They take turns in the order
    given; each moves only the variables of its own models, after the changes of those before it.

    Args:
        models: a Keras model; or models, layers and `keras.random.SeedGenerator`s by name. Loss
            functions may draw random numbers from these generators, and change no other state.
        loss: loss_fn(models, batch, training), or one per objective by name. It gets the models as
            they were given here, and the batch as the data yields it: an array, a dictionary, or
            (x, y) or (x, y, sample_weight). It returns a scalar, or (scalar, logs) with logs by
            name: scalars, whose averages over the batches are shown, or tuples, which are given to
            the metric of that name. The same function is called in evaluation, training False;
            it may leave logs out there.
        train: names of the models that are trained, or of those of each objective. By default all
            are; of several objectives each trains the model of its name.
        name: name of this model.
        averages: models that are not trained but follow another one after each step, by name:
            {"teacher": WeightAverage("student", 0.996)}. All weights move, and are saved with the
            others.
        output: output(models, inputs, training), the result of `predict` and of a call: arrays
            with a row for each row of the inputs. By default that of the only model.

    Raises:
        InputError: for objects that are not models, and for unknown names.
    """

    builds_first = True
    split = staticmethod(one_piece)

    def __init__(
        self,
        models: keras.Model | Mapping[str, keras.Model],
        loss: LossFunction | Mapping[str, LossFunction],
        train: Train = None,
        name: str | None = None,
        averages: Mapping[str, WeightAverage] | None = None,
        output: Callable[[Any, Any, bool], Any] | None = None,
    ):
        several = isinstance(loss, Mapping)
        losses = _functions(loss)
        if output is not None and not callable(output):
            raise InputError(f"output is {output!r}; give a function of models, inputs, training")
        objectives = Objectives(models, losses if several else None, train, averages)
        super().__init__(name=name)
        self.held, self._output = models, output
        self._players, self._loss_functions = objectives, losses
        self._running = Running(objectives.names)
        self.built = objectives.built

    def compile(
        self,
        optimizer: OptimizerLike | Mapping[str, OptimizerLike] = "rmsprop",
        metrics: MetricsLike = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: bool | str = "auto",
        auto_scale_loss: bool = True,
    ) -> None:
        """Sets the optimizer, the metrics and how the step is compiled.

        Args:
            optimizer: as in Keras, or an optimizer of optax on JAX; with several objectives one
                for each, by name.
            metrics: `keras.metrics` objects, in a list or by name. Each is updated by the
                log of its name.
            run_eagerly: compiles nothing.
            steps_per_execution: batches in one call of the compiled step; 1 on torch.
            jit_compile: on torch whether the blocks of kmodels' models are compiled, see
                `kmodels.task.Task.compile`; elsewhere as in Keras.
            auto_scale_loss: under "mixed_float16".

        Raises:
            InputError: for optimizers that do not fit the objectives; on torch for
                `jit_compile=True` if there are no blocks.
        """
        objectives = self._players
        by_block = compiling.is_possible()
        if jit_compile is True and by_block and not compiling.blocks(self):
            raise InputError(
                "jit_compile=True compiles the blocks of kmodels' models on torch, and these have "
                'none; leave "auto", or give torch.compile parts of your model'
            )
        objectives.set_optimizers(optimizer, auto_scale_loss)
        self._running = Running(objectives.names, metrics)
        only = next(iter(objectives)).optimizer
        several = {objective.name: objective.optimizer for objective in objectives}
        super().compile(
            optimizer=only if len(objectives) == 1 else Optimizers(several, objectives.build),
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            jit_compile=compiling.choose(self, jit_compile, run_eagerly),
            auto_scale_loss=False,
        )

    def call(self, inputs: Tree, training: bool = False) -> Any:
        """Returns the output of the only model, or of the function `output`.

        Raises:
            InputError: with several models and without that function.
        """
        if self._output is not None:
            return self._output(self._players.models, inputs, training)
        if isinstance(self._players.models, dict):
            raise InputError(
                f"{self.name} holds several models; call one of them, or give TrainStep an output"
            )
        return self._players.models(inputs, training=training)

    def make_train_function(self, force: bool = False) -> Any:
        """Returns Keras' step for the variables that are trainable now."""
        if self._running.built:
            self._players.follow()
        return super().make_train_function(force)

    @property
    def trainable_variables(self) -> list[Any]:
        """The variables that the objectives train; other models of the step stay as they are."""
        return self._players.trained

    @property
    def non_trainable_variables(self) -> list[Any]:
        """All other variables, states of seeds included."""
        moved = {id(variable) for variable in self.trainable_variables}
        return [variable for variable in self.variables if id(variable) not in moved]

    @property
    def trainable_weights(self) -> list[Any]:
        """The same as `trainable_variables`."""
        return self.trainable_variables

    @property
    def non_trainable_weights(self) -> list[Any]:
        """Weights that no objective moves."""
        moved = {id(variable) for variable in self.trainable_variables}
        return [variable for variable in self.weights if id(variable) not in moved]

    @property
    def metrics(self) -> list[Any]:
        """The averages of the loss and of the logs."""
        return [*super().metrics, *self._running.metrics]

    def get_config(self) -> dict[str, Any]:
        """Refuses: a function has no config.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"{self.name} holds a Python function, which no file can; save its models themselves, "
            "or use kmodels.callbacks.Checkpoint"
        )

    # What the steps of the backends use

    def _batch(self, data: Tree) -> Any:
        """Returns the batch in the structure in which the data yields it."""
        parts = tuple(data) if isinstance(data, list | tuple) else (data,)
        while len(parts) > 1 and parts[-1] is None:
            parts = parts[:-1]
        # A loader leaves its tensors on the host on torch.
        batch = arrays.tensors(parts)
        return batch[0] if len(batch) == 1 else batch

    def _update_metrics(self, results: Results, rows: Tensor | int) -> list[Any]:
        """Returns the metrics that were fed."""
        total = sum(loss for loss, _ in results.values())
        tracker = keras_internals.loss_tracker(self)
        tracker.update_state(total, sample_weight=rows)
        return [tracker, *self._running.update(results, rows)]

    def build_step(self, first: Callable[[], Tree]) -> None:
        """Makes slots, averages, and lazy models, see `Loop.build_step`."""
        objectives, running = self._players, self._running
        if running.built:
            return
        batch = self._batch(first())

        def turns(batch: Tree) -> list[Any]:
            return [
                objectives.call(p, self._loss_functions[p.name], batch, True)[0] for p in objectives
            ]

        def measured(batch: Tree) -> list[Any]:
            results = {
                p.name: objectives.loss(p, self._loss_functions[p.name], batch, True)
                for p in objectives
            }
            running.check(running.update(results, 1))
            return [loss for loss, _ in results.values()]

        if not objectives.built:
            _native.outline(objectives, turns, keras.StatelessScope(), batch)
        objectives.build()
        if not self.optimizer.built:
            self.optimizer.build(self.trainable_variables)
        # A weight that lies in parts has its value only while its layer runs.
        values = [(v, v.value) for v in objectives.trained if not hasattr(v, "gathered")]
        scope = WatchedScope(values, collect_losses=True)
        _native.outline(objectives, measured, scope, batch)
        scope.check([*objectives.variables, *(v for m in running.metrics for v in m.variables)])
        self.built = running.built = True

    @property
    def metrics_built(self) -> bool:
        """True if the averages have their variables."""
        return self._running.built


@checked
def train_state(
    model: keras.Model,
    optimizer: OptimizerLike | Mapping[str, OptimizerLike],
    train: Train = None,
    auto_scale_loss: bool = True,
) -> "TrainState":
    """Returns the state that a custom loop passes from step to step.

        step = kmodels.train_step(loss_fn)
        with kmodels.train_state(model, keras.optimizers.Adam(1e-3)) as state:
            for batch in batches:
                state, logs = step(state, batch)

    At the end of the block models and optimizers hold the values after the last finished step,
    also after an error; Ctrl-C waits for the running step. Without a block call `write_back`.

    Args:
        model: a built model; or models, layers and seed generators by name, as in
            `kmodels.training.TrainStep`.
        optimizer: one optimizer, of Keras or, on JAX, of optax; or one for each objective, by name.
        train: names of the models that are trained, or of those of each objective; see `TrainStep`.
        auto_scale_loss: under "mixed_float16".

    Raises:
        InputError: for models without variables, and for unknown names.
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
        self, loss: LossFunction | Mapping[str, LossFunction], jit_compile: bool | str = "auto"
    ):
        if not isinstance(jit_compile, bool) and jit_compile != "auto":
            raise InputError(f'jit_compile is {jit_compile!r}; give True, False or "auto"')
        self.losses = _functions(loss)
        self._advance = _native.compiled(self.losses, jit_compile)

    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, Any]]:
        """Makes one step.

        Args:
            state: updated and returned.
            batch: arrays, in any structure that the loss functions take.

        Returns:
            The state, and logs on the device: "loss", with several objectives each one's
            "<objective>_loss", and the logs of the loss functions.

        Raises:
            InputError: if losses and objectives do not fit, a loss is not a scalar, or the
                models have other variables than the state.
        """
        if not isinstance(state, TrainState):
            raise InputError(f"state is of {type(state).__name__}; give that of train_state")
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


def _functions(loss: LossFunction | Mapping[str, LossFunction]) -> dict[str, LossFunction]:
    """Returns the loss functions by objective, checked."""
    losses = dict(loss) if isinstance(loss, Mapping) else {ONLY: loss}
    for function in losses.values():
        if not callable(function):
            raise InputError(
                f"a loss is {function!r}; give a function loss_fn(models, batch, training)"
            )
    return losses


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name or "the only objective" for name in names)
