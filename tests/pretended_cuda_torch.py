"""A CPU that code takes for CUDA, and a block in which nothing may wait for it.

The thin functions that ask where a tensor lies say CUDA, and kernels that only CUDA has are
replaced by a recorder and by a body for CPUs. Tensors lie on the CPU all the same, so a copy to the
device shows as what torch calls where it makes a tensor of numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as flexible
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kmodels.core import keras_internals, numbers_torch
from kmodels.overrides import _attention_cuda_torch as cuda
from kmodels.overrides import (
    _tensors_torch,
    attention_torch,
    dropout_torch,
    grouped_dense_torch,
    linear_cross_entropy_torch,
    norms_torch,
)

# What reads a number, or asks for a size that depends on numbers; `lift_fresh` begins a tensor that
# is made of numbers or of an array of the host.
KERNELS = frozenset(
    [
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "nonzero",
        "nonzero_numpy",
        "masked_select",
        "equal",
        "bincount",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "lift_fresh",
    ]
)
INDEXED = frozenset(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"))
# Methods that reach the numbers of a CPU's tensor without a kernel.
METHODS = frozenset(
    [
        "item",
        "tolist",
        "numpy",
        "cpu",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__array__",
        "__contains__",
        "__complex__",
    ]
)
_paused = [0]


class WaitsForDevice(AssertionError):
    """Something would wait for the device."""


def _refuse(name: str) -> None:
    if not _paused[0]:
        raise WaitsForDevice(f"{name} waits for the device")


class _Kernels(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name in KERNELS:
            _refuse(name)
        if name in INDEXED and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            _refuse(f"{name} by a mask")
        return function(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in METHODS:
            _refuse(name)
        return function(*args, **(kwargs or {}))


@contextmanager
def without_waiting() -> Iterator[None]:
    """Raises `WaitsForDevice` where the block would wait for a device that holds its tensors."""
    with _Methods(), _Kernels():
        yield


@contextmanager
def paused() -> Iterator[None]:
    """Lets the block do on the host what it likes."""
    _paused[0] += 1
    try:
        yield
    finally:
        _paused[0] -= 1


def pausing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose calls are `paused`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with paused():
            return function(*args, **kwargs)

    return call


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor | None,
    capped: Callable[..., torch.Tensor] | None,
    scale: float | None,
) -> torch.Tensor:
    """Attention with all weights, (B, T, N, H)."""
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
    scores = torch.einsum("btnh,bsnh->bnts", query.float(), key.float())
    scores = scores * (query.shape[3] ** -0.5 if scale is None else scale)
    scores = scores if capped is None else capped(scores)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return torch.einsum("bnts,bsnh->btnh", scores.softmax(-1).to(value.dtype), value)


def attention_kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Puts bodies for CPUs in the place of CUDA's kernels; returns what they were given."""
    given: list[Any] = []
    monkeypatch.setattr(_tensors_torch, "LACKING", frozenset())

    def varlen(query: Any, key: Any, value: Any, window: int, scale: Any) -> torch.Tensor:
        given.append(("varlen", tuple(query.shape), tuple(key.shape), window, scale))
        place = torch.arange(query.shape[1])
        behind = place[:, None] - place
        return dense(query, key, value, (behind >= 0) & (behind < window), None, scale)

    def flex(query: Any, key: Any, value: Any, mask: Any, cap: Any, scale: Any) -> torch.Tensor:
        given.append(("flex", tuple(query.shape), tuple(key.shape), mask, cap, scale))
        lengths = query.shape[1], key.shape[1]
        allowed = None
        if mask is not None:
            allowed = flexible.create_mask(mask.mask_mod, len(query), 1, *lengths, device="cpu")
        return dense(query, key, value, allowed, cuda._cap(cap), scale)

    monkeypatch.setattr(attention_torch, "on_cuda", lambda query: True)
    monkeypatch.setattr(cuda, "varlen", varlen)
    monkeypatch.setattr(cuda, "flex", flex)
    monkeypatch.setattr(cuda, "_compiled", lambda function: function)
    monkeypatch.setattr("kmodels.overrides._attention_cuda_torch.PAIRS", 0)
    cuda._last.clear()
    return given


def pretend(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Has all that asks for CUDA find it; returns what attention's kernels are given.

    A block mask's tables are made by compiled code of torch on the device, and what is sent there
    without a wait is made on the host first: both are `paused`.
    """
    given = attention_kernels(monkeypatch)
    monkeypatch.setattr(cuda, "block_mask", pausing(cuda.block_mask))
    monkeypatch.setattr(cuda, "flex", pausing(cuda.flex))
    monkeypatch.setattr(dropout_torch, "on_cuda", lambda device: True)
    monkeypatch.setattr(grouped_dense_torch, "on_cuda", lambda x: True)
    monkeypatch.setattr(grouped_dense_torch, "has_kernel", lambda device: True)
    monkeypatch.setattr(norms_torch, "by_rows", lambda x: False)
    monkeypatch.setattr(linear_cross_entropy_torch, "on_cuda", lambda hidden: True)
    monkeypatch.setattr(numbers_torch, "on_cuda", lambda: True)
    monkeypatch.setattr(numbers_torch, "on_host", pausing(lambda make, x, dtype: make(x, dtype)))
    monkeypatch.setattr(numbers_torch, "pinned", lambda host, device: host)
    monkeypatch.setattr(numbers_torch, "put", pausing(numbers_torch.put))
    numbers_torch.send_without_waiting()
    return given


def stop_pretending() -> None:
    """Gives Keras its own way to send numbers."""
    keras_internals.change_conversion(None)
