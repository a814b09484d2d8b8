"""Attention for torch: `scaled_dot_product_attention`, which never holds all attention weights."""

import keras
import numpy as np
import torch
from keras import ops
from torch.nn import functional

from kmodels.dispatch import Tensor, override
from kmodels.ops.attention import allowed_pairs, attention, check_attention

# Number of keys from which the kernel was measured to be faster in half precision on CPU.
LONG = 1024


def supports(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    seed: keras.random.SeedGenerator | Tensor | None = None,
) -> str | None:
    """Everything but soft caps; on CPU only what `benchmarks/results` shows to be faster there."""
    if soft_cap is not None:
        return "scaled_dot_product_attention has no soft cap"
    if dropout and seed is not None and not isinstance(seed, keras.random.SeedGenerator):
        return "the seed is no SeedGenerator"
    if isinstance(query, torch.Tensor) and query.device.type == "cpu":
        if dropout and seed is not None:
            return "on CPU, matrix products are faster with dropout"
        if query.dtype != torch.float32 and key.shape[1] < LONG:
            return f"on CPU, matrix products are faster in half precision below {LONG} keys"
    return None


@override(attention, supports)
def attention_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    seed: keras.random.SeedGenerator | Tensor | None = None,
) -> Tensor:
    """Scales inside the kernel only; masks that leave a query nothing give zeros, as in the op."""
    check_attention(query, key, value, causal, window, soft_cap, dropout)
    query, key, value = (ops.convert_to_tensor(x) for x in (query, key, value))
    length, keys = query.shape[1], key.shape[1]
    # torch aligns its own causal mask to the first key, the op to the last.
    aligned = causal and mask is None and window is None and length == keys
    allowed = None if aligned else allowed_pairs(query, key, mask, causal, window)
    some = None
    if mask is not None and allowed is not None:
        # What a kernel does with a row of nothing differs; let such a row see all, then zero it.
        some = allowed.any(-1, keepdim=True)
        allowed = allowed | ~some
    rate = dropout if seed is not None else 0.0
    if rate and seed is not None and not torch.compiler.is_compiling():
        # The kernel draws from torch's global generator: key it by the SeedGenerator's state, so
        # that a resumed run repeats. Compiled code cannot, and draws from the global state.
        words = [word & 0xFFFFFFFF for word in seed.next().tolist()]
        # On CPU torch reads 32 bits of a seed, so both words have to reach each of them.
        mixed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
        with torch.random.fork_rng(devices=[query.device] if query.is_cuda else []):
            torch.manual_seed(mixed)
            output = _kernel(query, key, value, allowed, rate, aligned, scale)
    else:
        output = _kernel(query, key, value, allowed, rate, aligned, scale)
    if some is not None:
        output = torch.where(some, output, output.new_zeros(()))
    return output.transpose(1, 2)


def _kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    rate: float,
    aligned: bool,
    scale: float | None,
) -> Tensor:
    """(B, T, N, H) three times -> (B, N, T, H)."""
    return functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=allowed,
        dropout_p=rate,
        is_causal=aligned,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
