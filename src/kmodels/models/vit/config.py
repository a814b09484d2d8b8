"""The configuration of a ViT, validated in one place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kmodels.core.errors import InputError, check_choice, check_whole
from kmodels.models.blocks.config import check_rates
from kmodels.models.blocks.encoder_config import EncoderBlockConfig, EncoderConfig, check_heads
from kmodels.weights.positions import Method

# Mean and deviation of pixels in [0, 1] that models are trained with; CLIP's are OpenAI's.
Statistics = tuple[tuple[float, ...], tuple[float, ...]]
HALF: Statistics = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
IMAGENET: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP: Statistics = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
# How each rotary embedding pairs the channels of a head, as in `ops.rotary_embedding_2d`.
ROPE_PAIRS = {"dinov3": "halves", "cat": "neighbors", "cat_ij": "neighbors"}


@dataclass(frozen=True)
class ViTConfig(EncoderConfig):
    """Sizes and variants of a Vision Transformer backbone.

    Args:
        image_shape: (height, width, channels) in pixels.
        patch_size: side of the square patches, in pixels, or (side, side); it divides height and
            width.
        num_layers: blocks.
        num_heads: attention heads; divides `hidden_dim`.
        hidden_dim: width of the tokens.
        mlp_dim: width between the two dense layers of each block; with SwiGLU that of the gate.
        dropout_rate: dropout after the position embedding, the attention and both dense layers.
        attention_dropout: dropout of the attention weights.
        drop_path_rate: stochastic depth of the last block; grows linearly from 0 at the first.
        drop_path_constant: the same rate in all blocks, as in DeiT III.
        patch_drop_rate: share of the patches that are dropped from each image in training.
        token_merging: number of tokens that each block merges with their most similar ones; 0 for
            none. The output still has one token per patch.
        layer_norm_epsilon: 1e-6 in JAX and timm checkpoints, 1e-12 in Hugging Face ones.
        use_patch_bias: bias of the patch embedding.
        use_mha_bias: biases of the attention projections.
        use_query_bias: bias of the query projection, if `use_mha_bias`.
        use_key_bias: bias of the key projection, if `use_mha_bias`; DINOv3 has none.
        use_value_bias: bias of the value projection, if `use_mha_bias`.
        use_proj_bias: bias of the output projection, if `use_mha_bias`.
        use_mlp_bias: biases of the MLP.
        use_class_token: prepends a learned token to the patches.
        use_distillation_token: a second one after it (DeiT, Touvron et al. 2021, section 4).
        num_register_tokens: learned tokens in front of the patches (Darcet et al. 2023).
        use_mask_token: keeps the token that replaces masked patches in DINOv2's pretraining, so
            that a checkpoint is exported unchanged; it is not used in computations.
        position_over_prefix: the position embedding also covers class and distillation token.
        position_interpolation: how the position embedding is resized for another image size:
            "bicubic" as Hugging Face, "bicubic_antialias" as timm, "bilinear" as timm does with
            google-research's files, "bilinear_antialias" as SigLIP 2 with native aspect ratio.
        layer_scale: initial value of the residual scales, or None for none.
        qk_norm: normalizes queries and keys per head.
        pre_norm: a norm before the first block, as in CLIP.
        final_norm: a norm after the last block; False if the classifier norms after pooling.
        approximate_gelu: True for the tanh form of GELU, "sigmoid" for CLIP's quick GELU.
        use_swiglu_ffn: SwiGLU instead of GELU in the blocks (Shazeer 2020), as in DINOv2's giant.
        use_position_embedding: a learned table of positions; DINOv3 has none.
        rope_theta: base of a 2D rotary position embedding of the patches; class token and registers
            are not rotated. None for none.
        rope_type: coordinates of a patch: "dinov3", its center from -1 to 1 along each side, times
            2 pi; "cat", its column and row index, as in Perception Encoder; "cat_ij", its row and
            column index.
        rope_grid_offset: offset of those indices.
        ref_feat_shape: (rows, columns) to which "cat" and "cat_ij" scale the indices, so that
            images of every size span the same angles; None for no scaling.
        pos_embed_shift: in training, shifts the coordinates by up to this much along each axis,
            with one draw per step; None for none. The next two are drawn in the same way.
        pos_embed_jitter: in training, each axis is scaled by a factor from 1 / this to this.
        pos_embed_rescale: in training, both axes are scaled by one such factor.
        pooling_num_heads: heads of the attention pooling; None for `num_heads`.
        pooling_mlp_dim: width of its MLP; None for `mlp_dim`.
        pool_include_prefix: the pooling attends to class token and registers too, as in Perception
            Encoder.

    Raises:
        InputError: for sizes that do not fit together.
    """

    image_shape: tuple[int, int, int] = (224, 224, 3)
    patch_size: int = 16
    num_layers: int = 12
    num_heads: int = 12
    hidden_dim: int = 768
    mlp_dim: int = 3072
    dropout_rate: float = 0.0
    attention_dropout: float = 0.0
    drop_path_rate: float = 0.0
    drop_path_constant: bool = False
    layer_norm_epsilon: float = 1e-6
    use_patch_bias: bool = True
    use_mha_bias: bool = True
    use_mlp_bias: bool = True
    use_class_token: bool = True
    use_distillation_token: bool = False
    num_register_tokens: int = 0
    use_mask_token: bool = False
    position_over_prefix: bool = True
    position_interpolation: Method = "bicubic_antialias"
    layer_scale: float | None = None
    qk_norm: bool = False
    pre_norm: bool = False
    final_norm: bool = True
    approximate_gelu: bool | str = False
    use_swiglu_ffn: bool = False
    use_query_bias: bool = True
    use_key_bias: bool = True
    use_value_bias: bool = True
    use_proj_bias: bool = True
    use_position_embedding: bool = True
    rope_theta: float | None = None
    rope_type: str = "dinov3"
    rope_grid_offset: float = 0.0
    ref_feat_shape: tuple[int, int] | None = None
    pos_embed_shift: float | None = None
    pos_embed_jitter: float | None = None
    pos_embed_rescale: float | None = None
    pooling_num_heads: int | None = None
    pooling_mlp_dim: int | None = None
    pool_include_prefix: bool = False
    patch_drop_rate: float = 0.0
    token_merging: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "patch_size", _side(self.patch_size))
        super().__post_init__()
        sizes = ("patch_size", "num_layers", "num_heads", "hidden_dim", "mlp_dim")
        for name in sizes:
            check_whole(name, getattr(self, name))
        object.__setattr__(self, "image_shape", tuple(int(n) for n in self.image_shape))
        if len(self.image_shape) != 3 or min(self.image_shape) < 1:
            raise InputError(
                f"image_shape is {self.image_shape}; give (height, width, channels), "
                "each at least 1"
            )
        for side in self.image_shape[:2]:
            if side % self.patch_size:
                raise InputError(
                    f"the patch of {self.patch_size} pixels does not divide the image side of "
                    f"{side}; the nearest sides that work are {_nearest(side, self.patch_size)}"
                )
        check_heads(self.num_heads, self.hidden_dim)
        if self.pooling_num_heads is not None:
            check_whole("pooling_num_heads", self.pooling_num_heads)
            check_heads(self.pooling_num_heads, self.hidden_dim)
        if self.pooling_mlp_dim is not None:
            check_whole("pooling_mlp_dim", self.pooling_mlp_dim)
        check_rates(self, "dropout_rate", "attention_dropout", "drop_path_rate", "patch_drop_rate")
        check_whole("token_merging", self.token_merging, 0)
        if self.num_register_tokens < 0:
            raise InputError(f"num_register_tokens is {self.num_register_tokens}; give 0 or more")
        if self.use_distillation_token and not self.use_class_token:
            raise InputError("use_distillation_token needs the class token in front of it")
        if self.approximate_gelu not in (False, True, "sigmoid"):
            raise InputError(
                f'approximate_gelu is {self.approximate_gelu!r}; give False, True or "sigmoid"'
            )
        if self.use_swiglu_ffn and self.approximate_gelu:
            raise InputError("use_swiglu_ffn leaves no GELU; leave approximate_gelu False")
        if self.ref_feat_shape is not None:
            object.__setattr__(self, "ref_feat_shape", tuple(self.ref_feat_shape))
        check_rotary(self)

    @property
    def grid(self) -> tuple[int, int]:
        """Patches per column and per row."""
        return (self.image_shape[0] // self.patch_size, self.image_shape[1] // self.patch_size)

    @property
    def num_special_tokens(self) -> int:
        """The class token and the distillation token."""
        return int(self.use_class_token) + int(self.use_distillation_token)

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens in front of the patches: class token, distillation token and registers."""
        return self.num_special_tokens + self.num_register_tokens

    @property
    def num_tokens(self) -> int:
        """The tokens of an image, with those in front of the patches."""
        return self.grid[0] * self.grid[1] + self.num_prefix_tokens

    @property
    def num_special_positions(self) -> int:
        """Rows of the position embedding that belong to no patch."""
        there = self.use_position_embedding and self.position_over_prefix
        return self.num_special_tokens if there else 0

    @property
    def unbiased(self) -> tuple[str, ...]:
        """The projections of the attention that have no bias."""
        biases = {
            "query": self.use_query_bias,
            "key": self.use_key_bias,
            "value": self.use_value_bias,
            "output": self.use_proj_bias,
        }
        return tuple(name for name, there in biases.items() if not there)

    @property
    def num_positions(self) -> int:
        """Rows of the position embedding; 0 without one."""
        if not self.use_position_embedding:
            return 0
        return self.grid[0] * self.grid[1] + self.num_special_positions

    @property
    def encoder_block(self) -> EncoderBlockConfig:
        """The parts and sizes of every block."""
        return EncoderBlockConfig(
            num_heads=self.num_heads,
            mlp_dim=self.mlp_dim,
            epsilon=self.layer_norm_epsilon,
            dropout=self.dropout_rate,
            attention_dropout=self.attention_dropout,
            use_attention_bias=self.use_mha_bias,
            use_mlp_bias=self.use_mlp_bias,
            use_query_key_norm=self.qk_norm,
            layer_scale=self.layer_scale,
            approximate_gelu=self.approximate_gelu,
            gated=self.use_swiglu_ffn,
            unbiased=self.unbiased,
            rope_wavelength=self.rope_theta,
            rope_pairs=ROPE_PAIRS[self.rope_type],
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values."""
        shape = None if self.ref_feat_shape is None else list(self.ref_feat_shape)
        plain = {"image_shape": list(self.image_shape), "ref_feat_shape": shape}
        return {**super().to_dict(), **plain}


def check_rotary(config: ViTConfig) -> None:
    """Raises `InputError` for invalid settings of the rotary embedding."""
    check_choice("rope_type", config.rope_type, ROPE_PAIRS)
    moves = {"shift": config.pos_embed_shift}
    moves |= {"jitter": config.pos_embed_jitter, "rescale": config.pos_embed_rescale}
    for name, value in moves.items():
        least = 0 if name == "shift" else 1
        if value is not None and not least <= value < float("inf"):
            raise InputError(f"pos_embed_{name} is {value}; give {least} or more, or None")
    if config.rope_theta is None:
        if named := [f"pos_embed_{name}" for name, value in moves.items() if value is not None]:
            raise InputError(f"{', '.join(named)} without a rotary embedding; give rope_theta")
        return
    if not config.rope_theta > 0:
        raise InputError(f"rope_theta is {config.rope_theta}; give a number above 0, or None")
    if (width := config.hidden_dim // config.num_heads) % 4:
        raise InputError(
            f"rope_theta needs heads whose width is a multiple of 4; hidden_dim "
            f"{config.hidden_dim} and num_heads {config.num_heads} give {width}"
        )
    if config.ref_feat_shape is not None and (
        len(config.ref_feat_shape) != 2 or min(config.ref_feat_shape) < 1
    ):
        raise InputError(
            f"ref_feat_shape is {config.ref_feat_shape}; give (rows, columns), each at least 1"
        )


def _side(patch: int | Sequence[int]) -> Any:
    if not isinstance(patch, tuple | list):
        return patch
    if len(patch) != 2 or patch[0] != patch[1]:
        raise InputError(f"patch_size is {patch}; patches are square here, so give one number")
    return patch[0]


def _nearest(side: int, patch: int) -> str:
    below, above = side // patch * patch, (side // patch + 1) * patch
    return f"{below} and {above}" if below else f"{above} and {above + patch}"
