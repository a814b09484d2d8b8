"""`distribute` and `ParallelPlan`: a run over many devices."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, overload
from weakref import WeakSet

import keras

from kmodels.core import processes
from kmodels.core.dispatch import backend, backend_module
from kmodels.core.errors import InputError
from kmodels.core.types import Data
from kmodels.distribution.engines.engine import Engine, EngineBackend
from kmodels.distribution.mesh import Mesh, check_batch, fill, parse_mesh

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
            InputError: if the mesh does not divide the batches, or processes differ in how many
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
        from kmodels.checkpoint.callback import Checkpoint

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
        """Raises `InputError` if the mesh does not divide a global batch."""
        check_batch(self.mesh, batch_size)


# The name that the class had at first.
Plan = ParallelPlan
_current: ParallelPlan | None = None


def current() -> ParallelPlan | None:
    """Returns the plan in force, or None on one device."""
    return _current


@overload
def distribute(spec: str, batch_size: int | None = None) -> ParallelPlan: ...
@overload
def distribute(spec: None, batch_size: int | None = None) -> None: ...
@overload
def distribute(spec: str | None, batch_size: int | None = None) -> ParallelPlan | None: ...
def distribute(spec: str | None, batch_size: int | None = None) -> ParallelPlan | None:
    """Distributes models that are built from now on over the devices of a mesh.

    Call it once, before the model is built: variables keep the place where they were made. The
    order is distribute, build or load, `enable_lora`, `plan.prepare`, `compile`, `fit`.

        plan = kmodels.distribution.distribute("data=4,model=2")
        model = plan.prepare(kmodels.models.ViTImageClassifier.from_preset("vit_debug"))

    Args:
        spec: axes and lengths, as `parse_mesh` reads them; -1 takes the devices that are left.
            None takes a mesh back.
        batch_size: rows of a global batch, checked here where it is given.

    Returns:
        The plan, which is `current()` from now on; None for None.

    Raises:
        InputError: for a wrong mesh, too few devices, a batch size that the mesh does not
            divide, or a mesh that the backend does not support.
    """
    global _current
    if spec is None:
        former, _current = _current, None
        if former is not None:
            former.engine.leave()
        return None
    mesh = parse_mesh(spec)
    if batch_size is not None:
        check_batch(mesh, batch_size)
    module = backend_module("kmodels.distribution.engines.engine", EngineBackend, optional=True)
    if module is None:
        raise InputError(
            f"a mesh ({spec}) is not supported on {backend()} yet; set KERAS_BACKEND=jax or leave "
            "the mesh out"
        )
    if mesh.sequence != 1 and module.NO_SEQUENCE is not None:
        raise InputError(
            f"the mesh {mesh} cuts rows by their tokens, which is not supported on {backend()}: "
            f"{module.NO_SEQUENCE}; set KERAS_BACKEND=jax, or leave sequence out"
        )
    processes.join()
    mesh = fill(mesh, module.devices(), module.MORE)
    if batch_size is not None:
        check_batch(mesh, batch_size)
    distribute(None)
    plan = ParallelPlan(mesh, module.use(mesh))
    _current = plan
    return plan
