"""The part of JAX in `kmodels doctor` and `kmodels parity --op`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from kmodels import ops
from kmodels.core.dispatch import Op
from kmodels.overrides import attention_jax

# Devices for `platforms`; they need not exist.
DEVICES = {
    "cuda 9.0": attention_jax.Device("cuda", (9, 0), cudnn=True),
    "cuda 8.0": attention_jax.Device("cuda", (8, 0), cudnn=True),
    "tpu": attention_jax.Device("tpu"),
}


def devices() -> list[str]:
    """Returns local devices."""
    return [
        f"{device.platform}:{device.id} ({device.device_kind})" for device in jax.local_devices()
    ]


def way(op: Op[Any, Any], *arguments: Any, **keywords: Any) -> str | None:
    """Returns the body that an override uses here; None if it has only one."""
    if op is ops.attention:
        known = _facts(arguments, keywords)
        return _words(attention_jax.chosen(known), known)
    return "product to float32" if op is ops.dense else None


def platforms(
    op: Op[Any, Any], *arguments: object, **keywords: object
) -> dict[str, tuple[str, str | None]]:
    """Returns by platform the chosen body and the reason against a faster one; see `doctor`."""
    if op is not ops.attention:
        return {}
    here, rows = _facts(arguments, keywords), {}
    for name, device in DEVICES.items():
        known = replace(here, device=device)
        choice = attention_jax.choose(known)
        rows[name] = (_words(choice, known), choice.reason)
    return rows


def _facts(arguments: tuple[object, ...], keywords: dict[str, object]) -> attention_jax.Facts:
    bind: Any = ops.attention.bind
    return attention_jax.facts(bind(*arguments, **keywords))


def _words(choice: attention_jax.Choice, known: attention_jax.Facts) -> str:
    """Returns a body in words, with its number of blocks of queries on a CPU."""
    if choice.body == "loops" and known.device.platform == "cpu":
        return f"loops over {-(-(known.query[1] or 0) // attention_jax.LOOP_SIZE)} blocks"
    return choice.body


def gradients(
    function: Callable[..., tuple[Any, Any]], tensors: Sequence[jax.Array]
) -> tuple[Any, Sequence[Any]]:
    """Returns (rest, gradients) of a function that returns (scalar, rest); see `doctor`."""
    everything = tuple(range(len(tensors)))
    gradients_of_all, rest = jax.jit(jax.grad(function, everything, has_aux=True))(*tensors)
    return rest, gradients_of_all
