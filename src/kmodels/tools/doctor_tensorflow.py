"""The part of TensorFlow in `kmodels.tools.doctor`."""

from typing import Any

import tensorflow as tf

from kmodels import ops
from kmodels.core.dispatch import Op
from kmodels.ops.attention import block_slices
from kmodels.overrides import attention_tensorflow


def devices() -> list[str]:
    """Returns logical devices."""
    return [device.name for device in tf.config.list_logical_devices()]


def way(op: Op[Any, Any], *arguments: Any, **keywords: Any) -> str | None:
    """Returns the body that an override uses here; None if it has only one."""
    if op is ops.attention:
        bind: Any = ops.attention.bind
        if attention_tensorflow.by_blocks(bind(*arguments, **keywords)):
            return "the op's own body in float32, since this CPU rounds no products of bfloat16"
        lengths, causal = (
            (arguments[0].shape[1], arguments[1].shape[1]),
            keywords.get("causal", False),
        )
        count = len(block_slices(*lengths, causal, None, attention_tensorflow.SIZE))
        return "matrix products" if count == 1 else f"products by {count} blocks"
    return None


def platforms(
    op: Op[Any, Any], *arguments: object, **keywords: object
) -> dict[str, tuple[str, str | None]]:
    """Returns {}: the choices on other platforms are not known."""
    return {}
