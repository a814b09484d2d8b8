"""`fit`, `evaluate` and `predict` over a mesh: each process is handed its rows of the data."""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import keras

from kmodels.core import keras_internals
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError
from kmodels.core.types import Tree
from kmodels.data.fit.adapters import as_dataset, with_validation
from kmodels.data.fit.batches import Preprocess
from kmodels.data.fit.native import Native
from kmodels.data.fit.request import FitRequest, Method
from kmodels.data.fit.run import run as run_here
from kmodels.data.fit.stream import Stream
from kmodels.distribution import processes
from kmodels.distribution.input.indexed import Given, ShardedDataset
from kmodels.distribution.input.rank_callbacks import followers
from kmodels.distribution.input.sharding_rule import BatchSharding, digest
from kmodels.distribution.input.stream import ShardedStream

if TYPE_CHECKING:
    from kmodels.distribution.plan import ParallelPlan


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
_made: Counter[str] = Counter()


def shard(
    data: Any, rule: BatchSharding, use: Method, steps: int | None = None
) -> ShardedDataset | ShardedStream | Native:
    """Returns this process's rows of data, after all processes have compared theirs.

    Args:
        data: data of `kmodels.data.as_dataset`.
        rule: what to take.
        use: what it is for.
        steps: batches to end after, in evaluate and predict.

    Returns:
        The object that Keras takes as x; on TensorFlow a `tf.data` pipeline stays as it is, since
        TensorFlow cuts it up itself.

    Raises:
        InputError: where the mesh does not divide the batches, or processes differ.
    """
    if isinstance(data, ShardedDataset | ShardedStream | Native):
        return data
    _made[use] += 1
    name = f"the data to {use}, {_made[use]}"
    if isinstance(data, Stream):
        part: ShardedDataset | ShardedStream = ShardedStream(data, rule, use, name, steps)
    else:
        data = data if hasattr(data, "part") else Given(data)
        part = ShardedDataset(data, rule, use, steps)
    if processes.count() > 1:
        facts: dict[str, Any] = {"the number of batches": part.num_batches}
        if isinstance(part, ShardedDataset):
            facts["the batch size"] = data.batch_size
        if not rule.own:
            facts["the number of samples"] = part.samples
            if isinstance(part, ShardedDataset):
                facts["the first batch"] = _first(data)
        processes.check_equal(name, facts)
    return part


def rule(plan: "ParallelPlan", own: bool = False) -> BatchSharding:
    """Returns what this process takes of batches over the mesh of a plan."""
    return BatchSharding(plan.mesh, plan.engine.shards, plan.engine.shard, own)


def run(
    plan: "ParallelPlan",
    model: keras.Model,
    call: Callable[[keras.Model, FitRequest], Any],
    request: FitRequest,
    preprocess: Preprocess | None = None,
) -> Any:
    """Runs `fit`, `evaluate` or `predict` over a mesh, in each process on its rows.

    Args:
        plan: in force.
        model: whose method it is.
        call: see `kmodels.data.fit.run.run`.
        request: what it is asked for.
        preprocess: see `kmodels.data.as_dataset`.

    Returns:
        The result of the method; predictions are those of all processes, in the order of the data.

    Raises:
        InputError: where the mesh does not divide the batches, processes were given other data, or
            a callback or a metric cannot work so.
    """
    method = request.method
    # Again, as the mesh may be gone since plan.prepare, and on JAX nobody would notice.
    plan.engine.check(model)
    if method is Method.FIT:
        plan.check(model)
    request = _sharded(plan, with_validation(request, preprocess), preprocess)
    data = request.x
    _check_weights(model, data if method is Method.EVALUATE else request.validation_data)
    request = request.changed(
        verbose=request.verbose if plan.engine.main else 0,
        callbacks=followers(request.callbacks, plan, method),
    )
    if method is not Method.PREDICT or isinstance(data, Native):
        return run_here(model, call, request)
    if _predictions is not None:
        _predictions.begin(model)
    outputs = run_here(model, call, request)
    if _predictions is not None:
        outputs = _predictions.of_all(outputs, data.rows, plan.engine.shards)
    return keras.tree.map_structure(lambda leaf: leaf[: data.samples], outputs)


def _sharded(
    plan: "ParallelPlan", request: FitRequest, preprocess: Preprocess | None
) -> FitRequest:
    """Returns the request with this process's part of the data, preprocessed."""
    data, method = request.x, request.method
    if isinstance(data, ShardedDataset | ShardedStream):
        data = data.prepared_by(preprocess)
    else:
        whole = as_dataset(
            data,
            request.y,
            request.sample_weight,
            request.batch_size,
            shuffle=bool(request.shuffle),
            preprocess=preprocess,
            class_weight=request.class_weight,
        )
        data = shard(whole, rule(plan), method, None if method is Method.FIT else request.steps)
    held_out = request.validation_data
    if held_out is not None and not isinstance(held_out, ShardedDataset | ShardedStream):
        size = request.validation_batch_size or request.batch_size
        given = held_out if isinstance(held_out, tuple) else (held_out,)
        whole = as_dataset(*given, batch_size=size)
        held_out = shard(whole, rule(plan), Method.EVALUATE, request.validation_steps)
    return request.changed(x=data, y=None, sample_weight=None, validation_data=held_out)


def _check_weights(model: keras.Model, data: Any) -> None:
    if getattr(data, "fills", False) and (names := keras_internals.unweighted_metrics(model)):
        raise InputError(
            f"metrics={names} would count the rows that fill the last batch up, which weigh "
            f"nothing; compile with weighted_metrics={names}, or take a batch size that divides "
            f"{data.samples} samples"
        )


def _first(data: Any) -> str:
    source = getattr(getattr(data, "maker", None), "source", None)
    if source is None:
        return digest(data[0])
    # Labels tell one set of images from another, and need no decoding.
    return digest((source.labels, data.maker.order(0)[: data.batch_size]))
