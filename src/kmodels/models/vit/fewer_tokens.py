"""Computing with fewer tokens: patch dropout in training, and token merging.

Token merging joins the most similar tokens in each block. Between attention and MLP the patches are
dealt alternately into two sets. Each patch of the first set is paired with the patch of the second
whose key is most similar, and the most similar pairs are merged into their mean, weighted by the
number of patches that each represents. Attention weighs a token by that number. Prefix tokens are
never merged. All shapes are static, so everything compiles.

Source: Bolya et al. 2023, arXiv:2210.09461, sections 3.1 to 3.3 and appendix D.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from kmodels import ops
from kmodels.core import seeds
from kmodels.core.types import Tensor
from kmodels.layers import Attention, Layer
from kmodels.layers.base import reshape, shape_of
from kmodels.models.blocks.encoder_block import EncoderInfo
from kmodels.models.vit.config import ViTConfig


def rows(x: Tensor, index: Tensor) -> Any:
    """Returns (B, n, D) of x (B, T, D) by int (B, n): one `take`, whose gradient is one scatter."""
    batch, length, width = shape_of(x)
    first = keras.ops.expand_dims(keras.ops.arange(batch, dtype=index.dtype) * length, 1)
    taken = keras.ops.take(reshape(x, (-1, width)), reshape(index + first, (-1,)), axis=0)
    return reshape(taken, (batch, index.shape[1], width))


@keras.saving.register_keras_serializable(package="kmodels")
class PatchDropout(Layer):
    """Drops random patches of each image in training; the order of the others is kept.

    Class token, distillation token and registers are never dropped. As in timm, each image keeps
    `max(1, int(P * (1 - patch_drop_rate)))` patches, drawn separately.

    Call:
        tokens (B, prefix + P, D) -> the same, or in training (B, prefix + kept, D); with the
        `coordinates` (T, 2) of a rotary embedding a pair of that and (B, prefix + kept, 2).

    Source:
        Liu et al. 2022, arXiv:2208.07220; Li et al. 2022, arXiv:2212.00794; timm's `PatchDropout`.
    """

    def __init__(self, config: ViTConfig | Mapping[str, Any], **kwargs: Any):
        super().__init__(**kwargs)
        self.config = ViTConfig.of(config)
        self.seed_generator = None
        if self.config.rope_theta is not None:
            self.keep_keywords()

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes the random stream."""
        self.seed_generator = self.add_seed(self.config.patch_drop_rate)

    def thin(self, tokens: Tensor, info: EncoderInfo, **mode: bool) -> tuple[Any, EncoderInfo]:
        """Calls the layer; returns the tokens that stay and their info."""
        if info.coordinates is None:
            return self(tokens, **mode), info
        tokens, coordinates = self(tokens, coordinates=info.coordinates, **mode)
        return tokens, info._replace(coordinates=coordinates)

    def call(
        self, tokens: Tensor, training: bool = False, coordinates: Tensor | None = None
    ) -> Any:
        """Returns the remaining tokens, and their coordinates if they were given."""
        if not training or self.seed_generator is None:
            return tokens if coordinates is None else (tokens, coordinates)
        ops, prefix = keras.ops, self.config.num_prefix_tokens
        batch, patches = ops.shape(tokens)[0], tokens.shape[1] - prefix
        number = max(1, int(patches * (1.0 - self.config.patch_drop_rate)))
        drawn = seeds.uniform((batch, patches), self.seed_generator)
        index = ops.sort(ops.argsort(drawn, axis=-1)[:, :number], axis=-1) + prefix
        stays = ops.broadcast_to(ops.arange(prefix, dtype=index.dtype), (batch, prefix))
        index = ops.concatenate([stays, index], axis=1)
        seen = rows(tokens, index)
        return seen if coordinates is None else (seen, ops.take(coordinates, index, axis=0))

    def compute_output_spec(
        self,
        tokens: keras.KerasTensor,
        training: bool = False,
        coordinates: keras.KerasTensor | None = None,
    ) -> Any:
        """Returns shapes and dtypes outside of training."""
        spec = keras.KerasTensor(tokens.shape, self.compute_dtype)
        if coordinates is None:
            return spec
        return spec, keras.KerasTensor(coordinates.shape, coordinates.dtype)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Returns the input's shape, which is that outside of training."""
        return input_shape


# Channels by which heads grow, as the fast kernels of accelerators want multiples of it.
GROWTH = 8


class Merging(NamedTuple):
    """Properties of tokens (B, T, D) of which some are merged, as `merging_block` takes them.

    Args:
        size: (B, T) int32, the number of patches that each token represents; None for one each.
        origin: (B, P) int32, the token behind the prefix that represents each patch; None if it is
            not needed.
        coordinates: positions (T, 2) or (B, T, 2), for a rotary embedding; None without one.
    """

    size: Tensor | None = None
    origin: Tensor | None = None
    coordinates: Tensor | None = None


def merge_through(
    blocks: Sequence[Layer], x: Tensor, info: EncoderInfo, keep: int | None, **mode: bool
) -> Any:
    """Returns the output of ViT blocks that merge tokens, with a token for each patch.

    With `keep` only so many of the first tokens are returned.
    """
    prefix = blocks[0].config.num_prefix_tokens
    alone, origin = keep is not None and keep <= prefix, None
    if not alone:
        batch, patches = keras.ops.shape(x)[0], x.shape[1] - prefix
        numbers = keras.ops.arange(patches, dtype="int32")
        origin = keras.ops.broadcast_to(numbers, (batch, patches))
    merging = Merging(None, origin, info.coordinates)
    for block in blocks:
        if alone and block is blocks[-1]:
            return block(x, info=merging, keep=keep, **mode)[0]
        x, *properties = block(x, info=merging, **mode)
        merging = Merging(*properties)
    assert merging.origin is not None
    patches = rows(x[:, prefix:], merging.origin)
    x = keras.ops.concatenate([x[:, :prefix], patches], axis=1) if prefix else patches
    return x if keep is None else x[:, :keep]


def merging_block(
    block: Any, x: Tensor, info: Merging, training: bool = False, keep: int | None = None
) -> tuple:
    """Returns fewer tokens, and their size, origin and coordinates as in `Merging`.

    With `keep` no tokens are merged: the last block computes prefix tokens alone.
    """
    y, keys = attend(block.attention, block.attention_norm(x), info, keep, training)
    x = x if keep is None else x[:, :keep]
    x = x + block.branch(y, block.attention_scale, training)
    config = block.config
    prefix = config.num_prefix_tokens
    number = min(config.token_merging, (x.shape[1] - prefix) // 2)  # at most half of the patches
    if number and keep is None:
        x, info = merge(x, info, keys, number, prefix)
    y = block.mlp(block.mlp_norm(x), training=training)
    return x + block.branch(y, block.mlp_scale, training), *info


def attend(
    attention: Attention,
    y: Tensor,
    info: Merging,
    keep: int | None = None,
    training: bool = False,
) -> tuple[Any, Any]:
    """Returns the attention of normed tokens that count by their size, and its keys.

    Args:
        attention: the layer.
        y: (B, T, D).
        info: of the tokens.
        keep: number of the first tokens that are computed; None for all.
        training: whether weights are dropped.

    Returns:
        (B, T or keep, D), and the keys (B, T, N, H).
    """
    queries, places = y, info.coordinates
    if keep is not None:
        queries = y[:, :keep]
        places = None if places is None else places[..., :keep, :]
    q, k, v = attention.heads(queries, y, places, info.coordinates)
    active = training and attention.seed_generator is not None
    drop: dict[str, Any] = {}
    if active:
        drop = {"dropout": attention.dropout, "seed": attention.seed_generator}
    if info.size is None:
        heads = ops.attention(q, k, v, **drop)
        return attention.output_dense(reshape(heads, shape_of(queries))), k
    width = q.shape[-1]
    # The logarithm of the size is added to the scores by one more channel of queries and keys:
    # a bias would have to be made for all pairs, and no fast kernel of `ops.attention` takes one.
    weight = keras.ops.log(keras.ops.cast(info.size, "float32")) * width**0.5
    weight = keras.ops.cast(keras.ops.expand_dims(weight, (2, 3)), k.dtype)
    weight = keras.ops.broadcast_to(weight, keras.ops.shape(k[..., :1]))
    grown = []
    for x, more in ((q, [keras.ops.ones_like(q[..., :1])]), (k, [weight]), (v, [])):
        zeros = keras.ops.zeros((*shape_of(x)[:3], GROWTH - len(more)), x.dtype)
        grown.append(keras.ops.concatenate([x, *more, zeros], axis=-1))
    heads = ops.attention(*grown, scale=width**-0.5, **drop)
    return attention.output_dense(reshape(heads[..., :width], shape_of(queries))), k


def merge(x: Tensor, info: Merging, keys: Tensor, number: int, prefix: int) -> tuple[Any, Merging]:
    """Merges the pairs of patches with the most similar keys.

    Args:
        x: tokens (B, T, D).
        info: of the tokens.
        keys: (B, T, N, H); their mean over the heads is compared.
        number: number of pairs.
        prefix: number of leading tokens, which are not merged.

    Returns:
        The tokens (B, T - number, D) and their properties; coordinates merge by the same weights.
    """
    o, wide = keras.ops, "float32"
    if keras.backend.standardize_dtype(x.dtype) == "float64":
        wide = "float64"
    batch, length, width = shape_of(x)
    # In the paper tokens are dealt out, and the class token is the first of the first set.
    first = prefix % 2

    def dealt(values: Tensor) -> tuple[Any, Any]:
        return values[:, first::2], values[:, 1 - first :: 2]

    # === The pairs: patches of the first set that leave, and their targets in the second ===
    metric = o.stop_gradient(o.mean(o.cast(keys, wide)[:, prefix:], axis=2))
    metric = metric / o.maximum(o.norm(metric, axis=-1, keepdims=True), 1e-12)
    scores = o.einsum("bid,bjd->bij", *dealt(metric))
    sources, targets = scores.shape[1:]
    nearest = o.cast(o.argmax(scores, axis=-1), "int32")  # (B, sources)
    order = o.cast(o.argsort(-o.max(scores, axis=-1), axis=-1), "int32")
    leaving, staying = order[:, :number], o.sort(order[:, number:], axis=-1)
    # Not `take_along_axis`, which fixes the size of the batch in a program of torch.export.
    target = rows(o.expand_dims(nearest, -1), leaving)[..., 0]

    # === Their means, weighted by size ===
    size = o.ones((batch, length), "int32") if info.size is None else info.size
    weights = o.cast(o.expand_dims(size[:, prefix:], -1), wide)
    parts = [o.cast(x, wide)]
    if info.coordinates is not None:
        parts.append(o.cast(o.broadcast_to(info.coordinates, (batch, length, 2)), wide))
    values = o.concatenate(parts, axis=-1)
    one, other = dealt(o.concatenate([values[:, prefix:] * weights, weights], axis=-1))
    arrives = o.one_hot(target, targets, dtype=wide)
    other = other + o.einsum("brj,brd->bjd", arrives, rows(one, leaving))
    merged = o.concatenate([rows(one, staying), other], axis=1)
    counted = o.cast(o.round(merged[..., -1]), "int32")
    merged = o.concatenate([values[:, :prefix], merged[..., :-1] / merged[..., -1:]], axis=1)

    # === The token of each patch from now on ===
    origin = info.origin
    if origin is not None:
        leaves = o.sum(o.one_hot(leaving, sources, dtype="int32"), axis=1)
        stays = o.cast(o.cumsum(1 - leaves, axis=1) - 1, "int32")
        begin = sources - number
        of_other = o.broadcast_to(o.arange(targets, dtype="int32") + begin, (batch, targets))
        places = o.concatenate([o.where(leaves > 0, nearest + begin, stays), of_other], axis=1)
        order = np.empty(sources + targets, "int32")
        order[first::2] = np.arange(sources)
        order[1 - first :: 2] = np.arange(targets) + sources
        index = o.broadcast_to(o.convert_to_tensor(order), (batch, sources + targets))
        # With an axis more, without which ONNX Runtime cannot tell the shapes.
        origin = rows(rows(o.expand_dims(places, -1), index), origin)[..., 0]
    return o.cast(merged[..., :width], x.dtype), info._replace(
        size=o.concatenate([size[:, :prefix], counted], axis=1),
        origin=origin,
        coordinates=(None if info.coordinates is None else o.stop_gradient(merged[..., width:])),
    )
