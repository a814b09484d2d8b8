"""The plan that `distribute` returns: all steps of a run that depend on the devices."""

from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import keras

from kmodels.core.errors import InputError
from kmodels.core.types import Data
from kmodels.distribution import processes
from kmodels.distribution.engines.engine import Engine
from kmodels.distribution.mesh import Mesh, check_batch

if TYPE_CHECKING:
    from kmodels.data.pipeline.shard import BatchSharding


class ParallelPlan:
    """A mesh in force.

    `shard`, `callbacks` and `export` do what one process needs too, so a script is the same for
    one device and for many machines.

    Attributes:
        mesh: the filled mesh.
        engine: what the backend made of it.
    """

    def __init__(self, mesh: Mesh, engine: Engine):
        self.mesh = mesh
        self.engine = engine
        self._prepared: WeakSet[Any] = WeakSet()

    def __repr__(self) -> str:
        """Returns the mesh, as it is written."""
        return f"<ParallelPlan {self.mesh}>"

    def prepare(self, model: keras.Model) -> Any:
        """Makes a built model ready for `compile`; after loading weights and `enable_lora`.

        Args:
            model: a task of kmodels, or a `keras.Model` of your own.

        Returns:
            The model to compile and to train.

        Raises:
            InputError: for a model or an adapter made before `distribute`, after
                `keras.utils.clear_session()`, and for layers that cannot be trained so.
        """
        prepared = self.engine.prepare(model)
        self._prepared.add(prepared)
        return prepared

    def check(self, model: keras.Model) -> None:
        """Checks that a model can be trained over the mesh; `fit` calls it first.

        Raises:
            InputError: for a model that does not lie on the mesh, or, in a run of several
                processes, one that `prepare` has not seen.
        """
        if processes.count() > 1 and model not in self._prepared:
            raise InputError(
                f"{model.name} would be trained in each process alone; call "
                "model = plan.prepare(model) before compile"
            )
        self.engine.check(model)

    def shard(
        self,
        x: Data,
        y: Data = None,
        sample_weight: Data = None,
        *,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        seed: int | None = None,
        training: bool = True,
        own: bool = False,
    ) -> Any:
        """Returns the rows of this process, for `fit`, `evaluate` or `predict`.

        Tasks do it by themselves with what they are given; a `keras.Model` of your own needs it
        in a run of several processes. Give all processes the same data in the same order.

        Args:
            x: arrays, a loader or anything else that `fit` takes, see docs/data.md.
            y: labels, where x is arrays.
            sample_weight: weights, where x is arrays.
            batch_size: rows of a global batch, for arrays and datasets of single samples; 32 by
                default.
            shuffle: for those, a new order in each epoch; by default in training.
            seed: seed of that order; by default that of `keras.utils.set_random_seed`.
            training: leaves a last batch out that is not full. False is for evaluation: rows of
                weight 0 fill it up, so compile with `weighted_metrics`.
            own: the data holds the rows of this process alone, of shard `engine.shard` of
                `engine.shards`.

        Returns:
            The object that Keras takes as x, with as many batches in each process.

        Raises:
            InputError: where the mesh does not divide the batches, or processes differ in how many
                they have, or in what is in the first one.
        """
        # It is imported when it is asked for: families import this package to tell their layout.
        from kmodels.data.pipeline.kinds import as_dataset, pipeline
        from kmodels.data.pipeline.request import Method

        size = batch_size or 32
        if own:
            self.check_batch(size)
            size //= self.engine.shards
        shuffle = training if shuffle is None else shuffle
        data = as_dataset(x, y, sample_weight, size, shuffle=shuffle)
        if seed is not None and hasattr(data, "seed"):
            data.seed = seed
        return pipeline(data, self.rule(own), Method.FIT if training else Method.EVALUATE)

    def rule(self, own: bool = False) -> "BatchSharding":
        """Returns which rows of each batch this process takes; `own` as in `shard`."""
        from kmodels.data.pipeline.shard import BatchSharding

        engine = self.engine
        return BatchSharding(self.check_batch, engine.shards, engine.shard, own, processes)

    def callbacks(self, directory: str | Path, **settings: Any) -> list[Any]:
        """Returns what makes a run continue from where it was, whatever ends it.

        The same script, started again over this mesh, ends with the weights of a run that was never
        stopped; over another mesh, or another number of processes, it goes on too.

        Args:
            directory: directory of the checkpoints, on a disk that all processes see.
            **settings: of `kmodels.callbacks.Checkpoint`, such as `every=500`.

        Returns:
            Returns callbacks for `fit`, beside those of your own.
        """
        from kmodels.callbacks import Checkpoint

        return [Checkpoint(directory, **settings)]

    def export(self, model: keras.Model, directory: str | Path) -> Path:
        """Writes one ordinary directory that `from_preset` reads on any backend and device.

        Weights are gathered one after another, so that none of the processes has more than one of
        them in memory whole. All have to call it; the first one writes.

        Args:
            model: a model of kmodels.
            directory: to make or replace.

        Raises:
            InputError: for another model, or where the directory cannot be written.
        """
        save = getattr(model, "save_to_preset", None)
        if save is None:
            raise InputError(
                f"export writes what from_preset reads, and {type(model).__name__} is not a model "
                "of kmodels; plan.callbacks keeps its weights"
            )
        return save(directory)

    def check_batch(self, batch_size: int) -> None:
        """Raises `InputError` where the mesh does not divide a global batch."""
        check_batch(self.mesh, batch_size)


# The name that the class had at first.
Plan = ParallelPlan
