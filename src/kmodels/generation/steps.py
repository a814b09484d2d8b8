"""The two passes of generation, as functions of tensors that each backend compiles."""

from typing import Any

from keras import ops

from kmodels.generation.cache import LayerCache, PromptView, StepView, Store
from kmodels.generation.sampler import Sampler


def first_token(
    backbone: Any,
    sampler: Sampler,
    store: Store,
    token_ids: Any,
    lengths: Any,
    history: Any,
    draws: Any,
) -> Any:
    """Runs the prompts through the model in one pass and chooses the token behind each.

    Args:
        backbone: with `extend`, `blocks` and `token_embedding.logits`.
        sampler: chooses.
        store: the cache to fill.
        token_ids: (B, P) int32, padded on the right.
        lengths: (B,) int32.
        history: (B, slots) int32.
        draws: (B,) float32 in [0, 1).

    Returns:
        (B,) int32.
    """
    view = PromptView()
    caches = [LayerCache(store, layer, view) for layer in range(len(backbone.blocks))]
    hidden = backbone.extend(token_ids, None, caches)
    last = ops.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)[:, 0]
    filled = ops.arange(history.shape[1], dtype="int32")[None] < lengths[:, None]
    return _choose(backbone, sampler, last, history, filled, draws)


def next_token(
    backbone: Any,
    sampler: Sampler,
    store: Store,
    tokens: Any,
    step: Any,
    lengths: Any,
    history: Any,
    prompt: int,
    draws: Any,
) -> Any:
    """Runs one new token per row through the model and chooses the one behind it.

    Args:
        backbone: as in `first_token`.
        sampler: chooses.
        store: the cache, which is extended.
        tokens: (B,) int32, generated last.
        step: their number, from 0; a scalar int32 tensor.
        lengths: (B,) int32, of the prompts.
        history: (B, slots) int32, `tokens` in it already.
        prompt: slots of the prompts.
        draws: (B,) float32 in [0, 1).

    Returns:
        (B,) int32.
    """
    view = StepView(lengths, prompt, history.shape[1], step)
    caches = [LayerCache(store, layer, view) for layer in range(len(backbone.blocks))]
    hidden = backbone.extend(tokens[:, None], view.position, caches)
    return _choose(backbone, sampler, hidden[:, 0], history, view.filled, draws)


def _choose(
    backbone: Any, sampler: Sampler, hidden: Any, history: Any, filled: Any, draws: Any
) -> Any:
    logits = backbone.token_embedding.logits(hidden)
    # Empty slots stand for the first token, which every row holds anyway.
    return sampler.choose(logits, ops.where(filled, history, history[:, :1]), draws)
