"""Models of a step that follow others: their weights are moving averages, as a teacher's are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.core.types import Tensor


@dataclass(frozen=True)
class WeightAverage:
    """Says which model another one follows: w <- momentum * w + (1 - momentum) * followed.

    Args:
        of: name of the model that is followed.
        momentum: share of its own that it keeps at each step, from 0 to 1; or a function of the
            number of steps made before, a float32 scalar, that gives it.

    Raises:
        InputError: for a number out of range.
    """

    of: str
    momentum: float | Callable[[Any], Any] = 0.996

    def __post_init__(self) -> None:
        if not callable(self.momentum) and not 0 <= self.momentum <= 1:
            raise InputError(f"momentum is {self.momentum}; give 0 to 1, or a function of the step")

    def at(self, step: Tensor) -> Any:
        """Returns the momentum after so many steps, a float32 scalar."""
        found = self.momentum(step) if callable(self.momentum) else self.momentum
        return keras.ops.cast(found, "float32")


class Averages:
    """All models of a step that follow others.

    Args:
        models: the models of the step, by name.
        given: by name of the model that follows.
        trained: names of models that an objective trains.

    Raises:
        InputError: for names that are not of models, and a model that is trained too.
    """

    def __init__(self, models: Any, given: Mapping[str, WeightAverage] | None, trained: set[str]):
        self.rules = dict(given or {})
        self.models = models
        self.pairs: list[tuple[WeightAverage, Any, Any]] = []
        for name, rule in self.rules.items():
            for wanted in (name, rule.of):
                if not isinstance(models, Mapping) or not isinstance(
                    models.get(wanted), keras.layers.Layer
                ):
                    raise InputError(
                        f"averages name {wanted!r}, which is not a model of the step; give models "
                        "by name, and names of theirs"
                    )
            if name in trained:
                raise InputError(
                    f"{name} follows {rule.of} and is trained too; name in train the models that "
                    "an optimizer moves"
                )

    def build(self) -> None:
        """Pairs the weights, once the models have them.

        Raises:
            InputError: where the two models do not have weights of the same shapes.
        """
        self.pairs = []
        for name, rule in self.rules.items():
            one, other = self.models[name].weights, self.models[rule.of].weights
            if [tuple(w.shape) for w in one] != [tuple(w.shape) for w in other]:
                raise InputError(
                    f"{name} cannot follow {rule.of}, whose weights have other shapes; make both "
                    "from the same settings"
                )
            self.pairs += [(rule, w, v) for w, v in zip(one, other, strict=True)]

    @property
    def moved(self) -> list[Any]:
        """The weights that follow."""
        return [weight for _, weight, _ in self.pairs]

    def move(self, iterations: Any) -> None:
        """Moves all of them; `iterations` counts the step that was just made."""
        if not self.pairs:
            return
        ops = keras.ops
        step = ops.cast(ops.convert_to_tensor(iterations), "float32") - 1.0
        momenta = {id(rule): rule.at(step) for rule, _, _ in self.pairs}
        for rule, weight, followed in self.pairs:
            old, new = (ops.cast(ops.convert_to_tensor(w), "float32") for w in (weight, followed))
            found = new + (old - new) * momenta[id(rule)]
            weight.assign(ops.cast(found, weight.dtype))
