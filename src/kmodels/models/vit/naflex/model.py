"""The ViT on rows of patches, readable from patches to tokens.

Differences from `ViTBackbone`, whose variable names it shares:
- images are given as patches, of any aspect ratio, and several images may share a row;
- the position embedding is resized to the grid of each image;
- patches attend to patches of their own image only.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.types import DTypeLike, Tree
from kmodels.layers import Dropout, LayerNorm
from kmodels.layers.placement import of_family
from kmodels.models.blocks.encoder_block import EncoderInfo
from kmodels.models.blocks.encoder_config import GELUS, check_gelu, config_field
from kmodels.models.blocks.hub_order import in_order
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.model import LAYOUT, make_blocks
from kmodels.models.vit.naflex.layers import (
    ImageSegments,
    NaFlexPatchEmbedding,
    NaFlexPooling,
    NaFlexTokens,
)
from kmodels.models.vit.weights import module_names
from kmodels.task import Backbone

VALUES, SHAPES, MASK = "pixel_values", "spatial_shapes", "pixel_attention_mask"
NAMES = (VALUES, SHAPES, MASK)


class PatchInputs:
    """Lets a functional model be called without a mask, and with one image in each row.

    Attributes:
        optional_inputs: see `kmodels.layers.direct_calls.CalledDirectly`.
        by_image: True if the outputs have an axis for the images of a row, which is removed if the
            inputs have none.
    """

    optional_inputs = True
    by_image: ClassVar[bool] = False

    def __call__(self, inputs: Tree, *args: object, **kwargs: Any) -> Any:
        """Calls the model with the axis for images, and None for a mask that is not given."""
        inputs, alone = rows(self, inputs)
        outputs = super().__call__(inputs, *args, **kwargs)  # type: ignore[misc]
        return keras.ops.squeeze(outputs, 1) if alone and self.by_image else outputs

    def call(self, inputs: Tree, training: bool | None = None, mask: Tree = None) -> Any:
        """Runs the graph on complete inputs, also if Keras calls it from `fit` or `predict`."""
        inputs, alone = rows(self, inputs)
        outputs = super().call(inputs, training=training, mask=mask)  # type: ignore[misc]
        return keras.ops.squeeze(outputs, 1) if alone and self.by_image else outputs

    def intermediates(self, inputs: Tree) -> dict[str, Any]:
        """Returns every named intermediate of one forward pass, in the order of computation."""
        return super().intermediates(rows(self, inputs)[0])  # type: ignore[misc]


def graph_inputs(width: int, images: int | None, dtype: str) -> dict[str, keras.KerasTensor]:
    """Returns the symbolic inputs of a graph.

    Args:
        width: numbers of a patch.
        images: axes of the grids in front of their two numbers: None for any number of images in a
            row, 0 for one image without an axis.
        dtype: of the patches.
    """
    grids = (2,) if images == 0 else (images, 2)
    return {
        VALUES: keras.Input((None, width), name=VALUES, dtype=dtype),
        SHAPES: keras.Input(grids, name=SHAPES, dtype="int32"),
        MASK: keras.Input((None,), name=MASK, dtype="int32", optional=True),
    }


def rows(model: object, inputs: Tree) -> tuple[dict[str, Any], bool]:
    """Returns the inputs of the graph, and whether each row had one image without an axis for it.

    Raises:
        InputError: for something else than patches and their grids.
    """
    if not isinstance(inputs, dict) or inputs.get(VALUES) is None or inputs.get(SHAPES) is None:
        shown = ", ".join(sorted(inputs)) if isinstance(inputs, dict) else type(inputs).__name__
        raise InputError(
            f"{type(model).__name__} got {shown or 'nothing'}; give a dictionary with {VALUES} "
            f"(B, N, patch * patch * channels) and {SHAPES} (B, 2) or (B, S, 2), as its "
            "preprocessor makes it"
        )
    if unknown := sorted(set(inputs) - set(NAMES)):
        raise InputError(
            f"{type(model).__name__} got {', '.join(unknown)}; it takes {', '.join(NAMES)}"
        )
    values, shapes = inputs[VALUES], inputs[SHAPES]
    if getattr(shapes.shape, "rank", 2) is None:  # TensorFlow has traced the step for both
        raise InputError(
            f"one compiled step got {SHAPES} with and without an axis for the images of a row; "
            "give (B, S, 2) to all of its calls, with S = 1 for one image in each row"
        )
    if len(shapes.shape) not in (2, 3) or shapes.shape[-1] != 2:
        raise InputError(
            f"{SHAPES} has shape {tuple(shapes.shape)}; give (B, 2), rows and columns of the "
            "patches of each image, or (B, S, 2) for S images in each row"
        )
    alone = len(shapes.shape) == 2
    if isinstance(values, np.ndarray):
        values = keras.ops.convert_to_tensor(values)
    shapes, mask = (
        x
        if x is None or isinstance(x, keras.KerasTensor)
        else keras.ops.convert_to_tensor(x, "int32")
        for x in (shapes, inputs.get(MASK))
    )
    shapes = keras.ops.expand_dims(shapes, 1) if alone else shapes
    return {VALUES: values, SHAPES: shapes, MASK: mask}, alone


@keras.saving.register_keras_serializable(package="kmodels")
class NaFlexViTBackbone(PatchInputs, Backbone):
    """A Vision Transformer without a head, for images of any aspect ratio.

    It reads the files of every `ViTBackbone` without tokens in front of the patches and without a
    rotary embedding.

    Args:
        image_shape: (height, width, channels) of the images that the table of positions is of.
        dtype: policy, such as "mixed_bfloat16"; Keras' global one by default.
        name: name of the model.
        **sizes: the other fields of `ViTConfig`; there is no class token by default.

    Call:
        {"pixel_values": (B, N, patch * patch * C) preprocessed floats, patches row by row,
        "spatial_shapes": (B, S, 2) int, rows and columns of the patches of each image in a row, 0
        for none, or (B, 2) of one image in each row, "pixel_attention_mask": (B, N) int, 0 for
        masked patches, optional} -> tokens (B, N, D). The images of a row are adjacent; the rest of
        the row is padding, whose tokens have no meaning.

    Raises:
        InputError: for a config with tokens in front of the patches, without a table of positions,
            or with a rotary embedding.

    Source:
        Dehghani et al. 2023, arXiv:2307.06304; Tschannen et al. 2025, arXiv:2502.14786.
    """

    config_class = ViTConfig
    family = "vit"
    layout = LAYOUT
    peft_names = staticmethod(module_names.names)
    token_embedding = None
    pools: ClassVar[bool] = False

    @of_family
    def __init__(
        self,
        image_shape: tuple[int, int, int] = (256, 256, 3),
        dtype: DTypeLike = None,
        name: str | None = None,
        **sizes: Any,
    ):
        fields = {"use_class_token": False, **sizes}
        config = self.make_config(image_shape=image_shape, **fields)
        check_free(config)
        policy = keras.dtype_policies.get(dtype or keras.config.dtype_policy())

        # === Layers ===
        patch_embedding = NaFlexPatchEmbedding(
            config.hidden_dim, config.use_patch_bias, name="patch_embedding", dtype=policy
        )
        tokens = NaFlexTokens(config, name="tokens", dtype=policy)
        dropout = Dropout(config.dropout_rate, name="token_dropout", dtype=policy)
        blocks = make_blocks(config, policy)

        def norm(name: str) -> LayerNorm:
            return LayerNorm(config.layer_norm_epsilon, name=name, dtype=policy)

        # === Graph ===
        floats = "float64" if policy.compute_dtype == "float64" else "float32"
        width = config.patch_size**2 * config.image_shape[2]
        inputs = graph_inputs(width, None, floats)
        shapes = inputs[SHAPES]
        segment_ids = ImageSegments(name="segments")(inputs[VALUES], shapes, inputs[MASK])
        x = patch_embedding(inputs[VALUES])
        out = {"patch_embedding": x}
        x = out["tokens"] = tokens(x, shapes)
        x = dropout(x)
        if config.pre_norm:
            x = out["pre_norm"] = norm("pre_norm")(x)
        info = EncoderInfo(segment_ids=segment_ids)
        for block in blocks:
            x = out[block.name] = block(x, info=info)
        if config.final_norm:
            x = out["final_norm"] = norm("final_norm")(x)
        if self.pools:
            pool = NaFlexPooling("map", config, name="pooling", dtype=policy)
            x = out["pooling"] = pool(x, segment_ids, shapes)
        super().__init__(config=config, intermediates=out, inputs=inputs, outputs=x, name=name)

        # === Config ===
        self.blocks = blocks
        self.dtype_policy = policy

    @classmethod
    def fits_preset(cls, name: str, fields: Mapping[str, Any]) -> bool:
        """Returns True if the preset has neither a class token nor a rotary embedding."""
        return not fields.get("use_class_token", True) and fields.get("rope_theta") is None


@keras.saving.register_keras_serializable(package="kmodels")
class SigLIPNaFlexVisionEncoder(NaFlexViTBackbone):
    """SigLIP 2's vision tower for images of any aspect ratio, with its attention pooling.

    Args:
        intermediate_dim: width of the MLP, the `mlp_dim` of `ViTConfig`.
        intermediate_activation: "gelu_approximate", "gelu" or "quick_gelu".
        **fields: of `NaFlexViTBackbone` and `ViTConfig`.

    Call:
        as of `NaFlexViTBackbone` -> (B, S, hidden_dim), or (B, hidden_dim) of one image in each
        row.

    Raises:
        InputError: for another activation.

    Source:
        Tschannen et al. 2025, arXiv:2502.14786; Transformers' `Siglip2VisionModel`.
    """

    own_parts = ("pooling/",)
    by_image = True
    pools = True

    @in_order(
        *("patch_size", "hidden_dim", "num_layers", "num_heads", "intermediate_dim"),
        *("intermediate_activation", "layer_norm_epsilon", "image_shape"),
    )
    def __init__(
        self,
        intermediate_dim: int = 3072,
        intermediate_activation: str = "gelu_approximate",
        **fields: Any,
    ):
        check_gelu(intermediate_activation)
        defaults: dict[str, Any] = {
            "mlp_dim": intermediate_dim,
            "approximate_gelu": GELUS[intermediate_activation],
            "position_interpolation": "bilinear_antialias",
        }
        super().__init__(**{**defaults, **fields})

    @classmethod
    def fits_preset(cls, name: str, fields: Mapping[str, Any]) -> bool:
        """Returns True for presets of SigLIP and SigLIP 2."""
        return name.startswith("siglip")


def check_free(config: ViTConfig) -> None:
    """Raises `InputError` for a ViT that needs images of one size."""
    wrong = {
        "tokens in front of the patches": config.num_prefix_tokens > 0,
        "a rotary embedding": config.rope_theta is not None,
        "no table of positions": not config.use_position_embedding,
        "a patch_drop_rate": config.patch_drop_rate > 0,
        "token_merging": config.token_merging > 0,
    }
    if problems := [text for text, there in wrong.items() if there]:
        raise InputError(
            f"the config has {', '.join(problems)}, which images of several grids in a row do not "
            "support; take ViTBackbone, or a checkpoint that pools its patches"
        )


for _name in ViTConfig.__dataclass_fields__:
    setattr(NaFlexViTBackbone, _name, config_field(_name))
