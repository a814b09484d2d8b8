"""Whether a model is called inside a step that needs all of its predictions."""

from collections.abc import Iterator
from contextlib import contextmanager


class InsideStep:
    """What a model gives inside a step; an object of its own, which Keras does not track."""

    def __init__(self) -> None:
        # Replicas on TensorFlow are threads, which enter and leave a step in turns.
        self._inside = 0
        self.chosen = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Has the model give all predictions inside the block, if its own loss was chosen."""
        self._inside += self.chosen
        try:
            yield
        finally:
            self._inside -= self.chosen

    @property
    def active(self) -> bool:
        """True inside a step with the model's own loss."""
        return self._inside > 0
