"""Optimizers of optax in `compile`, `TrainStep` and `train_state`, on JAX.

The state of the optimizer, a pytree of optax, lies in variables of Keras, so that checkpoints,
meshes and compiled steps treat it as the slots of any other optimizer.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import keras

from kmodels.checkpoint.state import named
from kmodels.core import keras_internals
from kmodels.core.dispatch import backend, backend_module
from kmodels.core.errors import InputError
from kmodels.core.types import GradientTransformation, Tensor

# Arrays by the path of their weight, or by the name of their slot.
Values = Mapping[str, Any]


class OptaxBackend(Protocol):
    """The functions over pytrees, on the backend that optax is written for."""

    def begin(
        self, transformation: GradientTransformation, params: Values
    ) -> tuple[dict[str, Any], Any]:
        """Returns the arrays of the first state by name, and the structure of the state.

        The name of an array for one weight is `<path of the weight>:<path within the state>`.
        """
        ...

    def step(
        self,
        transformation: GradientTransformation,
        structure: Any,
        gradients: Values,
        state: Values,
        params: Values,
    ) -> tuple[Values, Values]:
        """Returns the params and the state after a step."""
        ...


_native = backend_module("kmodels.training.optax", OptaxBackend, optional=True)


class OptaxOptimizer(keras_internals.OwnSteps, keras.optimizers.Optimizer):
    """An optimizer of optax as an optimizer of Keras.

    `compile` of every task, `TrainStep` and `train_state` make it of an optax object that they get;
    for another Keras model write

        model.compile(kmodels.training.OptaxOptimizer(optax.adamw(1e-3)), loss)

    The transformation gets the trained variables as one dictionary by path, such as
    "block_0/mlp/up/kernel", on which masks and labels of `optax.masked` and
    `optax.multi_transform` can be based. Decay, clipping and accumulation are the transformation's.

    `learning_rate` is the one of `optax.inject_hyperparams`, anywhere in the transformation.
    Otherwise optax does not show the rate, and callbacks that read or set it raise `InputError`.

    A file cannot hold the functions of optax, so a `.keras` file is saved without the arguments of
    `compile`; a Checkpoint saves the state, and resumes if the model is compiled with the same
    transformation.

    Args:
        transformation: an `optax.GradientTransformation` or `optax.MultiSteps`, or another object
            with `init` and `update`. One whose update needs the loss is not supported.
        name: first part of the variables' paths.
        **kwargs: of `keras.optimizers.Optimizer`, such as `use_ema` and `ema_momentum`.

    Attributes:
        by_slot: the variables of the transformation's state, by name.

    Raises:
        InputError: on another backend than JAX.
    """

    def __init__(self, transformation: GradientTransformation, name: str = "optax", **kwargs: Any):
        if _native is None:
            raise InputError(
                f"optax computes with JAX, and Keras' backend is {backend()}; set "
                "KERAS_BACKEND=jax, or give an optimizer of Keras or kmodels.training.AdamW"
            )
        # The base makes no variable of a function, and `learning_rate` below never calls it.
        super().__init__(learning_rate=_Hidden, name=name, **kwargs)
        self.transformation, self._pytrees = transformation, _native
        self.by_slot: dict[str, Any] = {}
        self._structure: Any = None

    def build(self, variables: list[Any]) -> None:
        """Makes a variable for each array of the state; one for a weight is sharded as that is."""
        if self.built:
            return
        super().build(variables)
        weights = named(variables)
        params = {path: weight.value for path, weight in weights.items()}
        state, self._structure = self._pytrees.begin(self.transformation, params)
        self.by_slot = {}
        for name in list(state):
            value = state.pop(name)  # So that the memory of two states is never taken.
            weight = weights.get(name.partition(":")[0])
            alike = weight is not None and tuple(weight.shape) == tuple(value.shape)
            self.by_slot[name] = self.add_variable(
                value.shape,
                dtype=keras.backend.standardize_dtype(value.dtype),
                layout=keras_internals.layout_of(weight) if alike else None,
                name=name.replace("/", "_"),
            )
            # A value may be a weight itself, or twice in the state, and steps donate their arrays.
            self.by_slot[name].assign(keras.ops.copy(value))

    def update_all(
        self, grads: list[Any], variables: Sequence[keras.Variable], learning_rate: Tensor
    ) -> None:
        """Makes one step of the transformation; a weight without a gradient stays."""
        weights = named(keras_internals.built_for(self))
        by_variable = {id(v): gradient for v, gradient in zip(variables, grads, strict=True)}
        params = {path: weight.value for path, weight in weights.items()}
        gradients = {
            path: by_variable[id(weight)]
            if id(weight) in by_variable
            else keras.ops.zeros_like(params[path])
            for path, weight in weights.items()
        }
        state = {name: variable.value for name, variable in self.by_slot.items()}
        params, state = self._pytrees.step(
            self.transformation, self._structure, gradients, state, params
        )
        for path, weight in weights.items():
            if id(weight) in by_variable:
                weight.assign(params[path])
        for name, variable in self.by_slot.items():
            variable.assign(state[name])

    @property
    def learning_rate(self) -> Any:
        """The learning rate of `optax.inject_hyperparams`; an object that shows none without it."""
        names = self._rates()
        return self.by_slot[names[0]] if len(names) == 1 else _Hidden(len(names))

    @learning_rate.setter
    def learning_rate(self, value: float | Tensor) -> None:
        names = self._rates()
        if len(names) != 1:
            _Hidden(len(names)).refuse()
        state = names[0].replace("hyperparams/", "hyperparams_states/")
        if any(name.startswith(f"{state}/") for name in self.by_slot):
            raise InputError(
                "the learning rate follows a schedule of optax; give inject_hyperparams a number "
                "to set it"
            )
        self.by_slot[names[0]].assign(value)

    def _rates(self) -> list[str]:
        return [n for n in self.by_slot if f"/{n}".endswith("/hyperparams/learning_rate")]

    def get_config(self) -> dict[str, Any]:
        """Refuses: a file cannot hold the functions of optax.

        Raises:
            InputError: always.
        """
        raise InputError(
            "an optimizer of optax is made of functions, which no file can hold; use save_weights "
            "or kmodels.callbacks.Checkpoint"
        )


class _Hidden:
    """Stands for a learning rate that cannot be read; using it as a number raises `InputError`.

    Args:
        count: learning rates that can be read.
    """

    def __init__(self, count: int):
        self.count = count

    def refuse(self) -> NoReturn:
        """Raises the error."""
        raise InputError(
            f"the optimizer of optax shows {self.count} learning rates; to read or set one, give "
            "optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)"
        )

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        self.refuse()

    def __float__(self) -> NoReturn:
        self.refuse()


def as_optimizer(optimizer: Any) -> Any:
    """Returns an object of optax as an optimizer of Keras, and anything else as it is."""
    is_optax = isinstance(optimizer, GradientTransformation)
    return OptaxOptimizer(optimizer) if is_optax else optimizer


def is_optax(optimizer: keras.Optimizer | None) -> bool:
    """Returns True for an optimizer of optax, also if a LossScaleOptimizer is around it."""
    return isinstance(getattr(optimizer, "inner_optimizer", optimizer), OptaxOptimizer)
