"""The configuration of encoders: their blocks, and the sizes that every text encoder has."""

from dataclasses import dataclass
from typing import ClassVar

from kmodels.core.errors import InputError, check_choice, check_whole
from kmodels.models.blocks.config import FrozenConfig, check_rates

# keras-hub's names of the forms of GELU, and the `approximate` of `ops.gelu`.
GELUS: dict[str, bool | str] = {"gelu": False, "gelu_approximate": True, "quick_gelu": "sigmoid"}


class EncoderConfig(FrozenConfig):
    """A config of a model of `EncoderBlock`s."""

    num_layers: int
    hidden_dim: int

    @property
    def encoder_block(self) -> "EncoderBlockConfig":
        """The parts and sizes of every block."""
        raise NotImplementedError


@dataclass(frozen=True)
class EncoderBlockConfig:
    """The blocks of an encoder, which are alike.

    Args:
        num_heads: number of heads of the attention.
        mlp_dim: width between the dense layers of the MLP; of the gate if the MLP is gated.
        epsilon: epsilon of every norm.
        dropout: on the attention's output, and within and behind the MLP, in training.
        attention_dropout: on the attention weights.
        use_attention_bias: biases of the attention's projections.
        use_mlp_bias: biases of the MLP.
        use_query_key_norm: normalizes queries and keys per head.
        layer_scale: initial value of the residual scales, or None for none.
        approximate_gelu: as in `ops.gelu`.
        gated: SwiGLU instead of GELU.
        causal: True for causal attention.
        unbiased: projections of the attention without a bias, as in `layers.Attention`.
        rope_wavelength: base of a rotary embedding in a plane, or None for none.
        rope_pairs: as in `ops.rotary_embedding_2d`.
    """

    num_heads: int
    mlp_dim: int
    epsilon: float
    dropout: float = 0.0
    attention_dropout: float = 0.0
    use_attention_bias: bool = True
    use_mlp_bias: bool = True
    use_query_key_norm: bool = False
    layer_scale: float | None = None
    approximate_gelu: bool | str = False
    gated: bool = False
    causal: bool = False
    unbiased: tuple[str, ...] = ()
    rope_wavelength: float | None = None
    rope_pairs: str = "halves"


def check_heads(num_heads: int, hidden_dim: int) -> None:
    """Raises `InputError` for heads that do not divide the width."""
    if hidden_dim % num_heads:
        heads = [n for n in range(1, hidden_dim + 1) if hidden_dim % n == 0]
        near = sorted(sorted(heads, key=lambda n: abs(n - num_heads))[:3])
        raise InputError(
            f"{num_heads} heads do not divide the width of {hidden_dim}; "
            f"the nearest numbers that work are {', '.join(map(str, near))}"
        )


def check_gelu(name: str) -> None:
    """Raises `InputError` for a name that is not in `GELUS`."""
    check_choice("intermediate_activation", name, GELUS)


@dataclass(frozen=True)
class TextEncoderConfig(EncoderConfig):
    """Sizes of a text encoder; a family adds its own fields. Names and order are keras-hub's.

    Args:
        vocabulary_size: rows of the embedding table.
        embedding_dim: width of that table, which is `hidden_dim`.
        hidden_dim: width of the hidden states.
        num_layers: blocks.
        num_heads: attention heads; divides `hidden_dim`.
        intermediate_dim: width of the MLP.
        intermediate_activation: activation of the MLP: "gelu", "gelu_approximate" or "quick_gelu".
        intermediate_output_index: the block, from 0 or from the end, whose output the model gives
            too; None for none.
        max_sequence_length: rows of the position embedding.
        layer_norm_epsilon: epsilon of every norm.
        attention_dropout: on the attention weights, in training.

    Attributes:
        causal: True for causal attention.

    Raises:
        InputError: for sizes that do not fit together.
    """

    causal: ClassVar[bool] = False
    vocabulary_size: int
    embedding_dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    intermediate_dim: int
    intermediate_activation: str = "gelu"
    intermediate_output_index: int | None = None
    max_sequence_length: int = 77
    layer_norm_epsilon: float = 1e-5
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("vocabulary_size", "embedding_dim", "hidden_dim", "num_layers", "num_heads")
        for name in (*sizes, "intermediate_dim", "max_sequence_length"):
            check_whole(name, getattr(self, name))
        if self.embedding_dim != self.hidden_dim:
            raise InputError(
                f"embedding_dim is {self.embedding_dim} and hidden_dim {self.hidden_dim}; a block "
                "adds to what it reads: give the same number twice"
            )
        check_heads(self.num_heads, self.hidden_dim)
        check_gelu(self.intermediate_activation)
        check_rates(self, "attention_dropout")
        if (index := self.intermediate_output_index) is not None:
            if not -self.num_layers <= index < self.num_layers:
                raise InputError(
                    f"intermediate_output_index is {index}; give one of the {self.num_layers} "
                    f"blocks, from {-self.num_layers} to {self.num_layers - 1}"
                )
            object.__setattr__(self, "intermediate_output_index", index % self.num_layers)

    @property
    def encoder_block(self) -> EncoderBlockConfig:
        """The parts and sizes of every block."""
        return EncoderBlockConfig(
            num_heads=self.num_heads,
            mlp_dim=self.intermediate_dim,
            epsilon=self.layer_norm_epsilon,
            attention_dropout=self.attention_dropout,
            approximate_gelu=GELUS[self.intermediate_activation],
            causal=self.causal,
        )


def config_field(name: str) -> property:
    """Returns a property of a model that gives a field of its config."""
    return property(lambda self: getattr(self.config, name), doc="The field of the config.")
