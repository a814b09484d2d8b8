"""Tell a model that it is called inside a step of `fit` or `evaluate` whose loss is its own."""

from collections.abc import Iterator
from contextlib import contextmanager


class InsideStep:
    """Switch what a model gives inside a step: what its own loss needs, in place of its output.

    An object of its own, which Keras does not track.

    Attributes:
        chosen: whether `compile` chose the model's own loss.
    """

    def __init__(self, chosen: bool = False) -> None:
        # Replicas on TensorFlow are threads, which enter and leave a step in turns.
        self._inside = 0
        self.chosen = chosen

    @contextmanager
    def inside_step(self) -> Iterator[None]:
        """Switches inside the block, if the model's own loss was chosen."""
        self._inside += self.chosen
        try:
            yield
        finally:
            self._inside -= self.chosen

    @property
    def active(self) -> bool:
        """True inside a step with the model's own loss."""
        return self._inside > 0
