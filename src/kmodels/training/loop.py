"""The training loop: `fit`, `evaluate` and `predict` of every task, TrainStep and Keras model.

`step_<backend>.py` runs a step, and the model's `train_step` computes it. The position of a run is
(epoch, batch, state of the loader); `kmodels.checkpoint` saves it and lets an epoch begin there.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import keras

from kmodels.checkpoint.state import slots
from kmodels.core import dispatch, keras_internals, processes, traced
from kmodels.core.arguments import Checked
from kmodels.core.errors import InputError, check_names, check_whole
from kmodels.core.types import Data, Tree
from kmodels.data.pipeline import arrays
from kmodels.data.pipeline.arrays import Preprocess, as_tuple, check_class_weight, class_weights
from kmodels.data.pipeline.device_put import device_put
from kmodels.data.pipeline.indexed import IndexedBatches, Numbered
from kmodels.data.pipeline.pipeline import Pipeline, check_batch
from kmodels.data.pipeline.position import Continued
from kmodels.data.pipeline.request import FitCallback, FitRequest, Method, RunningFit
from kmodels.data.pipeline.shard import BatchSharding, Shard
from kmodels.distribution.plan import current
from kmodels.distribution.rank_zero import followers
from kmodels.training.step_loss import PERPLEXITY
from kmodels.weights import deferred


class Step(Protocol):
    """The steps of one pass over data; inside its context it may hold values of variables."""

    last_output: Any

    def __init__(self, model: keras.Model, kind: str, function: Callable[..., Any]): ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *error: object) -> None: ...
    def __call__(self, batches: Any) -> Any:
        """Runs a step for each batch and returns the last logs, or all outputs of predict."""
        ...


class StepBackend(Protocol):
    """The step of one backend; `kind` is "train", "test" or "predict"."""

    @property
    def Step(self) -> type[Step]:
        """The class of steps."""
        ...

    @property
    def TaskStep(self) -> type[Any]:
        """The first base of a task, with its `train_step`."""
        ...

    def compiled(self, model: keras.Model, kind: str) -> Callable[..., Any]:
        """Returns the function that a `Step` calls for each batch."""
        ...

    def build_to_predict(self, model: keras.Model, batch: Callable[[], Tree]) -> None:
        """Creates the variables of a model that was never called, if its first step cannot."""
        ...

    def joined(self, parts: Sequence[Any]) -> Any:
        """Returns the predictions of all batches as one array."""
        ...


class ReplicasBackend(Protocol):
    """A backend whose replicas have variables that must be created in one scope."""

    def build(
        self,
        model: keras.Model,
        make: Callable[[Callable[[], Tree]], None],
        first: Callable[[], Tree],
        at_once: bool,
    ) -> None:
        """Calls `make` with a function that returns the part of `first()` for one replica."""
        ...


backend = dispatch.backend_module("kmodels.training.step", StepBackend)
_replicas = dispatch.backend_module("kmodels.core.replicas", ReplicasBackend, optional=True)
# The first base of a task, with its `train_step`.
TaskStep: Any = backend.TaskStep

_NO_BATCH = "the data gave no batch; give at least one"

P = ParamSpec("P")
R = TypeVar("R")


def like(original: Callable[P, R]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Gives a method the signature of a method of `keras.Model`.

    `fit(x, y, 32, 5)` then means the same as in Keras, and arguments that a later Keras adds are
    accepted too.

    Args:
        original: the method of `keras.Model`.

    Returns:
        A decorator. Its method gets the arguments of the call by name, and no defaults.
    """
    original_parameters = list(inspect.signature(original).parameters.values())
    rest = [p.name for p in original_parameters if p.kind is p.VAR_KEYWORD]

    def decorate(method: Callable[..., R]) -> Callable[P, R]:
        first = next(iter(inspect.signature(method).parameters))  # "self", or "model"
        parameters = inspect.Signature(
            [original_parameters[0].replace(name=first), *original_parameters[1:]]
        )

        @wraps(method)
        def bound(*args: P.args, **kwargs: P.kwargs) -> R:
            named = dict(parameters.bind(*args, **kwargs).arguments)
            more: dict[str, Any] = named.pop(rest[0], {}) if rest else {}
            return method(named.pop(first), **named, **more)

        vars(bound)["__signature__"] = parameters
        return bound

    return decorate


@like(keras.Model.fit)
def fit(model: keras.Model, x: Data = None, y: Data = None, **kwargs: Any) -> Any:
    """Trains any Keras model with the loop of kmodels.

        model = keras.Sequential([keras.layers.Dense(10)])
        model.compile("adam", "mse")
        kmodels.fit(model, x, y, epochs=3, callbacks=[kmodels.callbacks.Checkpoint("runs/first")])

    Unlike Keras' own `fit` it accepts any data on every backend, and a Checkpoint resumes within an
    epoch, not only at the beginning of one. Logs, callbacks and weights equal those of Keras.

    Args:
        model: compiled: functional, sequential, or subclassed with its own `train_step`,
            `compute_loss` or `compute_metrics`.
        x: as in `kmodels.models.ViTImageClassifier.fit`.
        y: labels, if x is arrays.
        **kwargs: as in `keras.Model.fit`, by place or by name.

    Returns:
        A `keras.callbacks.History`.

    Raises:
        InputError: if the model is not compiled, or the data is not supported.
    """
    return _by_loop(model, FitRequest.of(Method.FIT, x=x, y=y, **kwargs))


@like(keras.Model.evaluate)
def evaluate(model: keras.Model, x: Data = None, y: Data = None, **kwargs: Any) -> Any:
    """Evaluates any Keras model on any data of `kmodels.fit`, see `keras.Model.evaluate`."""
    return _by_loop(model, FitRequest.of(Method.EVALUATE, x=x, y=y, **kwargs))


@like(keras.Model.predict)
def predict(model: keras.Model, x: Data, **kwargs: Any) -> Any:
    """Predicts with any Keras model on any data of `kmodels.fit`, see `keras.Model.predict`."""
    return _by_loop(model, FitRequest.of(Method.PREDICT, x=x, **kwargs))


def _by_loop(model: keras.Model, request: FitRequest) -> Any:
    if isinstance(model, Loop):  # of kmodels, with a preprocessor, or a loss of its own
        return getattr(model, request.method)(**request.keywords())
    return run_request(model, request)


def run_request(
    model: keras.Model,
    request: FitRequest,
    preprocess: Preprocess | None = None,
    split: Callable[[Any], tuple] = as_tuple,
    over_mesh: bool = True,
) -> Any:
    """Runs `fit`, `evaluate` or `predict`; over a mesh each process takes its own rows.

    Args:
        model: any Keras model.
        request: the method and its arguments.
        preprocess: see `kmodels.data.as_dataset`.
        split: makes (x,), (x, y) or (x, y, sample_weight) of a batch of a loader.
        over_mesh: False ignores the mesh in force.

    Returns:
        The result of the method; predictions are those of all processes, in the order of the data.

    Raises:
        InputError: for unsupported data; over a mesh also if the mesh does not divide the batches,
            the processes got different data, or a callback or a metric does not support it.
    """
    from kmodels.data.pipeline import kinds

    method, plan = request.method, current() if over_mesh else None
    if plan is not None:
        # Again, as the mesh may be gone since plan.prepare, and on JAX nobody would notice.
        plan.engine.check(model)
        if method is Method.FIT:
            plan.check(model)
    request = kinds.prepare(request, preprocess, None if plan is None else plan.rule(), split)
    data = request.x
    if plan is not None:
        _check_weights(model, data if method is Method.EVALUATE else request.validation_data)
        request = request.changed(
            verbose=request.verbose if processes.is_rank_zero() else 0,
            callbacks=followers(request.callbacks, plan, method),
        )
    shard = None if plan is None or method is not Method.PREDICT else data.shard
    if shard is not None and plan is not None:
        plan.engine.begin_predict(model)
    pipelines = [one for one in (data, request.validation_data) if one is not None]
    try:
        for one in pipelines:
            one.give_to(model)
        result = _METHODS[method](model, request)
    finally:
        for one in pipelines:
            one.end()
    if shard is None or plan is None:
        return result
    result = plan.engine.all_predictions(result, shard.rows)
    return keras.tree.map_structure(lambda leaf: leaf[: shard.samples], result)


def _check_weights(model: keras.Model, data: Any) -> None:
    if data is None or data.shard is None or not data.shard.fills:
        return
    if names := keras_internals.unweighted_metrics(model):
        raise InputError(
            f"metrics={names} would count the rows that fill the last batch up, which weigh "
            f"nothing; compile with weighted_metrics={names}, or take a batch size that divides "
            f"{data.samples} samples"
        )


def _fit(model: keras.Model, request: FitRequest) -> keras.callbacks.History:
    """Trains a model on prepared data, see `keras.Model.fit`.

    Args:
        model: compiled.
        request: with data of `kmodels.data.pipeline.kinds.prepare`.

    Returns:
        The logs of the epochs.

    Raises:
        InputError: if the model is not compiled.
    """
    _check_compiled(model, "fit")
    epochs, frequency = request.more["epochs"], request.more["validation_freq"]
    if limit := keras.config.max_epochs():
        epochs = min(epochs, limit)
    data = Epochs(model, request.x, request.steps)
    data.build()
    callbacks = _callbacks(model, request, data, epochs=epochs, add_history=True)
    listeners = [one for one in callbacks.callbacks if isinstance(one, FitCallback)]
    for listener in listeners:
        listener.fit = RunningFit(callbacks.callbacks, data)
    held_out: Epochs | None = None
    logs: Any = {}
    epoch_logs: dict[str, Any] = {}
    try:
        model.make_train_function()  # As in Keras, before callbacks begin.
        model.stop_training = False
        callbacks.on_train_begin()
        data.clock.last_output = lambda: step.last_output
        batch_begins, batch_ends = _of_batches(callbacks, "train")
        data.begin()
        # Keras' BackupAndRestore and our Checkpoint set it.
        first = keras_internals.initial_epoch(model) or request.more["initial_epoch"]
        for epoch in range(first, epochs):
            model.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            data.set_epoch(epoch)
            step = step_of(model, "train")  # A callback may have changed the model.
            is_over = False
            if data.continued is not None:
                logs = dict.fromkeys(data.continued.log_names, 0.0)
                data.go_on()
                for listener in listeners:
                    listener.go_on()
                is_over = model.stop_training
            with step:
                for begin, end, batches in () if is_over else data.epoch():
                    batch_begins(begin)
                    logs = step(batches)
                    batch_ends(end, logs)
                    for listener in listeners:
                        listener.after_step()
                    if model.stop_training:
                        break
            epoch_logs = dict(_results(model, logs))
            data.clock.end_epoch()
            if request.validation_data is not None and _validates(epoch, frequency):
                validation = request.validation_data, request.validation_steps
                held_out = held_out or Epochs(model, *validation)
                held_out.build()
                validation_logs = _evaluate_data(model, held_out, callbacks)
                epoch_logs |= {f"val_{name}": value for name, value in validation_logs.items()}
            callbacks.on_epoch_end(epoch, epoch_logs)
            if request.verbose and (line := data.clock.line()) is not None:
                print(line, flush=True)
            if model.stop_training:
                break
        if epochs and isinstance(model.optimizer, keras.optimizers.Optimizer):
            model.optimizer.finalize_variable_values(model.trainable_weights)
        callbacks.on_train_end(logs=epoch_logs)
    finally:
        for listener in listeners:
            listener.leave_fit()
    return model.history


def _evaluate(model: keras.Model, request: FitRequest) -> Any:
    """Evaluates a model, see `keras.Model.evaluate`.

    Args:
        model: compiled.
        request: as in `_fit`.

    Returns:
        The loss and the metrics: by name, in a list, or one number if there is no metric.

    Raises:
        InputError: if the model is not compiled.
    """
    _check_compiled(model, "evaluate")
    # Keras' own `fit`, called on a task, gives its `evaluate` an argument of its own.
    check_names("evaluate", request.more.keys() - {"_use_cached_eval_dataset"}, ["return_dict"])
    data = Epochs(model, request.x, request.steps)
    data.build()
    logs = _evaluate_data(model, data, _callbacks(model, request, data, epochs=1))
    return logs if request.more.get("return_dict") else _in_order(model, logs)


def _evaluate_data(
    model: keras.Model, data: "Epochs", callbacks: keras.callbacks.CallbackList
) -> dict[str, Any]:
    step = step_of(model, "test")
    model.stop_evaluating = False
    callbacks.on_test_begin()
    batch_begins, batch_ends = _of_batches(callbacks, "test")
    data.begin()
    logs: Any = {}
    model.reset_metrics()
    with step:
        for begin, end, batches in data.epoch():
            batch_begins(begin)
            logs = step(batches)
            batch_ends(end, logs)
            if model.stop_evaluating:
                break
    logs = _numbers(_results(model, logs))
    callbacks.on_test_end(logs)
    return logs


def _predict(model: keras.Model, request: FitRequest) -> Any:
    """Predicts, see `keras.Model.predict`.

    Args:
        model: built, or with inputs that its first call builds it for.
        request: as in `_fit`.

    Returns:
        The outputs of all batches, one behind the other, as arrays of NumPy.

    Raises:
        InputError: for data without a batch.
    """
    data = Epochs(model, request.x, request.steps)
    backend.build_to_predict(model, data.example)
    callbacks = _callbacks(model, request, data, epochs=1)
    step = step_of(model, "predict")
    model.stop_predicting = False
    callbacks.on_predict_begin()
    batch_begins, batch_ends = _of_batches(callbacks, "predict")
    data.begin()
    outputs = []
    with step:
        for begin, end, batches in data.epoch():
            batch_begins(begin)
            outputs.append(step(batches))
            batch_ends(end, {"outputs": outputs[-1]})
            if model.stop_predicting:
                break
    callbacks.on_predict_end()
    return _joined(outputs)


def _joined(outputs: Sequence[Tree]) -> Any:
    return keras.tree.map_structure_up_to(
        outputs[0], lambda *parts: backend.joined(parts), *outputs
    )


class Epochs:
    """The batches of one call, epoch by epoch.

    Args:
        model: the model that is trained or evaluated.
        data: yields the batches of a pass.
        steps: batches per epoch; epochs may then begin and end within a pass. None for one pass.

    Attributes:
        continued: position at which the next epoch begins if it was interrupted, or None.
    """

    continued: Continued | None = None

    def __init__(self, model: keras.Model, data: Pipeline, steps: int | None):
        limit = keras.config.max_steps_per_epoch()
        self.steps_per_epoch = min(filter(None, (steps, limit)), default=None)
        check_whole("steps_per_execution", model.steps_per_execution)
        self.data, self.clock, self._at_once = data, data.clock, model.steps_per_execution
        self._model = model
        self._pass: Any = None
        self._taken = 0
        self._first: int | None = None
        # Not asked for again: a pass that is continued has fewer.
        self._batches_of_pass = data.num_batches

    @property
    def num_batches(self) -> int | None:
        """Batches per epoch, or None if not known yet."""
        return self.steps_per_epoch or self._batches_of_pass

    def build(self, at_once: bool = False) -> None:
        """Builds the missing parts of the model; a batch is read only if some are missing.

        Args:
            at_once: see `build`.
        """

        def first() -> Any:
            self.data.on_epoch_begin()
            return self.example()

        build(self._model, first, at_once)
        self.restart()

    def example(self) -> Any:
        """Returns the first batch of a separate pass, on the host."""
        for batch in self.data.batches(placed=False):
            return batch
        raise InputError(_NO_BATCH)

    def build_for(self, batch: Tree) -> None:
        """Builds the missing parts of the model for a batch, before a step is traced."""
        build(self._model, lambda: batch, at_once=True)

    def begin(self) -> None:
        """Allows prefetching: no more batches are read to build the model."""
        self.data.start()

    def set_epoch(self, epoch: int) -> None:
        """Sets the next epoch of the data, if one epoch is one pass."""
        if not self.steps_per_epoch:
            self.data.set_epoch(epoch)
        self.clock.begin_epoch()

    def restart(self) -> None:
        """Makes the next epoch begin with a new pass."""
        self._pass, self._taken = None, 0
        self._batches_of_pass = self.data.num_batches
        self.data.on_epoch_end()

    def go_on(self) -> None:
        """Moves the data of an interrupted epoch to its next batch."""
        done, self.continued = self.continued, None
        assert done is not None  # `fit` asks for it
        replays = done.place()
        self._begin_epoch(0 if replays else done.batch)
        for number, batch in enumerate(islice(self._pass, done.batch if replays else 0)):
            if number == 0:
                done.build(batch)
        self._first = self._taken = done.batch

    def _begin_epoch(self, first: int = 0) -> None:
        self.data.on_epoch_begin()
        if self._pass is None or not self.steps_per_epoch:
            self._begin_pass(first)

    def _begin_pass(self, first: int = 0) -> None:
        count = self._batches_of_pass
        self._pass, self._taken = self.data.batches(count=count and count - first), 0

    def epoch(self) -> Iterator[tuple[int, int, list[Any]]]:
        """Yields (number of the first batch, number of the last batch, batches) of each execution.

        Like Keras, it counts the last execution as complete even if the data ends within it.
        """
        if self._first is None:
            self._begin_epoch()
        begin, self._first = self._first or 0, None
        while self.num_batches is None or begin < self.num_batches:
            is_over = self._batches_of_pass is not None and self._taken >= self._batches_of_pass
            batches = [] if is_over else list(islice(self._pass, self._at_once))
            if not batches:
                if begin:
                    self._end_pass(begin)
                break
            self._taken += self._at_once
            yield begin, begin + self._at_once - 1, batches
            begin += self._at_once
        if not begin:
            raise InputError(_NO_BATCH)
        if self._batches_of_pass is not None and self._taken >= self._batches_of_pass:
            # As Keras, also if nothing comes of it: torch's loaders draw a seed for each pass.
            self._begin_pass()
        self.data.on_epoch_end()

    def _end_pass(self, batches: int) -> None:
        self._pass = None
        if not self.steps_per_epoch:
            self._batches_of_pass = batches
            return
        warnings.warn(
            f"the data ended after {batches} of {self.steps_per_epoch} batches of an epoch; give "
            "data that goes on, or leave the number of steps out",
            stacklevel=3,
        )


def build(model: keras.Model, first: Callable[[], Tree], at_once: bool = False) -> None:
    """Creates the variables that a model's first step needs.

    Args:
        model: compiled.
        first: returns a batch; called only if something is missing.
        at_once: creates them now even if the trace of the first step would, as on TensorFlow.
    """
    own = isinstance(model, Loop)
    make = model.build_step if own else partial(keras_internals.symbolic_build, model)
    if _replicas is None:
        make(first)
    else:
        _replicas.build(model, make, first, at_once or (own and model.builds_first))


def step_of(model: keras.Model, kind: str) -> Any:
    """Returns a `Step` of a model, compiled again whenever Keras would compile its own."""
    getattr(model, f"make_{kind}_function")()
    attributes = vars(getattr(model, f"{kind}_function"))
    if "kmodels_step" not in attributes:
        attributes["kmodels_step"] = backend.compiled(model, kind)
    return backend.Step(model, kind, attributes["kmodels_step"])


def _check_compiled(model: keras.Model, method: str) -> None:
    if isinstance(model, Loop):
        model.before_use()
    if not model.compiled:
        # Keras' words, which tests and searches of its users match.
        raise InputError(f"You must call `compile()` before `{method}()`: {model.name} has no loss")


def _callbacks(
    model: keras.Model, request: FitRequest, data: Epochs, **settings: Any
) -> keras.callbacks.CallbackList:
    if isinstance(request.callbacks, keras.callbacks.CallbackList):
        return request.callbacks
    return keras.callbacks.CallbackList(
        keras.tree.flatten(request.callbacks or []),
        add_progbar=request.verbose != 0,
        verbose=request.verbose,
        steps=data.num_batches,
        model=model,
        **settings,
    )


def _of_batches(
    callbacks: keras.callbacks.CallbackList, kind: str
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Returns the calls at the begin and at the end of a batch, by whether a callback has any.

    Keras' list makes numbers of the logs of each batch in a thread, also if no callback reads
    them, which took a third of a small step of JAX and TensorFlow.

    Args:
        callbacks: those of the call.
        kind: "train", "test" or "predict".
    """
    base = keras.callbacks.Callback
    # Several processes keep in step by reading logs: on CPUs, a comparison between processes may
    # meet the collectives of a step that still runs, and Gloo aborts.
    always = type(callbacks) is not keras.callbacks.CallbackList or processes.count() > 1
    calls: list[Callable[..., None]] = []
    for edge in ("begin", "end"):
        # Keras' default of on_train_batch_end calls on_batch_end.
        names = [f"on_{kind}_batch_{edge}", *([f"on_batch_{edge}"] if kind == "train" else [])]
        heard = always or any(
            getattr(method := getattr(one, name), "__func__", method) is not getattr(base, name)
            for one in callbacks.callbacks
            for name in names
        )
        calls.append(getattr(callbacks, names[0]) if heard else lambda *_: None)
    return calls[0], calls[1]


def _validates(epoch: int, frequency: int | Sequence[int]) -> bool:
    if isinstance(frequency, int):
        return (epoch + 1) % frequency == 0
    return epoch + 1 in frequency


def _results(model: keras.Model, logs: Any) -> Any:
    """Returns the averages of an epoch, or the logs of a `train_step` with other names."""
    averages = model.get_metrics_result()
    return averages if isinstance(logs, Mapping) and logs.keys() == averages.keys() else logs


def _numbers(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns logs as numbers in the order of their names; nested dictionaries are flattened."""
    numbers: dict[str, Any] = {}
    for name, value in sorted((logs or {}).items()):
        if isinstance(value, Mapping):
            numbers |= _numbers(value)
            continue
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            numbers[name] = value  # an array, of a user's own step
    return numbers


def _in_order(model: keras.Model, logs: Mapping[str, Any]) -> Any:
    """Returns logs as a list in the order of the metrics, or the only one."""
    metrics = [part for one in model.metrics for part in getattr(one, "metrics", [one])]
    first = [part.name for part in metrics if part.name in logs]
    # Without the perplexity, so that `loss, accuracy = model.evaluate(...)` works as in Keras.
    values = [logs[name] for name in (*first, *sorted(logs.keys() - {*first, PERPLEXITY}))]
    return values[0] if len(values) == 1 else values


def _on_batch(model: keras.Model, kind: str, batch: tuple, return_dict: bool) -> Any:
    batch = _placed(model, batch)
    build(model, lambda: batch)
    step = step_of(model, kind)
    model.reset_metrics()
    with step:
        logs = _numbers(step([batch]))
    return logs if return_dict else _in_order(model, logs)


def _placed(model: keras.Model, batch: tuple) -> Any:
    return device_put.placer(model, False)(tuple(arrays.plain(part, None) for part in batch))


_METHODS = {Method.FIT: _fit, Method.EVALUATE: _evaluate, Method.PREDICT: _predict}


def _preprocessor(model: "Loop") -> Preprocess | None:
    # No class attribute: torch looks for a layer of this name only after those of the class.
    return getattr(model, "preprocessor", None)


class Loop(Checked, keras.Model if TYPE_CHECKING else object):
    """First base of a model that is trained by this loop.

    A subclass may prepare a step in `make_train_function`, `make_test_function` or
    `make_predict_function`, as in Keras; a compiled step is made again if the model has changed.

    Attributes:
        follows_changes: see `kmodels.core.traced`.
        preprocessor: called as preprocessor(x, y, sample_weight), or None.
        split: makes (x,), (x, y) or (x, y, sample_weight) of a batch of a loader.
        builds_first: True if on TensorFlow the trace of the first step cannot create all variables.
    """

    follows_changes = True
    preprocessor: Any
    split = staticmethod(as_tuple)
    builds_first = False

    @like(keras.Model.fit)
    def fit(self, x: Data = None, y: Data = None, **kwargs: Any) -> Any:
        """Trains as in Keras, on anything that yields batches.

        Args:
            x: arrays, a PyTorch DataLoader, tf.data, grain, a PyDataset, a Hugging Face dataset,
                any iterable of (x, y) or (x, y, sample_weight) batches, or a function that gives
                one for each epoch, on every backend.
            y: labels, if x is arrays.
            **kwargs: as in `keras.Model.fit`, by place or by name; `validation_data` may be any of
                the above too.
        """
        return self._run(FitRequest.of(Method.FIT, x=x, y=y, **kwargs))

    @like(keras.Model.evaluate)
    def evaluate(self, x: Data = None, y: Data = None, **kwargs: Any) -> Any:
        """Evaluates as in Keras, on any data of `fit`."""
        return self._run(FitRequest.of(Method.EVALUATE, x=x, y=y, **kwargs))

    @like(keras.Model.predict)
    def predict(self, x: Data, **kwargs: Any) -> Any:
        """Predicts as in Keras, on any data of `fit`; zero samples are allowed."""
        if arrays.is_empty(x, _preprocessor(self)):
            return self.predict_on_batch(x)
        return self._run(FitRequest.of(Method.PREDICT, x=x, **kwargs))

    def _run(self, request: FitRequest) -> Any:
        if deferred.used:
            deferred.check(self, request.method)
        return run_request(self, request, _preprocessor(self), self.split)

    @like(keras.Model.train_on_batch)
    def train_on_batch(
        self,
        x: Data,
        y: Data = None,
        sample_weight: Data = None,
        class_weight: dict[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Trains as in Keras on one batch, preprocessed as in `fit`."""
        x, y, sample_weight = self._one_batch("train_on_batch", x, y, sample_weight)
        if class_weight is not None:
            if sample_weight is not None:
                raise InputError("got sample_weight and class_weight; give one of them")
            check_class_weight(self, class_weight)
            sample_weight = class_weights(y, class_weight)
        return _on_batch(self, "train", (x, y, sample_weight), return_dict)

    @like(keras.Model.test_on_batch)
    def test_on_batch(
        self, x: Data, y: Data = None, sample_weight: Data = None, return_dict: bool = False
    ) -> Any:
        """Evaluates as in Keras on one batch, preprocessed as in `fit`."""
        batch = self._one_batch("test_on_batch", x, y, sample_weight)
        return _on_batch(self, "test", batch, return_dict)

    @like(keras.Model.predict_on_batch)
    def predict_on_batch(self, x: Data) -> Any:
        """Predicts as in Keras on one batch, preprocessed as in `fit`."""
        batch = _placed(self, self._one_batch("predict_on_batch", x)[:1])
        backend.build_to_predict(self, lambda: batch)
        with step_of(self, "predict") as step:
            return _joined([step([batch])])

    def _one_batch(self, method: str, *parts: Data) -> tuple[Any, ...]:
        from kmodels.data.pipeline import kinds

        if deferred.used:
            deferred.check(self, method)
        if method != "predict_on_batch":
            _check_compiled(self, method)  # Before the batch is checked: labels are by the loss.
        batch = kinds.one_batch(parts, _preprocessor(self))
        check_batch(self, batch)
        return *batch, *(None,) * (len(parts) - len(batch))

    def make_train_function(self, force: bool = False) -> Any:
        """Returns Keras' step, a new one if the model has changed since the last was made."""
        traced.follow(self, "train_function")
        return super().make_train_function(force)

    def make_test_function(self, force: bool = False) -> Any:
        """See `make_train_function`."""
        traced.follow(self, "test_function")
        return super().make_test_function(force)

    def make_predict_function(self, force: bool = False) -> Any:
        """See `make_train_function`."""
        traced.follow(self, "predict_function")
        return super().make_predict_function(force)

    def before_use(self) -> None:
        """Called before the loop tests if the model is compiled."""

    def build_step(self, first: Callable[[], Tree]) -> None:
        """Creates the metrics, slots and layers that the first step needs.

        Args:
            first: returns a batch; called only if something is missing.
        """
        keras_internals.symbolic_build(self, first)


def follow_variables(optimizer: keras.Optimizer, variables: Sequence[Any]) -> None:
    """Builds an optimizer for these variables, or rebuilds it if it had others.

    Keras chooses the trained variables in `compile`. If only fewer are trained now, their slots
    continue. If other variables are trained, all slots start over as after `compile`, with a
    warning if steps were made: with slots at zero and a high count of steps, Adam's first steps
    would be too large.

    Args:
        optimizer: an optimizer of Keras, built or not.
        variables: the variables that the model trains now.
    """
    if not optimizer.built:
        optimizer.build(variables)
        return
    before = [id(variable) for variable in keras_internals.built_for(optimizer)]
    now = [id(variable) for variable in variables]
    # JAX takes them by their order.
    if before == now:
        return
    goes_on = set(now) <= set(before)
    steps = int(optimizer.iterations)
    values = {name: slot.value for name, slot in slots(optimizer).items()} if goes_on else {}
    keras_internals.unbuild(optimizer, restart=not goes_on)
    optimizer.build(variables)
    for name, slot in slots(optimizer).items():
        if name in values:
            slot.assign(values[name])
    if steps and not goes_on:
        warnings.warn(
            f"{optimizer.name} has made {steps} steps for {len(before)} variables, and the model "
            f"now trains {len(variables)}, others among them: its slots and its count of steps "
            "start over; call compile after such a change to choose an optimizer for it",
            stacklevel=2,
        )


class Predicts:
    """Makes `predict` accept zero samples, for which Keras' own fails."""

    @like(keras.Model.predict)
    def predict(self, x: Data, **kwargs: Any) -> Any:
        """Predicts as in Keras; zero samples give zero predictions."""
        if arrays.is_empty(x, None):
            return self.predict_on_batch(x)  # type: ignore[attr-defined]
        request = FitRequest.of(Method.PREDICT, x=x, **kwargs)
        return run_request(self, request, over_mesh=False)  # type: ignore[arg-type]


class WholeBatches(Pipeline):
    """Fills the last batch up with rows of no weight.

    A shorter last batch would be compiled again on JAX, and does not divide over a mesh. The other
    rows weigh a little more than 1, so that averages over the padded number of rows, which is how
    Keras averages losses, are averages over the real ones. Metrics must be `weighted_metrics`.
    Each process has its rows of every batch over a mesh.

    Args:
        loader: a `kmodels.data.ImageLoader` that does not shuffle.

    Attributes:
        samples: images of all processes.
    """

    def __init__(self, loader: IndexedBatches):
        plan = current()
        rule = BatchSharding() if plan is None else plan.rule()
        shard = Shard(Numbered(loader), rule, Method.EVALUATE, None)
        super().__init__(shard.source, shard=shard)
        self.loader = loader
