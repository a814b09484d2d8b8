"""`fit` and its like on any data, with the parameters of Keras' own."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import keras

from kmodels.core import keras_internals, remote, traced
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError
from kmodels.core.files import local_path
from kmodels.core.types import Data, Tree
from kmodels.data.pipeline import arrays
from kmodels.data.pipeline.batch import Preprocess, as_tuple
from kmodels.data.pipeline.pipeline import check_batch
from kmodels.data.pipeline.request import FitRequest, Method
from kmodels.distribution import current
from kmodels.distribution.rank_zero import followers, without_distribution
from kmodels.training import loop
from kmodels.weights import deferred, gather

P = ParamSpec("P")
R = TypeVar("R")


def like(original: Callable[P, R]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Gives a method the parameters of one of `keras.Model`, by place and by name.

    `fit(x, y, 32, 5)` then means what it does in Keras, and arguments that a later Keras adds are
    taken too.

    Args:
        original: the method of `keras.Model`.

    Returns:
        A decorator. The method under it gets by name what was given, and no defaults.
    """
    given = list(inspect.signature(original).parameters.values())
    rest = [p.name for p in given if p.kind is p.VAR_KEYWORD]

    def decorate(method: Callable[..., R]) -> Callable[P, R]:
        first = next(iter(inspect.signature(method).parameters))  # "self", or "model"
        parameters = inspect.Signature([given[0].replace(name=first), *given[1:]])

        @wraps(method)
        def bound(*args: P.args, **kwargs: P.kwargs) -> R:
            named = dict(parameters.bind(*args, **kwargs).arguments)
            more: dict[str, Any] = named.pop(rest[0], {}) if rest else {}
            return method(named.pop(first), **named, **more)

        vars(bound)["__signature__"] = parameters
        return bound

    return decorate


class PredictionsBackend(Protocol):
    """Predictions of several processes, on a backend where each has its own rows."""

    def begin(self, model: keras.Model) -> None:
        """Prepares the model's `predict` for `of_all`."""
        ...

    def of_all(self, outputs: Tree, rows: int, shards: int) -> Any:
        """Returns the outputs of all processes, in the order of the data.

        Args:
            outputs: nested arrays whose rows are those of this process.
            rows: rows of a batch that each process feeds.
            shards: how many processes feed other rows.
        """
        ...


_predictions = backend_module(
    "kmodels.distribution.engines.predictions", PredictionsBackend, optional=True
)


def run_request(
    model: keras.Model,
    request: FitRequest,
    preprocess: Preprocess | None = None,
    split: Callable[[Any], tuple] = as_tuple,
    over_mesh: bool = True,
) -> Any:
    """Runs `fit`, `evaluate` or `predict` by the loop; over a mesh, in each process on its rows.

    Args:
        model: whose method it is.
        request: what it is asked for.
        preprocess: see `kmodels.data.as_dataset`.
        split: makes (x,), (x, y) or (x, y, sample_weight) of a batch of a loader.
        over_mesh: False leaves a mesh in force aside.

    Returns:
        The result of the method; predictions are those of all processes, in the order of the data.

    Raises:
        InputError: for data that the method cannot take; over a mesh if it does not divide the
            batches, if processes were given other data, or if a callback or a metric cannot work
            so.
    """
    from kmodels.data.pipeline import kinds

    method, plan = request.method, current() if over_mesh else None
    if plan is not None:
        # Again, as the mesh may be gone since plan.prepare, and on JAX nobody would notice.
        plan.engine.check(model)
        if method is Method.FIT:
            plan.check(model)
    # Arrays are looked at whole, before the first step.
    check_batch(model, (request.x, request.y))
    if isinstance(request.validation_data, tuple):
        check_batch(model, request.validation_data)
    request = kinds.prepare(request, preprocess, None if plan is None else plan.rule(), split)
    data = request.x
    if plan is not None:
        _check_weights(model, data if method is Method.EVALUATE else request.validation_data)
        request = request.changed(
            verbose=request.verbose if plan.engine.main else 0,
            callbacks=followers(request.callbacks, plan, method),
        )
    shard = None if plan is None or method is not Method.PREDICT else data.shard
    if shard is not None and _predictions is not None:
        _predictions.begin(model)
    pipelines = [one for one in (data, request.validation_data) if one is not None]
    try:
        for one in pipelines:
            one.model = model
        result = getattr(loop, method)(model, request)
    finally:
        for one in pipelines:
            one.end()
    if shard is None or plan is None:
        return result
    if _predictions is not None:
        result = _predictions.of_all(result, shard.rows, plan.engine.shards)
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


class Predicts:
    """Lets `predict` of a model take no samples too, where Keras' own fails."""

    @like(keras.Model.predict)
    def predict(self, x: Data, **kwargs: Any) -> Any:
        """Predicts as Keras does; of no samples it returns no predictions."""
        if arrays.is_empty(x, None):
            return self.predict_on_batch(x)  # type: ignore[attr-defined]
        request = FitRequest.of(Method.PREDICT, x=x, **kwargs)
        return run_request(self, request, over_mesh=False)  # type: ignore[arg-type]


class KerasMethods(traced.Follows):
    """Lets a model preprocess what it is given, and take any data; it is the first base.

    Attributes:
        preprocessor: called as preprocessor(x, y, sample_weight), or None.
    """

    preprocessor: Any

    @like(keras.Model.fit)
    def fit(self, x: Data = None, y: Data = None, **kwargs: Any) -> Any:
        """Trains, as Keras' `fit` does, on anything that yields batches.

        Args:
            x: arrays, a PyTorch DataLoader, tf.data, grain, a PyDataset, a Hugging Face dataset,
                any iterable of (x, y) or (x, y, sample_weight) batches, or a function that gives
                one for each epoch, on every backend.
            y: labels, where x is arrays.
            **kwargs: as in `keras.Model.fit`, by place or by name; `validation_data` may be any of
                the above too.
        """
        return self._run(FitRequest.of(Method.FIT, x=x, y=y, **kwargs))

    @like(keras.Model.evaluate)
    def evaluate(self, x: Data = None, y: Data = None, **kwargs: Any) -> Any:
        """Evaluates, as Keras does, on anything that `fit` takes."""
        return self._run(FitRequest.of(Method.EVALUATE, x=x, y=y, **kwargs))

    @like(keras.Model.predict)
    def predict(self, x: Data, **kwargs: Any) -> Any:
        """Predicts, as Keras does, on anything that `fit` takes, and on no samples too."""
        if arrays.is_empty(x, self.preprocessor):
            return self.predict_on_batch(x)
        return self._run(FitRequest.of(Method.PREDICT, x=x, **kwargs))

    @like(keras.Model.train_on_batch)
    def train_on_batch(
        self, x: Data, y: Data = None, sample_weight: Data = None, **kwargs: Any
    ) -> Any:
        """Trains, as Keras does, on one batch of what `fit` takes, preprocessed as there."""
        batch = self._one_batch("train_on_batch", x, y, sample_weight)
        return super().train_on_batch(*batch, **kwargs)

    @like(keras.Model.test_on_batch)
    def test_on_batch(
        self, x: Data, y: Data = None, sample_weight: Data = None, **kwargs: Any
    ) -> Any:
        """Evaluates, as Keras does, on a batch as `train_on_batch` takes it."""
        batch = self._one_batch("test_on_batch", x, y, sample_weight)
        return super().test_on_batch(*batch, **kwargs)

    @like(keras.Model.predict_on_batch)
    def predict_on_batch(self, x: Data) -> Any:
        """Predicts, as Keras does, on a batch as `train_on_batch` takes it."""
        return super().predict_on_batch(self._one_batch("predict_on_batch", x)[0])

    @like(keras.Model.save)
    def save(self, filepath: str | Path, **kwargs: Any) -> None:
        """Saves as Keras does; of several processes that hold all weights one may call it alone.

        A `.keras` file may also go to an address such as "gs://bucket/model.keras".
        """
        gather.check_whole(self, "save")
        self._save(super().save, filepath, kwargs)

    @like(keras.Model.save_weights)
    def save_weights(self, filepath: str | Path, **kwargs: Any) -> None:
        """Saves the weights as Keras does; one process may call it alone, see `save`."""
        gather.check_whole(self, "save_weights")
        self._save(super().save_weights, filepath, kwargs)

    def _save(self, save: Callable[..., None], path: str | Path, kwargs: dict[str, Any]) -> None:
        with without_distribution():
            if not remote.is_remote(path):
                save(local_path(path), **kwargs)
                return
            several = kwargs.get("max_shard_size") or str(path).endswith(".json")
            if several or not kwargs.get("overwrite", True):
                raise InputError(
                    f"{path} is an address, where one file is made or replaced; leave "
                    "max_shard_size and overwrite out, or use save_to_preset"
                )
            remote.write_file(path, lambda file: save(file, **kwargs))

    def _one_batch(self, method: str, *parts: Data) -> tuple[Any, ...]:
        from kmodels.data.pipeline import kinds

        if deferred.used:
            deferred.check(self, method)
        batch = kinds.one_batch(parts, self.preprocessor)
        check_batch(self, batch)
        return batch

    def _run(self, request: FitRequest) -> Any:
        if deferred.used:
            deferred.check(self, request.method)
        return run_request(self, request, self.preprocessor)


@like(keras.Model.fit)
def fit(model: keras.Model, x: Data = None, y: Data = None, **kwargs: Any) -> Any:
    """Trains any Keras model, as its own `fit` does, by the loop of kmodels.

        model = keras.Sequential([keras.layers.Dense(10)])
        model.compile("adam", "mse")
        kmodels.fit(model, x, y, epochs=3, callbacks=[kmodels.callbacks.Checkpoint("runs/first")])

    What it adds: any data on every backend, and a Checkpoint that continues within an epoch, where
    one in Keras' own `fit` continues at the beginning of an epoch. Logs, callbacks and weights are
    those of Keras.

    Args:
        model: compiled: functional, sequential, or subclassed with its own `train_step`,
            `compute_loss` or `compute_metrics`.
        x: as in `kmodels.models.ViTImageClassifier.fit`.
        y: labels, where x is arrays.
        **kwargs: as in `keras.Model.fit`, by place or by name.

    Returns:
        A `keras.callbacks.History`.

    Raises:
        InputError: if the model is not compiled, or for data that no backend takes.
    """
    return _by_loop(model, FitRequest.of(Method.FIT, x=x, y=y, **kwargs))


@like(keras.Model.evaluate)
def evaluate(model: keras.Model, x: Data = None, y: Data = None, **kwargs: Any) -> Any:
    """Evaluates any Keras model on what `kmodels.fit` takes, see `keras.Model.evaluate`."""
    return _by_loop(model, FitRequest.of(Method.EVALUATE, x=x, y=y, **kwargs))


@like(keras.Model.predict)
def predict(model: keras.Model, x: Data, **kwargs: Any) -> Any:
    """Predicts with any Keras model on what `kmodels.fit` takes, see `keras.Model.predict`."""
    return _by_loop(model, FitRequest.of(Method.PREDICT, x=x, **kwargs))


def _by_loop(model: keras.Model, request: FitRequest) -> Any:
    if isinstance(model, traced.Follows):  # of kmodels, with a preprocessor, or a loss of its own
        return getattr(model, request.method)(**request.keywords())
    return run_request(model, request)
