"""The types of parameters that many files share; Keras itself names none of them.

Backend tensors have no static type in common, and Keras ships no types. So `Tensor` says what all
of them can do, and the others say in which forms Keras takes an argument.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import keras


class Tensor(Protocol):
    """A tensor of any backend, a NumPy array or a `keras.KerasTensor`: their common operations.

    Everything else goes through `keras.ops`. A file of one backend names that backend's own class.
    """

    @property
    def shape(self) -> Any:
        """The sizes; None or a symbol for unknown sizes."""
        ...

    @property
    def dtype(self) -> Any:
        """The backend's own object or name; `keras.backend.standardize_dtype` makes it a string."""
        ...

    def __getitem__(self, key: Any, /) -> Any: ...
    def __neg__(self) -> Any: ...
    def __add__(self, other: Any, /) -> Any: ...
    def __radd__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __rsub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __rmul__(self, other: Any, /) -> Any: ...
    def __truediv__(self, other: Any, /) -> Any: ...
    def __rtruediv__(self, other: Any, /) -> Any: ...
    def __matmul__(self, other: Any, /) -> Any: ...
    def __pow__(self, other: Any, /) -> Any: ...
    def __lt__(self, other: Any, /) -> Any: ...
    def __le__(self, other: Any, /) -> Any: ...
    def __gt__(self, other: Any, /) -> Any: ...
    def __ge__(self, other: Any, /) -> Any: ...


# A leaf, or lists, tuples and dictionaries of trees. Nothing but functions that walk trees may be
# done with one, which is what `object` allows.
Tree: TypeAlias = object

# What `fit` takes: arrays, data sets, loaders, or an iterable of batches. Which one is found out by
# looking at it.
Data: TypeAlias = object


# What Keras hands to a callback: the running results by name.
Logs: TypeAlias = Mapping[str, Any] | None

# An object, or its name or config, of which `keras.<kind>.get` makes the object.
InitializerLike: TypeAlias = str | Mapping[str, Any] | keras.initializers.Initializer | None
RegularizerLike: TypeAlias = str | Mapping[str, Any] | keras.regularizers.Regularizer | None
ConstraintLike: TypeAlias = str | Mapping[str, Any] | keras.constraints.Constraint | None
ActivationLike: TypeAlias = str | Mapping[str, Any] | Callable[..., Any] | None
DTypeLike: TypeAlias = str | Mapping[str, Any] | keras.DTypePolicy | None


@runtime_checkable
class GradientTransformation(Protocol):
    """An `optax.GradientTransformation`, an `optax.MultiSteps`, or any pair of such functions."""

    @property
    def init(self) -> Callable[..., Any]:
        """Function of the params, a pytree, that returns the first state, another one."""
        ...

    @property
    def update(self) -> Callable[..., Any]:
        """Function of (gradients, state, params) that returns changes of the params and a state."""
        ...


# Arguments of `compile`; for several outputs lists or dictionaries of them.
OptimizerLike: TypeAlias = str | Mapping[str, Any] | keras.Optimizer | GradientTransformation | None
LearningRateLike: TypeAlias = (
    float | Mapping[str, Any] | keras.optimizers.schedules.LearningRateSchedule
)
LossLike: TypeAlias = (
    str | keras.Loss | Callable[..., Any] | Mapping[str, Any] | Sequence[Any] | None
)
MetricsLike: TypeAlias = Mapping[str, Any] | Sequence[Any] | None
