"""The objectives of a step: a loss each, with the models it trains, an optimizer and metrics."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import keras

from kmodels.core import keras_internals
from kmodels.core.arguments import Checked, check_fields
from kmodels.core.errors import InputError
from kmodels.core.keras_internals import average_by_update
from kmodels.core.types import MetricsLike, OptimizerLike, Tensor, Tree
from kmodels.training.loop import follow_variables
from kmodels.training.optax import as_optimizer


@dataclass(frozen=True)
class WeightAverage:
    """The rule by which a model follows another: w <- momentum * w + (1 - momentum) * followed.

    Args:
        of: name of the model that is followed.
        momentum: share of the old weights that stays at each step, 0 to 1; or a function of the
            number of steps made before, a float32 scalar, that gives it.

    Raises:
        InputError: for a number out of range.
    """

    of: str
    momentum: float | Callable[[Any], Any] = 0.996

    def __post_init__(self) -> None:
        check_fields(self)
        momentum = self.momentum
        if not callable(momentum) and not (isinstance(momentum, Real) and 0 <= momentum <= 1):
            raise InputError(f"momentum is {momentum!r}; give 0 to 1, or a function of the step")

    def at(self, step: Tensor) -> Any:
        """Returns the momentum after `step` steps, a float32 scalar."""
        momentum = self.momentum(step) if callable(self.momentum) else self.momentum
        return keras.ops.cast(momentum, "float32")


class Averages(Checked):
    """All models of a step that follow others.

    Args:
        models: the models of the step, by name.
        averages: the rules, by name of the model that follows.
        trained: names of models that an objective trains.

    Raises:
        InputError: for names that are not of models, and a model that is trained too.
    """

    def __init__(
        self, models: Any, averages: Mapping[str, WeightAverage] | None, trained: set[str]
    ):
        self.rules = dict(averages or {})
        self.models = models
        self.pairs: list[tuple[WeightAverage, Any, Any]] = []
        for name, rule in self.rules.items():
            if not isinstance(rule, WeightAverage) or rule.of == name:
                raise InputError(
                    f"averages has {rule!r} for {name!r}; give a WeightAverage of another model"
                )
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
            InputError: if the two models' weights differ in shape.
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
        """The weights of the models that follow others."""
        return [weight for _, weight, _ in self.pairs]

    def move(self, iterations: Any) -> None:
        """Moves all models that follow others; `iterations` includes the last step."""
        if not self.pairs:
            return
        ops = keras.ops
        step = ops.cast(ops.convert_to_tensor(iterations), "float32") - 1.0
        momenta = {id(rule): rule.at(step) for rule, _, _ in self.pairs}
        for rule, weight, followed in self.pairs:
            old, new = (ops.cast(ops.convert_to_tensor(w), "float32") for w in (weight, followed))
            moved = new + (old - new) * momenta[id(rule)]
            weight.assign(ops.cast(moved, weight.dtype))


# The name of the only objective.
ONLY = ""
LossFunction = Callable[[Any, Any, bool], Any]
Train = Sequence[str] | Mapping[str, Sequence[str]] | None


class Objective:
    """One loss with the variables that it moves.

    Attributes:
        name: empty for the only one.
        layers: the models that it trains.
        optimizer: built by `Objectives.build`.
        variables: the variables that it moves, known before the first step.
    """

    def __init__(self, name: str, layers: Sequence[Any]):
        self.name = name
        self.layers = tuple(layers)
        self.optimizer: Any = None
        self.variables: list[Any] = []

    @property
    def who(self) -> str:
        """The name for messages."""
        return f"the loss function of {self.name}" if self.name else "the loss function"

    def trainable(self) -> list[Any]:
        """Returns the trainable variables of its models, each once."""
        return once(v for layer in self.layers for v in layer.trainable_variables)


class Objectives:
    """Holds all objectives of a step, in the order of their turns.

    Args:
        models: a model, or models, layers and seed generators by name.
        names: names of the objectives, or None if there is only one.
        train: names of the models that the only objective trains, or those of each objective. The
            only objective trains all by default, but for those that follow others, and one of
            several the model of its name.
        averages: models that follow others, by name.

    Attributes:
        models: as given, which loss functions get.
        layers: models and layers.
        seeds: seed generators.
        built_for: all variables when the objectives were built.

    Raises:
        InputError: for anything else among the models, and for unknown names.
    """

    def __init__(
        self,
        models: keras.Model | Mapping[str, keras.Model],
        names: Iterable[str] | None,
        train: Train = None,
        averages: Mapping[str, WeightAverage] | None = None,
    ):
        self.models = dict(models) if isinstance(models, Mapping) else models
        named = self.models if isinstance(models, Mapping) else {"model": models}
        seeded = keras.random.SeedGenerator
        for name, part in named.items():
            if not isinstance(part, keras.layers.Layer | seeded):
                raise InputError(
                    f"the step got {type(part).__name__} as {name!r}; give Keras models, layers "
                    "and seed generators"
                )
        self.seeds = [part for part in named.values() if isinstance(part, seeded)]
        layers = {k: part for k, part in named.items() if not isinstance(part, seeded)}
        self.layers = list(layers.values())
        self.built_for: list[Any] = []
        if averages and names is None and train is None:
            train = [name for name in layers if name not in averages]
        shares = _shares(layers, names, train)
        self.objectives = [
            Objective(objective, [_named(layers, name, objective) for name in trained])
            for objective, trained in shares.items()
        ]
        known = {name for trained in shares.values() for name in trained}
        self.averages = Averages(self.models, averages, known)

    def __iter__(self) -> Any:
        return iter(self.objectives)

    def __len__(self) -> int:
        return len(self.objectives)

    @property
    def names(self) -> list[str]:
        """The names of the objectives."""
        return [objective.name for objective in self]

    @property
    def variables(self) -> list[Any]:
        """Everything that the step holds but slots and metrics, each variable once."""
        weights = once(v for layer in self.layers for v in layer.variables)
        return once([*weights, *(seed.state for seed in self.seeds)])

    @property
    def trained(self) -> list[Any]:
        """The variables that some objective trains, each once."""
        return once(v for objective in self for v in objective.variables or objective.trainable())

    @property
    def built(self) -> bool:
        """True if all models have their variables."""
        return all(part.built for layer in self.layers for part in keras_internals.sublayers(layer))

    def set_optimizers(
        self, optimizer: OptimizerLike | Mapping[str, OptimizerLike], auto_scale_loss: bool = True
    ) -> None:
        """Gives each objective its optimizer.

        Args:
            optimizer: one for the only objective, or one by name.
            auto_scale_loss: scales losses if a model has the policy "mixed_float16".

        Raises:
            InputError: if their number differs from that of objectives, or one is given twice.
        """
        several = isinstance(optimizer, dict)
        if several and sorted(optimizer) != sorted(self.names):
            raise InputError(
                f"there are optimizers for {', '.join(optimizer) or 'no objective'}; give one for "
                f"each of {', '.join(self.names)}"
            )
        if not several and len(self) > 1 and not isinstance(optimizer, str):
            raise InputError(
                f"several objectives cannot share an optimizer; give one for each of "
                f"{', '.join(self.names)}, by name"
            )
        configured: Any = optimizer
        optimizers = [
            keras.optimizers.get(as_optimizer(configured[n] if several else configured))
            for n in self.names
        ]
        if len(set(map(id, optimizers))) < len(optimizers):
            raise InputError("two objectives have the same optimizer; give each one of its own")
        for objective, own in zip(self, optimizers, strict=True):
            if own is None:  # which Keras returns as it is
                raise InputError("optimizer is None; give an optimizer, or its name")
            half = any(layer.dtype_policy.name == "mixed_float16" for layer in objective.layers)
            scaled = keras.optimizers.LossScaleOptimizer
            if half and auto_scale_loss and not isinstance(own, scaled):
                own = scaled(own, name="loss_scale_optimizer")
            average_by_update(own)
            objective.optimizer, objective.variables = own, []

    def build(self) -> None:
        """Chooses the variables of each objective, and builds the optimizers.

        Raises:
            InputError: if an objective has nothing to train, or a model has no variables yet.
        """
        if not self.built:
            raise InputError(
                f"{', '.join(layer.name for layer in self.layers)}: not all of them have their "
                "variables yet; call them on a batch first"
            )
        for objective in self:
            if objective.variables:
                continue
            objective.variables = objective.trainable()
            if not objective.variables:
                raise InputError(
                    f"{objective.who} has nothing to train: all variables of "
                    f"{', '.join(layer.name for layer in objective.layers) or 'no model'} "
                    "are frozen"
                )
            follow_variables(objective.optimizer, objective.variables)
        self.averages.build()
        self.built_for = self.variables

    def move_averages(self) -> None:
        """Moves the models that follow others, once those have made their step."""
        self.averages.move(self.objectives[0].optimizer.iterations)

    def check(self) -> None:
        """Raises `InputError` if the models' variables changed since `build`."""
        if list(map(id, self.variables)) != list(map(id, self.built_for)):
            raise InputError(
                "the models have other variables than the state, as after enable_lora or quantize; "
                "call write_back before, and train_state again after such a change"
            )

    def follow(self) -> None:
        """Makes built objectives train the variables that are trainable now."""
        for objective in self:
            if objective.variables:
                objective.variables = []
        self.build()

    def loss(
        self, objective: Objective, function: LossFunction, batch: Tree, training: bool
    ) -> tuple[Any, dict[str, Any]]:
        """Returns an objective's loss, with the regularisers of its models, and its logs.

        Raises:
            InputError: for a loss that is not a floating point scalar, or logs without names.
        """
        for layer in objective.layers:
            keras_internals.forget_losses(layer)
        loss, logs = self.call(objective, function, batch, training)
        more = [keras.ops.sum(part) for layer in objective.layers for part in layer.losses]
        for part in more:
            loss = loss + keras.ops.cast(part, loss.dtype)
        return loss, logs

    def call(
        self, objective: Objective, function: LossFunction, batch: Tree, training: bool
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the checked loss and logs of the user's function; see `loss`."""
        returned = function(self.models, batch, training)
        loss, logs = (
            returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        )
        if loss is None or isinstance(loss, dict | list | tuple | str):
            what = "nothing" if loss is None else f"a {type(loss).__name__}"
            raise InputError(f"{objective.who} returned {what}; return a scalar, or (scalar, logs)")
        if not isinstance(logs, dict) or not all(isinstance(name, str) for name in logs):
            raise InputError(
                f"{objective.who} returned logs that are not a dictionary of names; return "
                '(scalar, {"name": value})'
            )
        loss = keras.ops.convert_to_tensor(loss)
        if len(loss.shape):
            raise InputError(
                f"{objective.who} returned shape {tuple(loss.shape)}; return a scalar, such as its "
                "keras.ops.mean"
            )
        if not keras.backend.is_float_dtype(kind := keras.backend.standardize_dtype(loss.dtype)):
            raise InputError(f"{objective.who} returned {kind}; return a floating point number")
        return loss, logs

    def unmoved(self, objective: Objective) -> InputError:
        """Returns the error of a loss that has no gradient."""
        return InputError(
            f"{objective.who} does not depend on any of the {len(objective.variables)} variables "
            "that it trains; compute it from their models, without stop_gradient or NumPy"
        )


class WatchedScope(keras.StatelessScope):
    """A scope that records the variables assigned in it."""

    def __init__(self, state_mapping: Sequence[Any], **kwargs: Any):
        super().__init__(state_mapping, **kwargs)
        self._changed: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Records an assignment; Keras calls it."""
        self._changed[id(update[0])] = update[0]
        super().add_update(update)

    def check(self, known: list[Any]) -> None:
        """Raises `InputError` for a variable that is none of these."""
        ids = {id(variable) for variable in known}
        other = [v for key, v in self._changed.items() if key not in ids]
        if other and other[0] is keras_internals.global_seed():
            raise unseeded()
        if other:
            raise InputError(
                f"the loss function changes {other[0].path}, which the step does not hold; put the "
                "model, layer or seed generator that has it among the models"
            )


def unseeded() -> InputError:
    """Returns the error of a random number that the step could not repeat."""
    return InputError(
        "the loss function draws random numbers without a seed; put a keras.random.SeedGenerator "
        "among the models and give it as seed"
    )


def once(variables: Iterable[Any]) -> list[Any]:
    """Returns each variable at its first place."""
    return list({id(variable): variable for variable in variables}.values())


def _shares(
    layers: dict[str, Any], names: Iterable[str] | None, train: Train
) -> dict[str, Sequence[str]]:
    """Returns the models of each objective."""
    if names is None:
        if isinstance(train, Mapping):
            raise InputError(
                "train is named by objective, but there is only one; give a list of models"
            )
        return {ONLY: tuple(layers) if train is None else _listed(train)}
    names = list(names)
    if not names:
        raise InputError("there is no objective; give at least one loss function")
    if train is None:
        return {name: (name,) for name in names}
    if not isinstance(train, Mapping) or sorted(train) != sorted(names):
        raise InputError(f"train must name the models of each of {', '.join(names)}, by objective")
    return {name: _listed(train[name]) for name in names}


def _listed(names: Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _named(layers: dict[str, Any], name: str, objective: str) -> Any:
    if name not in layers:
        raise InputError(
            f"{f'objective {objective}' if objective else 'the step'} is to train {name!r}; the "
            f"models are {', '.join(layers)}"
        )
    return layers[name]


class Optimizers(keras.optimizers.Optimizer):
    """Several optimizers, each with its own variables; a step asks each of them by itself.

    Args:
        by_player: in the order of the turns.
        build: makes the slots of all.
    """

    def __init__(self, by_player: Mapping[str, Any], build: Callable[[], None]):
        super().__init__(learning_rate=0.0, name="optimizers")
        self.by_player = dict(by_player)
        self._build = build

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Makes the slots; each optimizer has its variables already."""
        self._build()
        self.built = True

    @property
    def variables(self) -> list[Any]:
        """Those of all."""
        return [v for optimizer in self.by_player.values() for v in optimizer.variables]

    @property
    def iterations(self) -> Any:
        """Updates of the first objective."""
        return next(iter(self.by_player.values())).iterations

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the first objective."""
        return next(iter(self.by_player.values())).learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        raise InputError(
            f"{', '.join(self.by_player)} have optimizers of their own; set "
            "step.optimizer.by_player[name].learning_rate, or give each a schedule"
        )

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        """Writes moving averages into the models if an optimizer does so at the end of `fit`."""
        for optimizer in self.by_player.values():
            optimizer.finalize_variable_values(keras_internals.built_for(optimizer))

    def get_config(self) -> dict[str, Any]:
        """Returns the optimizers' own."""
        return {
            name: keras.optimizers.serialize(optimizer)
            for name, optimizer in self.by_player.items()
        }


Results = dict[str, tuple[Any, dict[str, Any]]]


class Running:
    """The metrics of a step, created at its first batch.

    Args:
        objectives: their names; with several, it keeps the average of each loss.
        metrics: metrics, or metrics by name.

    Attributes:
        built: True if the averages exist.

    Raises:
        InputError: for objects that are not metrics.
    """

    def __init__(self, objectives: Iterable[str], metrics: MetricsLike = None):
        self.by_name = _by_name(metrics)
        self.losses = {name: f"{name}_loss" for name in objectives if name != ONLY}
        self.means: dict[str, Any] = {}
        self.built = False

    @property
    def metrics(self) -> list[Any]:
        """All of them."""
        return [*self.means.values(), *self.by_name.values()]

    def update(self, results: Results, rows: Tensor | int) -> list[Any]:
        """Updates the metrics by the losses and logs of the objectives.

        Args:
            results: loss and logs by objective.
            rows: examples of the batch, which is how much an average counts it.

        Returns:
            The metrics that were updated.

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
        """Raises `InputError` if a metric given to `compile` was not updated."""
        for name, metric in self.by_name.items():
            if not any(metric is other for other in fed):
                raise InputError(
                    f"compile got the metric {name!r}, which no loss function logs; return what "
                    f'it takes, as in (loss, {{"{name}": (y, logits)}})'
                )

    def _feed(self, name: str, value: Tensor, rows: Tensor | int) -> Any:
        if name in self.by_name:
            self.by_name[name].update_state(*(value if isinstance(value, tuple) else (value,)))
            return self.by_name[name]
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


def _by_name(metrics: MetricsLike) -> dict[str, Any]:
    if isinstance(metrics, Mapping):
        named = dict(metrics)
    else:
        parts = (
            [] if metrics is None else metrics if isinstance(metrics, list | tuple) else [metrics]
        )
        named = {getattr(part, "name", str(part)): part for part in parts}
    for name, part in named.items():
        if not isinstance(part, keras.metrics.Metric):
            raise InputError(
                f"compile got {part!r} as the metric {name!r}; give a keras.metrics object, which "
                "the log of that name is given to"
            )
    return named
