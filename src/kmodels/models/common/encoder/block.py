"""The block of an encoder; what it does is in the config alone."""

from collections.abc import Mapping
from typing import Any, ClassVar

from kmodels.core.types import Tensor
from kmodels.layers import (
    MLP,
    Attention,
    Dropout,
    DropPath,
    Layer,
    LayerNorm,
    LayerScale,
    SwiGLU,
)
from kmodels.layers.base import Shape
from kmodels.layers.direct_calls import calls
from kmodels.models.common.encoder.config import EncoderConfig


class EncoderBlock(Layer):
    """One pre-norm transformer block (Dosovitskiy et al. 2021, eq. 2 and 3).

    A family's own class names its config, so that files can make the block again:

        @keras.saving.register_keras_serializable(package="kmodels")
        class CLIPTextBlock(EncoderBlock):
            config_class = CLIPTextConfig

    Args:
        config: config of the backbone; its `encoder_block` says what a block is made of.
        drop_path: share of the examples whose branches are dropped, in training.
        **kwargs: of `keras.layers.Layer`.

    Call:
        x (B, T, D) -> (B, T, D), or with `keep` the first tokens of that: (B, keep, D). Places
        where `padding_mask` (B, T) is 0 are seen by none; None for all. With a rotary embedding
        `coordinates` (T, 2) or (B, T, 2), which are not rounded to the compute dtype, say where
        tokens stand. With `segment_ids` (B, T) tokens see those of their own segment alone. Without
        `keep`, no token sees what a boolean `attention_mask` (B, T, T) forbids it.
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
        training: bool = False,
        keep: int | None = None,
        padding_mask: Tensor | None = None,
        coordinates: Tensor | None = None,
        segment_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Any:
        """(B, T, D) -> (B, T, D), or with `keep` the first tokens of that: (B, keep, D)."""
        return self.after_norm(
            x,
            self.attention_norm(x),
            training=training,
            keep=keep,
            padding_mask=padding_mask,
            coordinates=coordinates,
            segment_ids=segment_ids,
            attention_mask=attention_mask,
        )

    def after_norm(
        self,
        x: Tensor,
        y: Tensor,
        training: bool = False,
        keep: int | None = None,
        padding_mask: Tensor | None = None,
        coordinates: Tensor | None = None,
        segment_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Any:
        """Returns what `call` makes of tokens (B, T, D) and of what its first norm made of them."""
        if keep is None:
            more = {} if coordinates is None else {"positions": coordinates}
            more |= {} if segment_ids is None else {"segment_ids": segment_ids}
            more |= {} if attention_mask is None else {"attention_mask": attention_mask}
            y = self.attention(y, query_mask=padding_mask, training=training, **more)
        else:
            more = {}
            if coordinates is not None:
                more = {
                    "positions": coordinates[..., :keep, :],
                    "context_positions": coordinates,
                }
            y = self.attention(y[:, :keep], y, context_mask=padding_mask, training=training, **more)
            x = x[:, :keep]
        x = x + self._branch(y, self.attention_scale, training)
        y = self.mlp(self.mlp_norm(x), training=training)
        return x + self._branch(y, self.mlp_scale, training)

    def _branch(self, y: Tensor, scale: LayerScale | None, training: bool) -> Any:
        if not training and calls.sealed:  # nothing that would drop has anything to do
            return y if scale is None else scale(y)
        y = self.dropout(y, training=training)
        if scale is not None:
            y = scale(y)
        return self.drop_path(y, training=training)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """Returns the input's shape."""
        return input_shape
