"""Arguments in the forms in which Keras takes them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import keras

# What Keras hands to a callback: the running results by name.
Logs: TypeAlias = Mapping[str, Any] | None

# An object, or its name or config, of which `keras.<kind>.get` makes the object.
InitializerLike: TypeAlias = str | Mapping[str, Any] | keras.initializers.Initializer | None
RegularizerLike: TypeAlias = str | Mapping[str, Any] | keras.regularizers.Regularizer | None
ConstraintLike: TypeAlias = str | Mapping[str, Any] | keras.constraints.Constraint | None
ActivationLike: TypeAlias = str | Mapping[str, Any] | Callable[..., Any] | None
DTypeLike: TypeAlias = str | Mapping[str, Any] | keras.DTypePolicy | None

# Arguments of `compile`; for several outputs lists or dictionaries of them.
OptimizerLike: TypeAlias = str | Mapping[str, Any] | keras.Optimizer | None
LearningRateLike: TypeAlias = (
    float | Mapping[str, Any] | keras.optimizers.schedules.LearningRateSchedule
)
LossLike: TypeAlias = (
    str | keras.Loss | Callable[..., Any] | Mapping[str, Any] | Sequence[Any] | None
)
MetricsLike: TypeAlias = Mapping[str, Any] | Sequence[Any] | None
