"""The part of TensorFlow in `kmodels doctor` and `kmodels parity --op`."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kmodels import ops
from kmodels.core.dispatch import Op


def devices() -> list[str]:
    """Returns logical devices."""
    return [device.name for device in tf.config.list_logical_devices()]


def way(op: Op[Any, Any], *arguments: Any, **keywords: Any) -> str | None:
    """Returns the body that an override uses here; None if it has only one."""
    if op is ops.attention:
        return "the op's own body in float32, since this CPU rounds no products of bfloat16"
    return None


def platforms(
    op: Op[Any, Any], *arguments: object, **keywords: object
) -> dict[str, tuple[str, str | None]]:
    """Returns {}: the choices on other platforms are not known."""
    return {}


def gradients(
    function: Callable[..., tuple[Any, Any]], tensors: Sequence[tf.Tensor]
) -> tuple[Any, Sequence[Any]]:
    """Returns (rest, gradients) of a function that returns (scalar, rest); see `doctor`."""
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        value, rest = function(*tensors)
    return rest, tape.gradient(value, tensors)
