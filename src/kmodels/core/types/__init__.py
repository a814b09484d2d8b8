"""The types of parameters that many files share; Keras itself names none of them.

Backend tensors have no static type in common, and Keras ships no types. So `Tensor` says what all
of them can do, and the others say in which forms Keras takes an argument.
"""

from kmodels.core.types.arguments import (
    ActivationLike,
    ConstraintLike,
    DTypeLike,
    InitializerLike,
    LearningRateLike,
    Logs,
    LossLike,
    MetricsLike,
    OptimizerLike,
    RegularizerLike,
)
from kmodels.core.types.tensors import Data, Tensor, Tree

__all__ = [
    "ActivationLike",
    "ConstraintLike",
    "DTypeLike",
    "Data",
    "InitializerLike",
    "LearningRateLike",
    "Logs",
    "LossLike",
    "MetricsLike",
    "OptimizerLike",
    "RegularizerLike",
    "Tensor",
    "Tree",
]
