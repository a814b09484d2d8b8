"""The options of `kmodels parity`."""

import math
from dataclasses import asdict, dataclass

from kmodels.core.backend_choice import BACKENDS
from kmodels.core.errors import InputError, check_whole
from kmodels.tools.bench.options import PRECISIONS, check_names
from kmodels.tools.parity.compare import TOLERANCES


@dataclass(frozen=True)
class Side:
    """One of the two.

    Attributes:
        backend: backend of Keras.
        preset: a registered name or a directory.
        precision: a key of `PRECISIONS`.
        ops: "override" or "generic".
    """

    backend: str
    preset: str
    precision: str = "float32"
    ops: str = "override"

    def told(self, other: "Side") -> str:
        """Returns the backend, and what else is not as on the other side."""
        own, theirs = asdict(self), asdict(other)
        more = [str(own[name]) for name in own if name != "backend" and own[name] != theirs[name]]
        return " ".join([self.backend, *more])


@dataclass(frozen=True)
class ParityOptions:
    """The model, data and steps that are compared.

    Args:
        left: the first side.
        right: the second side.
        steps: steps of training.
        batch_size: rows of a step.
        sequence_length: tokens of a row of text.
        image_size: height and width in pixels; the preset's by default.
        num_classes: number of classes of a classifier; the preset's by default.
        seed: seed of first weights and data.
        tolerance: share of a tensor's largest value; by the two precisions by default.
        limit: seconds that a process may take for an answer.
    """

    left: Side
    right: Side
    steps: int = 3
    batch_size: int = 2
    sequence_length: int = 16
    image_size: int | None = None
    num_classes: int | None = None
    seed: int = 0
    tolerance: float | None = None
    limit: float = 900.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            check_whole(name, getattr(self, name))
        check_whole("sequence_length", self.sequence_length, 2)
        check_whole("seed", self.seed, 0)
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise InputError(f"tolerance is {self.tolerance}; give a share between 0 and 1")
        for side in (self.left, self.right):
            check_names("backends", (side.backend,), BACKENDS)
            check_names("precision", (side.precision,), PRECISIONS)
            check_names("ops", (side.ops,), ("override", "generic"))

    @property
    def allowed(self) -> float:
        """The tolerance in force: each side rounds by itself, so that squares add up."""
        if self.tolerance is not None:
            return self.tolerance
        return math.hypot(*(TOLERANCES[side.precision] for side in (self.left, self.right)))
