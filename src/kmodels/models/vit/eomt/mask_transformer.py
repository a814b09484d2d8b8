"""One pass of EoMT: the blocks of a ViT, of which the last carry queries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Tensor
from kmodels.layers import Dense
from kmodels.models.vit.eomt.layers import (
    SILU,
    MaskHead,
    MaskProbabilities,
    Queries,
    QueryMasking,
    Upscale,
    uniform,
)
from kmodels.models.vit.model import ViTBackbone


def check_backbone(backbone: ViTBackbone, num_blocks: int) -> None:
    """Raises `InputError` for a backbone that has no token for each patch, or too few blocks."""
    config = backbone.config
    check_whole("num_blocks", num_blocks)
    if num_blocks > config.num_layers:
        raise InputError(
            f"num_blocks is {num_blocks}, and the backbone has {config.num_layers} blocks; give as "
            "many or fewer"
        )
    if config.patch_drop_rate or config.token_merging:
        raise InputError(
            "the backbone leaves out patches or merges tokens, of which masks would have no "
            "pixels; leave patch_drop_rate and token_merging at 0"
        )
    if (
        not config.final_norm
        or len(backbone.output.shape) != 3
        or backbone.steps[-1].name != ("final_norm")
    ):
        raise InputError(
            f"{type(backbone).__name__} has no norm behind its last block, by which queries and "
            "patches are read; give a ViTBackbone with final_norm=True"
        )


@dataclass(frozen=True)
class Prediction:
    """The predictions of all queries behind a block.

    Args:
        masks: logits (B, Q, h, w), float32.
        classes: logits (B, Q, num_classes + 1), float32.
    """

    masks: Any
    classes: Any


class MaskTransformer:
    """The layers of an EoMT, and how images go through them.

    Args:
        backbone: the ViT.
        num_classes: number of classes.
        num_queries: number of queries.
        num_blocks: blocks that carry them, the last of the backbone.
        num_upscale_blocks: how often the sides of the grid of patches are doubled.
        annealing_steps: see `MaskProbabilities`.
        policy: policy of the layers that are not the backbone's.
    """

    def __init__(
        self,
        backbone: ViTBackbone,
        num_classes: int,
        num_queries: int,
        num_blocks: int,
        num_upscale_blocks: int,
        annealing_steps: int | None,
        policy: keras.DTypePolicy,
    ):
        config = backbone.config
        gated = config.use_swiglu_ffn and config.rope_theta is not None
        # transformers has one activation for the gates of a DINOv3 and the heads.
        gelu = SILU if gated else config.approximate_gelu
        self.backbone = backbone
        self.num_queries = num_queries
        self.dtype = policy.compute_dtype
        self.first = config.num_layers - num_blocks
        self.scale = 2**num_upscale_blocks
        self.queries = Queries(num_queries, name="queries", dtype=backbone.dtype_policy)
        self.probabilities = MaskProbabilities(
            num_blocks, annealing_steps, name="mask_probabilities", dtype="float32"
        )
        self.maskings = [
            QueryMasking(i, config.num_prefix_tokens, name=f"query_masking_{i}", dtype="float32")
            for i in range(num_blocks)
        ]
        self.upscales = [
            Upscale(gelu, name=f"upscale_{i}", dtype=policy) for i in range(num_upscale_blocks)
        ]
        self.mask_head = MaskHead(gelu, name="mask_head", dtype=policy)
        self.class_head = Dense(
            num_classes + 1, kernel_initializer=uniform(), name="class_logits", dtype=policy
        )

    def __call__(self, images: Tensor, masked: Sequence[bool], **told: bool) -> list[Prediction]:
        """Returns predictions in front of each masked block, and that behind the last one.

        Args:
            images: (B, height, width, C).
            masked: of each block with queries, whether they see only their masks in it.
            **told: `training`, or nothing.
        """
        backbone, x, found = self.backbone, images, []
        given: dict[str, Any] = dict(told)
        shares = self.probabilities(images, **told)
        if backbone.coordinates is not None:
            given["coordinates"] = backbone.coordinates(images, **told)
        norm = backbone.steps[-1]
        for step in backbone.steps:
            if step not in backbone.blocks:
                x = step(x, **told)
                continue
            number = backbone.blocks.index(step) - self.first
            if number == 0:
                x = self.queries(x)
                if "coordinates" in given:
                    given["coordinates"] = self._with_queries(given["coordinates"])
            if number >= 0 and masked[number]:
                prediction, grid = self._predict(norm(x, **told))
                found.append(prediction)
                seen = self.maskings[number](grid, shares, **told)
                x = step(x, attention_mask=seen, **given)
            else:
                x = step(x, **given)
        return [*found, self._predict(x)[0]]

    def _with_queries(self, coordinates: Tensor) -> Any:
        """Returns the places of all tokens: queries stand where nothing turns."""
        still = keras.ops.zeros((self.num_queries, 2), dtype=coordinates.dtype)
        return keras.ops.concatenate([still, coordinates], axis=0)

    def _predict(self, tokens: Tensor) -> tuple[Prediction, Any]:
        """Returns what normed tokens say, and the masks on the grid of the patches."""
        ops, config = keras.ops, self.backbone.config
        tokens = ops.cast(tokens, self.dtype)
        queries = tokens[:, : self.num_queries]
        patches = tokens[:, self.num_queries + config.num_prefix_tokens :]
        features = ops.reshape(patches, (-1, *config.grid, config.hidden_dim))
        for upscale in self.upscales:
            features = upscale(features)
        wide = "float64" if self.dtype == "float64" else "float32"
        masks = ops.einsum("bqd,bhwd->bqhw", self.mask_head(queries), features)
        masks = ops.cast(masks, wide)
        classes = ops.cast(self.class_head(queries), wide)
        return Prediction(masks, classes), self._on_grid(masks)

    def _on_grid(self, masks: Tensor) -> Any:
        """Returns masks in the size of the grid, bilinear without smoothing.

        Of an even number of pixels the two in the middle count.
        """
        if self.scale == 1:
            return masks
        ops, (rows, columns) = keras.ops, self.backbone.config.grid
        x = ops.reshape(masks, (-1, self.num_queries, rows, self.scale, columns, self.scale))
        low, high = self.scale // 2 - 1, self.scale // 2 + 1
        return ops.mean(x[:, :, :, low:high, :, low:high], axis=(3, 5))


def class_scores(prediction: Prediction, size: tuple[int, int]) -> Any:
    """Returns what each class has of each pixel, the sum over queries of both shares.

    Args:
        prediction: of a batch.
        size: (height, width) of the images.

    Returns:
        float32 (B, height, width, num_classes).

    Source:
        Cheng et al. 2021, section 3.4 (arXiv:2107.06278).
    """
    ops = keras.ops
    masks = ops.transpose(prediction.masks, (0, 2, 3, 1))
    if tuple(masks.shape[1:3]) != size:
        masks = ops.image.resize(masks, size, "bilinear", data_format="channels_last")
    shares = ops.softmax(prediction.classes, axis=-1)[..., :-1]
    return ops.einsum("bhwq,bqk->bhwk", ops.sigmoid(masks), shares)
