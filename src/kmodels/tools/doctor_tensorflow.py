"""TensorFlow's part of `kmodels.tools.doctor`."""

from typing import Any

import tensorflow as tf

from kmodels import ops
from kmodels.core.dispatch import Op
from kmodels.overrides import attention_tensorflow
from kmodels.overrides.blocks import blocks


def devices() -> list[str]:
    """Returns logical devices."""
    return [device.name for device in tf.config.list_logical_devices()]


def way(op: Op[Any, Any], *given: Any, **more: Any) -> str | None:
    """Returns which of its bodies an override takes here; None if it has only one."""
    if op is ops.attention:
        bind: Any = ops.attention.bind
        if attention_tensorflow.by_blocks(bind(*given, **more)):
            return "the op's own body in float32, since this CPU rounds no products of bfloat16"
        lengths, causal = (given[0].shape[1], given[1].shape[1]), more.get("causal", False)
        count = len(blocks(*lengths, causal, None, attention_tensorflow.SIZE))
        return "matrix products" if count == 1 else f"products by {count} blocks"
    return None


def platforms(
    op: Op[Any, Any], *given: object, **more: object
) -> dict[str, tuple[str, str | None]]:
    """Returns nothing: what serves elsewhere is not told here."""
    return {}
