"""Attention on CUDA as far as a CPU can prove it; collects nothing but on torch.

The kernels that only CUDA has are replaced by a recorder and by a body for CPUs, which takes the
same block mask. Nothing here ran on a GPU. That nothing waits for one: `test_no_sync_torch.py`.
"""

from dataclasses import replace

import keras
import numpy as np
import pytest

from gradients import assert_near, second_derivative, to_numpy
from kmodels import ops
from numpy_attention import attention, check
from tolerances import tolerance

if keras.backend.backend() != "torch":
    pytest.skip("needs torch", allow_module_level=True)

import torch

from kmodels.overrides import _attention_cuda_torch as cuda
from kmodels.overrides import attention_torch
from kmodels.overrides._attention_cuda_torch import Facts, choose, repeats_keys
from pretended_cuda_torch import attention_kernels

RNG = np.random.default_rng(3)
LENGTH = 150
SEGMENTS = np.sort(RNG.integers(0, 4, (2, LENGTH)), axis=1).astype("int32")
BLOCKS = np.where(RNG.random((2, LENGTH)) > 0.7, -1, np.arange(LENGTH) // 30).astype("int32")
CALL = Facts(torch.bfloat16, (4096, 4096), (8, 4), 128, causal=True)
# What differs from CALL, the kernel, why it is no better one, and whether keys are repeated.
TABLE = {
    "causal": ({}, "sdpa", None, False),
    "all see all": ({"causal": False}, "sdpa", None, False),
    "float32": ({"dtype": torch.float32}, "sdpa", None, True),
    "float32, no groups": ({"dtype": torch.float32, "heads": (4, 4)}, "sdpa", None, False),
    "heads of 512": ({"width": 512}, "sdpa", None, True),
    "window": ({"window": 512}, "varlen", None, True),
    "window, float32": ({"window": 512, "dtype": torch.float32}, "flex", "float16 and", True),
    "window, heads of 260": ({"window": 512, "width": 260}, "flex", "not 260", True),
    "window to both sides": ({"window": 512, "causal": False}, "flex", "windows of causal", True),
    "segments": ({"hidden": frozenset({"segments"})}, "flex", "number of segments", True),
    "short segments": (
        {"hidden": frozenset({"segments"}), "lengths": (512, 512)},
        *("sdpa", "takes a dense mask", True),
    ),
    "soft cap": ({"soft_cap": True}, "flex", "no soft caps", False),
    "soft cap, compiled": ({"soft_cap": True, "compiled": True}, "generic", "compiler", False),
    "short soft cap": ({"soft_cap": True, "lengths": (8, 8)}, "flex", "no soft caps", False),
    "blocks": ({"hidden": frozenset({"blocks"})}, "flex", "no image blocks", True),
    "mask": ({"hidden": frozenset({"mask"})}, "sdpa", "only SDPA takes a dense mask", True),
    "mask, cap": (
        {"hidden": frozenset({"mask"}), "soft_cap": True},
        *("generic", "only SDPA takes a dense mask", True),
    ),
    "dropout": ({"drops": True}, "sdpa", None, False),
    "dropout, window": ({"drops": True, "window": 9}, "sdpa", "only SDPA takes dropout", True),
    "more keys": ({"lengths": (1024, 4096)}, "flex", "as many keys", True),
}


@pytest.mark.parametrize("label", TABLE)
def test_the_choice(label: str) -> None:
    changes, kernel, why, repeated = TABLE[label]
    facts = replace(CALL, **changes)
    choice = choose(facts)
    assert choice.kernel == kernel, choice
    assert choice.reason is None if why is None else why in (choice.reason or ""), choice
    assert repeats_keys(facts) == repeated


@pytest.fixture
def kernels(monkeypatch) -> list:
    """Stands for a GPU; what the kernels were given."""
    return attention_kernels(monkeypatch)


def arrays(length: int = LENGTH) -> list[np.ndarray]:
    sizes = ((length, 4), (LENGTH, 2), (LENGTH, 2))
    return [RNG.normal(size=(2, *size, 16)).astype("float32") for size in sizes]


CASES = {
    "window": ("varlen", "bfloat16", {"causal": True, "window": 40, "scale": 0.3}),
    "window, float32": ("flex", "float32", {"causal": True, "window": 40}),
    "window to both sides": ("flex", "float32", {"window": 40, "segment_ids": SEGMENTS[:1]}),
    "segments": ("flex", "float32", {"causal": True, "segment_ids": SEGMENTS}),
    "soft cap": ("flex", "float32", {"causal": True, "soft_cap": 0.7}),
    "soft cap alone": ("flex", "float32", {"soft_cap": 0.7}),
}


@pytest.mark.parametrize("label", CASES)
def test_values_and_gradients(kernels: list, label: str) -> None:
    kernel, dtype, keywords = CASES[label]
    check(ops.attention, arrays(), keywords, dtype)
    assert kernels[-1][:3] == (kernel, (2, LENGTH, 4, 16), (2, LENGTH, 2, 16))
    assert kernel == "flex" or kernels[-1][3:] == (40, 0.3)


def test_image_blocks_and_more_keys(kernels: list) -> None:
    keywords = {"causal": True, "window": 50, "block_ids": BLOCKS, "segment_ids": SEGMENTS[:1]}
    check(ops.attention, arrays(length=60), keywords)
    assert kernels[-1][0] == "flex"


def test_flex_attention_itself_takes_what_it_is_given(monkeypatch) -> None:
    """torch has its forward pass on CPUs."""
    monkeypatch.setattr(attention_torch, "on_cuda", lambda query: True)
    monkeypatch.setattr(cuda, "_compiled", lambda function: function)
    cuda._last.clear()
    given, keywords = arrays(), {"causal": True, "segment_ids": SEGMENTS, "soft_cap": 0.7}
    with torch.no_grad(), pytest.warns(UserWarning, match="flex_attention called without"):
        found = to_numpy(ops.attention(*given, **keywords))
    assert_near([found], [attention(*given, **keywords)], tolerance("attention"))


def test_layers_of_a_step_share_a_block_mask(kernels: list) -> None:
    given = [torch.from_numpy(x) for x in arrays()]
    ids = torch.from_numpy(SEGMENTS.copy())

    def mask(**more):
        ops.attention(*given, causal=True, segment_ids=ids, **more)
        return kernels[-1][3]

    first = mask()
    assert mask() is first
    assert mask(window=20) is not first and mask() is first
    ids[0, 0] = 9
    assert mask() is not first
    assert len(cuda._last) == 2


def test_second_derivatives_are_those_of_the_op(kernels: list) -> None:
    given = [x[:, :12, :, :4] for x in arrays()]
    keywords = {"causal": True, "soft_cap": 0.7}
    found = second_derivative(lambda *x: ops.attention(*x, **keywords), given)
    assert kernels
    wanted = second_derivative(lambda *x: ops.attention.generic(*x, **keywords), given)
    assert_near(found, wanted, 10 * tolerance("attention"))


def test_keys_are_repeated_where_only_flash_would_share_them(kernels: list, monkeypatch) -> None:
    seen = []
    kernel = attention_torch._kernel
    monkeypatch.setattr(
        attention_torch, "_kernel", lambda *x: seen.append(x[1].shape[2]) or kernel(*x)
    )
    for dtype, heads in (("float32", 4), ("bfloat16", 2)):
        given = [keras.ops.cast(x, dtype) for x in arrays()]
        found = ops.attention(*given, causal=True)
        assert seen.pop() == heads
        right = attention(*map(to_numpy, given), causal=True)
        assert_near([found], [right], tolerance("attention", dtype))
