"""What `fit`, `evaluate` and `predict` do with their arguments over a mesh."""

from collections import Counter
from typing import Any

import keras

from kmodels.core import keras_internals
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError
from kmodels.data.fit import adapters
from kmodels.data.fit.batches import Stream
from kmodels.data.fit.feed import InstrumentedData, Native
from kmodels.distribution import processes
from kmodels.distribution.current_plan import current
from kmodels.distribution.input.indexed import Given, ShardedDataset
from kmodels.distribution.input.rank_callbacks import followers
from kmodels.distribution.input.sharding_rule import EVALUATE, FIT, PREDICT, BatchSharding, digest
from kmodels.distribution.input.stream import ShardedStream

_predictions: Any = backend_module("kmodels.distribution.engines.predictions")
_made: Counter[str] = Counter()


def shard(
    data: Any, rule: BatchSharding, use: str, steps: int | None = None
) -> ShardedDataset | ShardedStream | Native:
    """This process's rows of data, after all processes have compared theirs.

    Args:
        data: of `kmodels.data.as_dataset`.
        rule: what to take.
        use: "fit", "evaluate" or "predict".
        steps: batches to end after, in evaluate and predict.

    Returns:
        What Keras takes as x; a `tf.data` pipeline on TensorFlow as it is, which cuts it up itself.

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


def rule(plan: Any, own: bool = False) -> BatchSharding:
    """What this process takes of batches over the mesh of a plan."""
    return BatchSharding(plan.mesh, plan.engine.shards, plan.engine.shard, own)


def run(
    model: Any, method: Any, x: Any, y: Any, kwargs: dict[str, Any], preprocess: Any = None
) -> Any:
    """Calls Keras' `fit`, `evaluate` or `predict`; over a mesh, in each process on its rows.

    Args:
        model: whose method it is.
        method: of Keras.
        x: see `Task.fit`.
        y: labels, where x is arrays.
        kwargs: the method's others.
        preprocess: see `kmodels.data.as_dataset`.

    Returns:
        What the method returns; predictions are those of all processes, in the order of the data.

    Raises:
        InputError: where the mesh does not divide the batches, processes were given other data, or
            a callback or a metric cannot work so.
    """
    plan = current()
    if plan is None or (isinstance(x, InstrumentedData) and x.running):
        return adapters.run(method, x, y, preprocess=preprocess, **kwargs)
    # Again, as the mesh may be gone since plan.prepare, and on JAX nobody would notice.
    plan.engine.check(model)
    if (use := method.__name__) == FIT:
        plan.check(model)
    data = _data(plan, use, x, y, kwargs, preprocess)
    if use == FIT and (held_out := kwargs.get("validation_data")) is not None:
        kwargs["validation_data"] = _held_out(plan, held_out, kwargs)
    _check_weights(model, data if use == EVALUATE else kwargs.get("validation_data"))
    if not plan.engine.main:
        kwargs["verbose"] = 0
    kwargs["callbacks"] = followers(kwargs.get("callbacks"), plan, use)
    if use != PREDICT or isinstance(data, Native):
        return adapters.run(method, data, preprocess=preprocess, **kwargs)
    if _predictions is not None:
        _predictions.begin(model)
    outputs = adapters.run(method, data, preprocess=preprocess, **kwargs)
    if _predictions is not None:
        outputs = _predictions.of_all(outputs, data.rows, plan.engine.shards)
    return keras.tree.map_structure(lambda leaf: leaf[: data.samples], outputs)


def _data(plan: Any, use: str, x: Any, y: Any, kwargs: dict[str, Any], preprocess: Any) -> Any:
    """This process's part; the arguments that went into it are taken out of the others."""
    weight, size = kwargs.pop("sample_weight", None), kwargs.get("batch_size")
    if share := kwargs.pop("validation_split", 0.0):
        held_out = kwargs.get("validation_data")
        x, y, weight, kwargs["validation_data"] = adapters.split(
            x, y, weight, share, held_out, preprocess, size
        )
    if isinstance(x, ShardedDataset | ShardedStream):
        return x.prepared_by(preprocess)
    data = adapters.as_dataset(
        x,
        y,
        weight,
        size,
        shuffle=bool(kwargs.get("shuffle", False)),
        preprocess=preprocess,
        class_weight=kwargs.get("class_weight"),
    )
    steps = None if use == FIT else kwargs.get("steps")
    return shard(data, rule(plan), use, steps)


def _held_out(plan: Any, held_out: Any, kwargs: dict[str, Any]) -> Any:
    if isinstance(held_out, ShardedDataset | ShardedStream):
        return held_out
    size = kwargs.get("validation_batch_size") or kwargs.get("batch_size")
    given = held_out if isinstance(held_out, tuple) else (held_out,)
    data = adapters.as_dataset(*given, batch_size=size)
    return shard(data, rule(plan), EVALUATE, kwargs.get("validation_steps"))


def _check_weights(model: Any, data: Any) -> None:
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
    # Labels tell one set of pictures from another, and need no decoding.
    return digest((source.labels, data.maker.order(0)[: data.batch_size]))
