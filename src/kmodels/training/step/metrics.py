"""Running averages of what loss functions log, and the metrics that the user gave to `compile`."""

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.core.types import MetricsLike, Tensor, Tree
from kmodels.training.step.objectives import ONLY

Results = dict[str, tuple[Any, dict[str, Any]]]


class Running:
    """The metrics of a step, made when its first batch is looked at.

    Args:
        objectives: their names; where there are several, the average of each one's loss is kept.
        given: metrics, or metrics by name.

    Attributes:
        built: whether the averages are there.

    Raises:
        InputError: for things that are no metrics.
    """

    def __init__(self, objectives: Iterable[str], given: MetricsLike = None):
        self.given = _by_name(given)
        self.losses = {name: f"{name}_loss" for name in objectives if name != ONLY}
        self.means: dict[str, Any] = {}
        self.built = False

    @property
    def metrics(self) -> list[Any]:
        """All of them."""
        return [*self.means.values(), *self.given.values()]

    def update(self, results: Results, rows: Tensor | int) -> list[Any]:
        """Takes in what the objectives returned.

        Args:
            results: loss and logs by objective.
            rows: examples of the batch, which is how much an average counts it.

        Returns:
            The metrics that were fed.

        Raises:
            InputError: for a log that does not fit.
        """
        fed = [
            self._average(self.losses[objective], loss, rows)
            for objective, (loss, _) in results.items()
            if objective in self.losses
        ]
        for objective, (_, logs) in results.items():
            for name, value in logs.items():
                metric = self._feed(name, value, rows)
                if any(metric is other for other in fed):
                    raise InputError(
                        f"{objective} logs {name!r} as another objective does; rename one"
                    )
                fed.append(metric)
        return fed

    def check(self, fed: list[Any]) -> None:
        """Raises `InputError` where a metric given to `compile` was not fed."""
        for name, metric in self.given.items():
            if not any(metric is other for other in fed):
                raise InputError(
                    f"compile got the metric {name!r}, which no loss function logs; return what "
                    f'it takes, as in (loss, {{"{name}": (y, logits)}})'
                )

    def _feed(self, name: str, value: Tensor, rows: Tensor | int) -> Any:
        if name in self.given:
            self.given[name].update_state(*(value if isinstance(value, tuple) else (value,)))
            return self.given[name]
        if name == "loss" or name in self.losses.values():
            raise InputError(f"{name!r} is logged already; give that log another name")
        if isinstance(value, tuple):
            raise InputError(
                f"{name!r} is logged as {len(value)} values, and compile got no metric of that "
                "name; log a scalar, or give the metric to compile"
            )
        value = keras.ops.convert_to_tensor(value)
        if len(value.shape):
            raise InputError(
                f"{name!r} is logged with shape {tuple(value.shape)}; log a scalar, such as its "
                "keras.ops.mean"
            )
        return self._average(name, value, rows)

    def _average(self, name: str, value: Tensor, rows: Tensor | int) -> Any:
        if name not in self.means:
            if self.built:
                raise InputError(
                    f"{name!r} is not among the logs of the first batch in training: "
                    f"{', '.join(self.means)}; log it there too"
                )
            self.means[name] = keras.metrics.Mean(name=name)
        self.means[name].update_state(value, sample_weight=rows)
        return self.means[name]


def logged(metrics: Iterable[Any]) -> dict[str, Any]:
    """Returns their results by name; one that has several gives each."""
    found: dict[str, Any] = {}
    for metric in metrics:
        result = metric.result()
        found |= result if isinstance(result, dict) else {metric.name: result}
    return found


def rows(batch: Tree) -> Any:
    """Returns how many examples are in a batch: the first size of its first array."""
    for part in keras.tree.flatten(batch):
        if part is not None:
            return keras.ops.shape(part)[0] if len(part.shape) else 1
    raise InputError("the data gave an empty batch; give at least one array")


def _by_name(given: MetricsLike) -> dict[str, Any]:
    if isinstance(given, Mapping):
        named = dict(given)
    else:
        parts = [] if given is None else given if isinstance(given, list | tuple) else [given]
        named = {getattr(part, "name", str(part)): part for part in parts}
    for name, part in named.items():
        if not isinstance(part, keras.metrics.Metric):
            raise InputError(
                f"compile got {part!r} as the metric {name!r}; give a keras.metrics object, which "
                "the log of that name is given to"
            )
    return named
