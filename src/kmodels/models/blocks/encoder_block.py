"""The transformer block of encoders, described by their configs."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from kmodels.core.types import Tensor
from kmodels.layers import MLP, Attention, Dropout, DropPath, Layer, LayerNorm, LayerScale, SwiGLU
from kmodels.layers.base import Shape
from kmodels.layers.direct_calls import calls
from kmodels.models.blocks.encoder_config import EncoderConfig


class EncoderInfo(NamedTuple):
    """Properties of tokens (B, T, D) that the attention of a block depends on; None for none.

    Args:
        padding_mask: (B, T); tokens with 0 are masked for all queries.
        coordinates: (T, 2) or (B, T, 2), positions of tokens in the plane for a rotary embedding;
            they are not rounded to the compute dtype.
        segment_ids: (B, T) int; tokens attend within their own segment only.
        attention_mask: boolean (B, T, T), True if a query (second axis) attends to a key.
    """

    padding_mask: Tensor | None = None
    coordinates: Tensor | None = None
    segment_ids: Tensor | None = None
    attention_mask: Tensor | None = None


NO_INFO = EncoderInfo()


class EncoderBlock(Layer):
    """One pre-norm transformer block (Dosovitskiy et al. 2021, eq. 2 and 3).

    A family's own class names its config, so that files can make the block again:

        @keras.saving.register_keras_serializable(package="kmodels")
        class CLIPTextBlock(EncoderBlock):
            config_class = CLIPTextConfig

    Args:
        config: config of the backbone; its `encoder_block` describes the parts of a block.
        drop_path: share of the examples whose branches are dropped, in training.

    Call:
        x (B, T, D) and their `EncoderInfo` -> (B, T, D), or with `keep` the first tokens of that,
        (B, keep, D), which excludes segment_ids and an attention_mask.
    """

    config_class: ClassVar[type[EncoderConfig]]

    def __init__(
        self, config: EncoderConfig | Mapping[str, Any], drop_path: float = 0.0, **kwargs: Any
    ):
        super().__init__(**kwargs)
        policy = self.dtype_policy
        self.supports_masking = True
        self.config = self.config_class.of(config)
        block = self.config.encoder_block
        rotary: dict[str, Any] = {}
        if block.rope_wavelength is not None:
            rotary = {"rope_wavelength": block.rope_wavelength, "rope_pairs": block.rope_pairs}
            self.keep_keywords()
        self.attention_norm = LayerNorm(block.epsilon, name="attention_norm", dtype=policy)
        self.attention = Attention(
            block.num_heads,
            dropout=block.attention_dropout,
            use_bias=block.use_attention_bias,
            qk_norm=block.use_query_key_norm,
            epsilon=block.epsilon,
            causal=block.causal,
            unbiased=block.unbiased,
            **rotary,
            name="attention",
            dtype=policy,
        )
        self.mlp_norm = LayerNorm(block.epsilon, name="mlp_norm", dtype=policy)
        form: dict[str, Any] = {}
        if not block.gated:
            form["approximate"] = block.approximate_gelu
        self.mlp = (SwiGLU if block.gated else MLP)(
            block.mlp_dim,
            dropout=block.dropout,
            use_bias=block.use_mlp_bias,
            name="mlp",
            dtype=policy,
            **form,
        )
        self.attention_scale = self.mlp_scale = None
        if block.layer_scale is not None:
            self.attention_scale = LayerScale(
                block.layer_scale, name="attention_scale", dtype=policy
            )
            self.mlp_scale = LayerScale(block.layer_scale, name="mlp_scale", dtype=policy)
        self.dropout = Dropout(block.dropout, name="dropout", dtype=policy)
        self.drop_path = DropPath(drop_path, name="drop_path", dtype=policy)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this block again, as plain values."""
        return {**super().get_config(), "drop_path": self.drop_path.rate}

    def build(self, input_shape: Shape) -> None:
        """Builds every part for the width of the tokens."""
        parts = (self.attention_norm, self.attention, self.attention_scale)
        parts = (*parts, self.mlp_norm, self.mlp, self.mlp_scale, self.dropout, self.drop_path)
        for part in parts:
            if part is not None:
                part.build(input_shape)

    def call(
        self,
        x: Tensor,
        info: EncoderInfo = NO_INFO,
        training: bool = False,
        keep: int | None = None,
    ) -> Any:
        """(B, T, D) -> (B, T, D), or (B, keep, D)."""
        return self.after_norm(x, self.attention_norm(x), info, training, keep)

    def after_norm(
        self,
        x: Tensor,
        y: Tensor,
        info: EncoderInfo = NO_INFO,
        training: bool = False,
        keep: int | None = None,
    ) -> Any:
        """Returns the result of `call` from its tokens and the output of `attention_norm`."""
        padding_mask, coordinates, segment_ids, attention_mask = info
        if keep is None:
            y = self.attention(
                y,
                attention_mask=attention_mask,
                query_mask=padding_mask,
                training=training,
                positions=coordinates,
                segment_ids=segment_ids,
            )
        else:
            x = x[:, :keep]
            y = self.attention(
                y[:, :keep],
                y,
                context_mask=padding_mask,
                training=training,
                positions=None if coordinates is None else coordinates[..., :keep, :],
                context_positions=coordinates,
            )
        x = x + self.branch(y, self.attention_scale, training)
        y = self.mlp(self.mlp_norm(x), training=training)
        return x + self.branch(y, self.mlp_scale, training)

    def branch(self, y: Tensor, scale: LayerScale | None, training: bool) -> Any:
        """Returns the output of a part (B, T, D) as it is added to the tokens."""
        if not training and calls.sealed:  # nothing that would drop has anything to do
            return y if scale is None else scale(y)
        y = self.dropout(y, training=training)
        if scale is not None:
            y = scale(y)
        return self.drop_path(y, training=training)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """Returns the input's shape."""
        return input_shape
