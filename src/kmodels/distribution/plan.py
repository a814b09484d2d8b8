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

    `shard`, `callbacks` and `export` also work in a run of one process, so a script is the same for
    one device and for many machines.

    Attributes:
        mesh: the filled mesh.
        engine: the mesh on the backend.
    """

    def __init__(self, mesh: Mesh, engine: Engine):
        self.mesh = mesh
        self.engine = engine
        self._prepared: WeakSet[Any] = WeakSet()

    def __repr__(self) -> str:
        """Returns the mesh, as it is written."""
        return f"<ParallelPlan {self.mesh}>"

    def prepare(self, model: keras.Model) -> Any:
        """Prepares a built model for `compile`; call it after loading weights and `enable_lora`.

        Args:
            model: a task of kmodels, or a `keras.Model` of your own.

        Returns:
            The model to compile and to train.

        Raises:
            InputError: for a model or an adapter made before `distribute`, after
                `keras.utils.clear_session()`, and for layers that cannot be trained on the mesh.
        """
        prepared = self.engine.prepare(model)
        self._prepared.add(prepared)
        return prepared

    def check(self, model: keras.Model) -> None:
        """Checks that a model can be trained over the mesh; called by `fit`.

        Raises:
            InputError: for a model that is not on the mesh, or, in a run of several processes, one
                without `prepare`.
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

        Tasks shard their data themselves; your own `keras.Model` needs this in a run of several
        processes. Give all processes the same data in the same order.

        Args:
            x: arrays, a loader or any other data that `fit` accepts, see docs/data.md.
            y: labels, if x is arrays.
            sample_weight: weights, if x is arrays.
            batch_size: rows of a global batch, for arrays and datasets of single samples; default:
                32.
            shuffle: a new order of these in each epoch; default: in training.
            seed: seed of that order; default: that of `keras.utils.set_random_seed`.
            training: drops a last batch that is not full. False is for evaluation: rows of weight 0
                fill it up, so compile with `weighted_metrics`.
            own: True if the data has only the rows of this process, shard `engine.shard` of
                `engine.shards`.

        Returns:
            An object that Keras accepts as x, with the same number of batches in each process.

        Raises:
            InputError: if the mesh does not divide the batches, or if processes differ in their
                number or in the first one.
        """
        # Imported here: families import this package to register their layout.
        from kmodels.data.pipeline.indexed import IndexedBatches
        from kmodels.data.pipeline.kinds import as_dataset, pipeline
        from kmodels.data.pipeline.request import Method

        if own:
            self.check_batch(batch_size or 32)
            batch_size = (batch_size or 32) // self.engine.shards
        shuffle = training if shuffle is None else shuffle
        data = as_dataset(x, y, sample_weight, batch_size, shuffle=shuffle)
        if seed is not None:
            if not isinstance(data, IndexedBatches):
                raise InputError(f"seed is {seed}, but x has its own order; leave seed out")
            data.seed = seed
        return pipeline(data, self.rule(own), Method.FIT if training else Method.EVALUATE)

    def rule(self, own: bool = False) -> "BatchSharding":
        """Returns the rows of each batch that this process takes; `own` as in `shard`."""
        from kmodels.data.pipeline.shard import BatchSharding

        engine = self.engine
        return BatchSharding(self.check_batch, engine.shards, engine.shard, own, processes)

    def callbacks(self, directory: str | Path, **settings: Any) -> list[Any]:
        """Returns callbacks that save the run, and resume it when the script is started again.

        Resumed over this mesh, a run ends with the weights of one that was never stopped; it can
        also continue over another mesh, or with another number of processes.

        Args:
            directory: directory of the checkpoints, on a disk that all processes share.
            **settings: arguments of `kmodels.callbacks.Checkpoint`, such as `every=500`.

        Returns:
            Callbacks for `fit`, to which you may add others.
        """
        from kmodels.checkpoint.callback import Checkpoint

        return [Checkpoint(directory, **settings)]

    def export(self, model: keras.Model, directory: str | Path) -> Path:
        """Writes a directory that `from_preset` reads on any backend and device.

        Weights are gathered one after another, so that a process has at most one whole weight in
        memory. All processes must call it; rank zero writes.

        Args:
            model: a model of kmodels.
            directory: directory to create or replace.

        Raises:
            InputError: for another model, or if the directory cannot be written.
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

    Call it once, before the model is built, since variables are not moved later. The
    order is distribute, build or load, `enable_lora`, `plan.prepare`, `compile`, `fit`.

        plan = kmodels.distribution.distribute("data=4,model=2")
        model = plan.prepare(kmodels.models.ViTImageClassifier.from_preset("vit_debug"))

    Args:
        spec: axes and lengths, see `parse_mesh`; -1 takes the remaining devices. None ends the use
            of a mesh.
        batch_size: rows of a global batch, to check it here.

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
