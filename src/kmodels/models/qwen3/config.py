"""The configuration of a Qwen 3, validated in one place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kmodels.core.errors import check_whole
from kmodels.models.common.config import BlockConfig, DecoderConfig, check_positive
from kmodels.models.common.yarn import Yarn, check_alone


@dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    """Sizes of a dense Qwen 3 backbone; names as in keras-hub.

    Args:
        vocabulary_size: rows of the embedding table; like all that is not listed, as there.
        rope_max_wavelength: base of the rotary embedding, 1,000,000 in the published models.
        rope_scaling_factor: divides the positions.
        rope_yarn: arguments of `Yarn`, such as {"factor": 4.0, "original_max_position_embeddings":
            32768}, for contexts longer than those of the training; then rope_scaling_factor is 1.
        sliding_window_size: keys that a query sees, its own included; None for all before it.
        attention_bias: whether all four projections of the attention have biases, as in
            transformers; the published models have none.

    Raises:
        InputError: for sizes that do not fit together.
    """

    rope_max_wavelength: float = 10_000.0
    rope_scaling_factor: float = 1.0
    sliding_window_size: int | None = None
    attention_bias: bool = False
    rope_yarn: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window_size is not None:
            check_whole("sliding_window_size", self.sliding_window_size)
        check_positive(self, "rope_max_wavelength", "rope_scaling_factor")
        if self.yarn is not None:
            check_alone("rope_yarn", {"rope_scaling_factor": self.rope_scaling_factor})

    @property
    def yarn(self) -> Yarn | None:
        """The settings of YaRN, or None."""
        return None if self.rope_yarn is None else Yarn.of(self.rope_yarn)

    def block(self, index: int) -> BlockConfig:
        """Returns what a block is made of; all are alike."""
        yarn, scaling = self.yarn, self.rope_scaling_factor
        return BlockConfig(
            num_query_heads=self.num_query_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            mlp_dim=self.mlp_dim,
            epsilon=self.layer_norm_epsilon,
            query_scale=self.head_dim**-0.5 * (yarn.query_scale if yarn else 1.0),
            rope_wavelength=self.rope_max_wavelength,
            rope_scaling=(
                yarn.divisors(self.head_dim, self.rope_max_wavelength) if yarn else scaling
            ),
            window=self.sliding_window_size,
            use_query_key_norm=True,
            use_bias=self.attention_bias,
            use_output_bias=self.attention_bias,
            activation="silu",
            dropout=self.dropout,
        )
