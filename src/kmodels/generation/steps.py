"""The passes of generation, as functions of tensors that each backend compiles."""

from collections.abc import Mapping
from typing import Any

import keras
from keras import ops

from kmodels.core.types import Tensor
from kmodels.generation.cache import DraftView, PromptView, StepView, Store, caches
from kmodels.generation.sampler import Sampler


def first_token(
    backbone: keras.Model,
    sampler: Sampler,
    store: Store,
    token_ids: Tensor,
    lengths: Tensor,
    slots: int,
    draws: Tensor,
    ahead: int = 0,
    images: Mapping[str, Tensor] | None = None,
) -> Any:
    """Runs the prompts through the model in one pass and chooses the token behind each.

    Args:
        backbone: with `extend`, `cache_shapes`, `cache_numbers` and `token_embedding.logits`.
        sampler: chooses.
        store: the cache to fill.
        token_ids: (B, P) int32, padded on the right.
        lengths: (B,) int32.
        slots: that prompt and continuation may take.
        draws: (B,) float32 in [0, 1).
        ahead: largest number of drafts that come in at once later.
        images: arrays of the images of each prompt, by the names of the model's inputs.

    Returns:
        (B,) int32.
    """
    view = PromptView(lengths, slots, ahead)
    seen = {} if images is None else {"images": images}
    hidden = backbone.extend(token_ids, None, caches(backbone, store, view), **seen)
    last = ops.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)[:, 0]
    history = None
    if sampler.looks_back:
        store.fill(2 * len(backbone.cache_shapes), view.keep(token_ids, slots))
        # Padding stands for the first token, which the row holds anyway.
        is_token = ops.arange(token_ids.shape[1], dtype="int32")[None] < lengths[:, None]
        history = ops.where(is_token, token_ids, token_ids[:, :1])
    return sampler.choose(backbone.token_embedding.logits(last), history, draws)


def next_token(
    backbone: keras.Model,
    sampler: Sampler,
    store: Store,
    tokens: Tensor,
    step: Any,
    lengths: Tensor,
    prompt: int,
    slots: int,
    draws: Tensor,
) -> Any:
    """Runs one new token per row through the model and chooses the one behind it.

    Args:
        backbone: as in `first_token`.
        sampler: chooses.
        store: the cache, which is extended.
        tokens: (B,) int32, generated last.
        step: their number, from 0; a scalar int32 tensor.
        lengths: (B,) int32, of the prompts.
        prompt: P, what the prompts were padded to.
        slots: that prompt and continuation may take.
        draws: (B,) float32 in [0, 1).

    Returns:
        (B,) int32.
    """
    view = StepView(lengths, prompt, slots, step)
    tokens = tokens[:, None]
    hidden = backbone.extend(tokens, view.positions, caches(backbone, store, view))
    history = None
    if sampler.looks_back:
        slot, filled = view.ring(slots)
        history = store.write(2 * len(backbone.cache_shapes), slot, tokens)
        history = ops.where(filled, history, tokens)
    return sampler.choose(backbone.token_embedding.logits(hidden[:, 0]), history, draws)


def next_tokens(
    backbone: keras.Model,
    sampler: Sampler,
    store: Store,
    tokens: Tensor,
    starts: Tensor,
    slots: int,
    draws: Tensor,
    ahead: int,
) -> Any:
    """Runs some new tokens per row through the model and chooses the one behind each.

    Args:
        backbone: as in `first_token`.
        sampler: chooses.
        store: the cache, which is extended, and may hold refused tokens from `starts` on.
        tokens: (B, T) int32, the last one of the row and drafts.
        starts: (B,) int32, position of the first of them.
        slots: that prompt and continuation may take.
        draws: (B, T) float32 in [0, 1).
        ahead: as in `first_token`.

    Returns:
        (B, T) int32.
    """
    batch, count = tokens.shape
    view = DraftView(starts, count, slots, ahead)
    hidden = backbone.extend(tokens, view.positions, caches(backbone, store, view))
    history = None
    if sampler.looks_back:
        places, seen, _ = view.ring(None)
        history = store.scatter(2 * len(backbone.cache_shapes), places, tokens)
        history = ops.where(seen, history[:, None], tokens[:, :, None])
        history = ops.reshape(history, (batch * count, slots))
    logits = backbone.token_embedding.logits(ops.reshape(hidden, (batch * count, -1)))
    chosen = sampler.choose(logits, history, ops.reshape(draws, (-1,)))
    return ops.reshape(chosen, (batch, count))
