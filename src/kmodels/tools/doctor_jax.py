"""JAX's part of `kmodels.tools.doctor`."""

from typing import Any

import jax

from kmodels import ops
from kmodels.core.dispatch import Op
from kmodels.overrides import attention_jax, dense_jax
from kmodels.overrides.blocks import blocks


def devices() -> list[str]:
    """Returns local devices."""
    return [
        f"{device.platform}:{device.id} ({device.device_kind})" for device in jax.local_devices()
    ]


def way(op: Op[Any, Any], *given: Any, **more: Any) -> str | None:
    """Returns which of its bodies an override takes here; None if it has only one."""
    if op is ops.attention:
        lengths, causal = (given[0].shape[1], given[1].shape[1]), more.get("causal", False)
        if more.get("soft_cap") is not None or lengths[0] * lengths[1] > attention_jax.LONG**2:
            return f"loops over {-(-lengths[0] // attention_jax.LOOP_SIZE)} blocks"
        count = len(blocks(*lengths, causal, None, attention_jax.SIZE))
        return "matrix products" if count == 1 else f"products by {count} blocks"
    if op is ops.dense:
        return "product to float32" if dense_jax.narrow(given[0], given[1]) else "flat product"
    return None
