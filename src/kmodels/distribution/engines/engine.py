"""The base of the engines: many devices on one backend."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from kmodels.core.errors import InputError
from kmodels.core.types import Tree
from kmodels.distribution.mesh import Mesh

if TYPE_CHECKING:
    import keras


class Engine:
    """A mesh in force on one backend: the base of the engines.

    Attributes:
        mesh: the filled mesh.
        shards: number of parts in which processes feed a global batch, S in `data.pipeline.shard`.
        shard: number of the part that this process feeds, k there.
    """

    mesh: Mesh
    shards = 1
    shard = 0

    def prepare(self, model: "keras.Model") -> Any:
        """Checks a built model and prepares it for `compile`; returns the model to train."""
        self.check(model)
        return model

    def check(self, model: "keras.Model") -> None:
        """Raises `InputError` if the mesh was dropped or the model is not on it.

        This happens after `keras.utils.clear_session()`, for a model or an adapter made before
        `distribute`, and for layers that the backend cannot train in parallel.
        """
        raise NotImplementedError

    def check_place(
        self, in_force: bool, model: "keras.Model", lies: Callable[[Any], bool]
    ) -> None:
        """The part of `check` that is the same on every backend.

        The mesh must still be that of the backend, and each variable must lie on it.
        """
        if not in_force:
            raise InputError(
                f"the mesh {self.mesh} was dropped; call distribute again, as after "
                "keras.utils.clear_session(), and then build the model"
            )
        outside = [variable.path for variable in model.variables if not lies(variable)]
        if outside:
            raise InputError(
                f"{len(outside)} of {len(model.variables)} variables are not on the mesh "
                f"{self.mesh}, the first {outside[0]}: they were made before distribute; call it "
                "first, then build or load the model, then enable_lora"
            )

    def begin_predict(self, model: "keras.Model") -> None:
        """Prepares a `predict` whose outputs `all_predictions` takes."""

    def all_predictions(self, outputs: Tree, rows: int) -> Any:
        """Returns the outputs of all processes, in the order of the data.

        Nested arrays have the rows of this process, which feeds `rows` of each batch.
        """
        del rows
        return outputs

    def leave(self) -> None:
        """Ends the use of the mesh; models that were built on it cannot be used any more."""
        raise NotImplementedError


class EngineBackend(Protocol):
    """Many devices on one backend."""

    @property
    def MORE(self) -> str:
        """Instruction for getting more devices, with "{}" for their number."""
        ...

    @property
    def NO_SEQUENCE(self) -> str | None:
        """The reason why rows cannot be sharded by tokens, or None if they can."""
        ...

    def devices(self) -> int:
        """Returns the number of devices of all processes."""
        ...

    def use(self, mesh: Mesh) -> Engine:
        """Puts a filled mesh in force; raises `InputError` if the backend does not support it."""
        ...
