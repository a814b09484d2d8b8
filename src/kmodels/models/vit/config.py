"""The configuration of a ViT, validated in one place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kmodels.core.errors import InputError, check_whole
from kmodels.models.blocks.config import check_rates
from kmodels.models.blocks.encoder_config import EncoderBlockConfig, EncoderConfig, check_heads
from kmodels.weights.positions import METHODS, Method

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
        dropout_rate: after the position embedding, the attention output and both dense layers.
        attention_dropout: on the attention weights.
        drop_path_rate: stochastic depth of the last block; grows linearly from 0 at the first.
        patch_drop_rate: share of the patches that each image loses in training, others each time.
        token_merging: in each block so many tokens are merged with those that are most like them;
            0 for none. What the model gives has a token for each patch all the same.
        layer_norm_epsilon: 1e-6 in JAX and timm checkpoints, 1e-12 in Hugging Face ones.
        use_patch_bias: bias of the patch embedding.
        use_mha_bias: biases of the attention projections.
        use_query_bias: one of them, where they are there; like the three that follow.
        use_key_bias: another, which DINOv3 leaves out.
        use_value_bias: another.
        use_proj_bias: that of the output projection.
        use_mlp_bias: biases of the MLP.
        use_class_token: puts a learned token in front of the patches.
        use_distillation_token: a second one behind it (DeiT, Touvron et al. 2021, section 4).
        num_register_tokens: learned tokens in front of the patches (Darcet et al. 2023).
        use_mask_token: keeps the token that DINOv2 puts in place of hidden patches in its
            pretraining, so that a checkpoint leaves as it came; nothing here computes with it.
        position_over_prefix: the position embedding has rows for class and distillation token too.
        position_interpolation: how the position embedding is made to fit another image size:
            "bicubic" as Hugging Face, "bicubic_antialias" as timm, "bilinear" as timm does with
            google-research's files, "bilinear_antialias" as SigLIP 2 with native aspect ratio.
        layer_scale: first value of the residual scales, or None for none.
        qk_norm: normalises queries and keys per head.
        pre_norm: a norm in front of the first block, as CLIP has.
        final_norm: a norm after the last block; False where the classifier norms after pooling.
        approximate_gelu: True for the tanh form of GELU, "sigmoid" for CLIP's quick GELU.
        use_swiglu_ffn: SiLU of a gate in place of GELU in the blocks (Shazeer 2020), as in DINOv2's
            giant.
        use_position_embedding: a learned table of positions; DINOv3 has none.
        rope_theta: base of a rotary embedding of queries and keys by the patches' places in the
            image, which class token and registers do not get; None for none.
        rope_type: "dinov3", centers of the patches from -1 to 1 along each side, in circles; "cat",
            numbers of column and row, as in Perception Encoder; "cat_ij", row and column.
        rope_grid_offset: is added to those numbers.
        ref_feat_shape: (rows, columns) of patches that "cat" scales each image to, so that another
            size turns by the same angles; None for as many as there are.
        pos_embed_shift: in training, the places move by up to this much along each axis, by one
            draw for all images of a step; None for none, like the two that follow.
        pos_embed_jitter: in training, each axis is scaled by a factor from 1 / this to this.
        pos_embed_rescale: in training, both axes are scaled by one such factor.
        pooling_num_heads: heads of the attention pooling, where they are not `num_heads`.
        pooling_mlp_dim: width of its MLP, where it is not `mlp_dim`.
        pool_include_prefix: class token and registers take part in it, as in Perception Encoder.

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
        if self.position_interpolation not in METHODS:
            raise InputError(
                f"position_interpolation is {self.position_interpolation!r}; choose one of "
                f"{', '.join(METHODS)}"
            )
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
        return (
            self.image_shape[0] // self.patch_size,
            self.image_shape[1] // self.patch_size,
        )

    @property
    def num_special_tokens(self) -> int:
        """The class token and the distillation token."""
        return int(self.use_class_token) + int(self.use_distillation_token)

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens in front of the patches: class token, distillation token and registers."""
        return self.num_special_tokens + self.num_register_tokens

    @property
    def num_special_positions(self) -> int:
        """Rows of the position embedding that belong to no patch."""
        there = self.use_position_embedding and self.position_over_prefix
        return self.num_special_tokens if there else 0

    @property
    def unbiased(self) -> tuple[str, ...]:
        """The projections of the attention without a bias, where others have one."""
        told = {
            "query": self.use_query_bias,
            "key": self.use_key_bias,
            "value": self.use_value_bias,
            "output": self.use_proj_bias,
        }
        return tuple(name for name, there in told.items() if not there)

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
    """Raises `InputError` for a rotary embedding that cannot be."""
    if config.rope_type not in ROPE_PAIRS:
        raise InputError(
            f"rope_type is {config.rope_type!r}; choose one of {', '.join(ROPE_PAIRS)}"
        )
    found = {"shift": config.pos_embed_shift}
    found |= {"jitter": config.pos_embed_jitter, "rescale": config.pos_embed_rescale}
    for name, value in found.items():
        least = 0 if name == "shift" else 1
        if value is not None and not least <= value < float("inf"):
            raise InputError(f"pos_embed_{name} is {value}; give {least} or more, or None")
    if config.rope_theta is None:
        if named := [f"pos_embed_{name}" for name, value in found.items() if value is not None]:
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
