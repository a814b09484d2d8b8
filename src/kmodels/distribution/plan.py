"""What `distribute` gives: the steps of a run that depend on how many devices there are."""

from typing import Any

from kmodels.distribution.engine import Engine
from kmodels.distribution.mesh import Mesh, check_batch


class Plan:
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

    def __repr__(self) -> str:
        """The mesh, as it is written."""
        return f"<Plan {self.mesh}>"

    def prepare(self, model: Any) -> Any:
        """Makes a built model ready for `compile`; after loading weights and `enable_lora`.

        Args:
            model: a task of kmodels, or a `keras.Model` of one's own.

        Returns:
            The model to compile and to train.

        Raises:
            InputError: for a model or an adapter made before `distribute`, after
                `keras.utils.clear_session()`, and for layers that cannot be trained so.
        """
        return self.engine.prepare(model)

    def check_batch(self, batch_size: int) -> None:
        """Raises `InputError` where the mesh does not divide a global batch."""
        check_batch(self.mesh, batch_size)
