"""The seam of predictions of several processes: `predictions_<backend>.py`."""

from typing import Any, Protocol

import keras

from kmodels.core.dispatch import backend_module
from kmodels.core.types import Tree


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


predictions = backend_module(
    "kmodels.distribution.engines.predictions", PredictionsBackend, optional=True
)
