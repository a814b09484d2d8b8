"""What a ViT is made of, validated in one place."""

from dataclasses import asdict, dataclass
from typing import Any

from kmodels.errors import InputError, check_whole


@dataclass(frozen=True)
class ViTConfig:
    """Sizes and variants of a Vision Transformer backbone.

    Args:
        image_shape: (height, width, channels) in pixels.
        patch_size: side of the square patches, in pixels; divides height and width.
        num_layers: blocks.
        num_heads: attention heads; divides `hidden_dim`.
        hidden_dim: width of the tokens.
        mlp_dim: width between the two dense layers of each block.
        dropout_rate: after the position embedding, the attention output and both dense layers.
        attention_dropout: on the attention weights.
        drop_path_rate: stochastic depth of the last block; grows linearly from 0 at the first.
        layer_norm_epsilon: 1e-6 in JAX and timm checkpoints, 1e-12 in Hugging Face ones.
        use_patch_bias: bias of the patch embedding.
        use_mha_bias: biases of the attention projections.
        use_mlp_bias: biases of the MLP.
        use_class_token: puts a learned token in front of the patches.
        num_register_tokens: learned tokens between class token and patches (Darcet et al. 2023).
        position_over_prefix: the position embedding has a row for the class token too.
        layer_scale: first value of the residual scales, or None for none.
        qk_norm: normalises queries and keys per head.
        pre_norm: a norm in front of the first block, as CLIP has.
        final_norm: a norm after the last block; False where the classifier norms after pooling.
        approximate_gelu: the tanh form of GELU.

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
    num_register_tokens: int = 0
    position_over_prefix: bool = True
    layer_scale: float | None = None
    qk_norm: bool = False
    pre_norm: bool = False
    final_norm: bool = True
    approximate_gelu: bool = False

    def __post_init__(self) -> None:
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
        if self.hidden_dim % self.num_heads:
            heads = [n for n in range(1, self.hidden_dim + 1) if self.hidden_dim % n == 0]
            near = sorted(sorted(heads, key=lambda n: abs(n - self.num_heads))[:3])
            raise InputError(
                f"{self.num_heads} heads do not divide the width of {self.hidden_dim}; "
                f"the nearest numbers that work are {', '.join(map(str, near))}"
            )
        for name in ("dropout_rate", "attention_dropout", "drop_path_rate"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise InputError(f"{name} is {getattr(self, name)}; give a rate in [0, 1)")
        if self.num_register_tokens < 0:
            raise InputError(f"num_register_tokens is {self.num_register_tokens}; give 0 or more")

    @property
    def grid(self) -> tuple[int, int]:
        """Patches per column and per row."""
        return (
            self.image_shape[0] // self.patch_size,
            self.image_shape[1] // self.patch_size,
        )

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens in front of the patches: the class token and the registers."""
        return int(self.use_class_token) + self.num_register_tokens

    @property
    def num_positions(self) -> int:
        """Rows of the position embedding."""
        with_class = self.use_class_token and self.position_over_prefix
        return self.grid[0] * self.grid[1] + int(with_class)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return {**asdict(self), "image_shape": list(self.image_shape)}


def _nearest(side: int, patch: int) -> str:
    below, above = side // patch * patch, (side // patch + 1) * patch
    return f"{below} and {above}" if below else f"{above} and {above + patch}"
