"""Configs: the base of all families, and those of decoders and their blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from kmodels.core.arguments import check_fields
from kmodels.core.errors import InputError, check_whole


class FrozenConfig:
    """The base of the frozen dataclass that every family has, which checks its fields."""

    def __post_init__(self) -> None:
        check_fields(self)
        if (epsilon := getattr(self, "layer_norm_epsilon", 0.0)) < 0:
            raise InputError(f"layer_norm_epsilon is {epsilon}; give a number from 0, such as 1e-6")

    @classmethod
    def of(cls, config: Any) -> Self:
        """Returns a config, or makes the one whose fields `to_dict` gave."""
        return config if isinstance(config, cls) else cls(**config)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values."""
        return asdict(self)  # type: ignore[call-overload]


def check_rates(config: Any, *names: str) -> None:
    """Raises `InputError` for a field of one of these names that is no rate of dropout."""
    for name in names:
        if not 0.0 <= (rate := getattr(config, name)) < 1.0:
            raise InputError(f"{name} is {rate}; give a rate in [0, 1)")


def check_positive(config: Any, *names: str, none: str = "") -> None:
    """Raises `InputError` for a field that is no positive number that float32 can compute with.

    A field may be None if `none` says what that means.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0.0 < value < 1e30:
            more = f", or None for {none}" if none else ""
            raise InputError(f"{name} is {value}; give a positive number{more}")


def check_groups(heads: int, groups: int) -> None:
    """Raises `InputError` for key/value heads that do not divide the query heads."""
    if heads % groups:
        raise InputError(
            f"{groups} key/value heads do not divide {heads} query heads; give a divisor"
        )


@dataclass(frozen=True)
class BlockConfig:
    """One block of a decoder, and so everything that may differ from block to block.

    Args:
        num_query_heads: heads of the queries.
        num_key_value_heads: heads of keys and values.
        head_dim: width of each head.
        mlp_dim: width of the MLP's gate, and of the layer that it multiplies.
        epsilon: epsilon of every norm.
        query_scale: factor of the attention scores.
        rope_wavelength: base of the rotary embedding.
        rope_scaling: divides the positions; one number, or one for each pair of channels.
        window: keys that a query sees, its own included; None for all before it. A block that
            is not causal sees the keys nearer than this on either side.
        soft_cap: soft cap of the attention scores, or None.
        use_query_key_norm: normalises queries and keys per head.
        use_bias: biases of the projections of queries, keys and values.
        use_output_bias: bias of the projection behind the attention.
        norm_offset: is added to the scale of every norm, 1 in Gemma.
        use_post_attention_norm: a norm behind the attention.
        use_post_mlp_norm: a norm behind the MLP.
        activation: activation of the MLP's gate: "silu", or "gelu" in its tanh form.
        dropout: on attention weights and both residual branches, in training.
        rope_turned: share of the pairs of channels that the rotary embedding turns.
        use_value_norm: normalises values per head, without a scale.
        key_is_value: values are the keys before their norm, without a projection of their own.
        key_value_source: number of the earlier block whose keys and values this block uses
            instead of computing any; None if it computes them.
        shares_key_value: whether a later block uses the keys and values of this one.
        per_layer_dim: width of the per-layer embedding of each token; 0 for none.
        use_layer_scalar: multiplies the output of the block by a number that is not trained.
        causal: tokens do not attend to later tokens.
        num_experts: experts in addition to the MLP; a router chooses some for each token. 0 for
            the MLP alone. Then MLP and experts each have a norm behind them, and the experts one of
            their own in front.
        num_experts_per_token: experts that each token goes to.
        expert_dim: `mlp_dim` of each expert.
    """

    num_query_heads: int
    num_key_value_heads: int
    head_dim: int
    mlp_dim: int
    epsilon: float
    query_scale: float
    rope_wavelength: float
    rope_scaling: float | tuple[float, ...] = 1.0
    window: int | None = None
    soft_cap: float | None = None
    use_query_key_norm: bool = False
    use_bias: bool = False
    use_output_bias: bool = False
    norm_offset: float = 0.0
    use_post_attention_norm: bool = False
    use_post_mlp_norm: bool = False
    activation: str = "silu"
    dropout: float = 0.0
    rope_turned: float = 1.0
    use_value_norm: bool = False
    key_is_value: bool = False
    key_value_source: int | None = None
    shares_key_value: bool = False
    per_layer_dim: int = 0
    use_layer_scalar: bool = False
    causal: bool = True
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_dim: int = 0

    @property
    def projections(self) -> tuple[str, ...]:
        """The names of the projections in front of the attention."""
        if self.key_value_source is not None:
            return ("query",)
        return ("query", "key") if self.key_is_value else ("query", "key", "value")

    def has_bias(self, layer: str) -> bool:
        """Returns True if a linear layer has a bias, by its path in the block."""
        part, name = layer.split("/")
        if part != "attention":
            return False
        return self.use_output_bias if name == "output" else self.use_bias


@dataclass(frozen=True)
class DecoderConfig(FrozenConfig):
    """Sizes of a decoder; a family adds fields, and `block` applies them.

    Args:
        vocabulary_size: rows of the embedding table.
        num_layers: blocks.
        num_query_heads: heads of the queries.
        num_key_value_heads: heads of keys and values; divides `num_query_heads`.
        hidden_dim: width of the hidden states.
        intermediate_dim: width of the MLP's gate, and of the layer that it multiplies.
        head_dim: width of each head; even.
        layer_norm_epsilon: epsilon of every norm.
        dropout: on attention weights and both residual branches, in training.
        tie_word_embeddings: whether the embedding table is the output layer too; False for an
            output layer with its own table.
        max_sequence_length: longest text, in tokens, that the model was made for; a note for
            exports, which limits nothing: `generate` logs that a text is longer. None for that of
            the published models.

    Raises:
        InputError: for sizes that do not fit together.
    """

    vocabulary_size: int
    num_layers: int
    num_query_heads: int
    num_key_value_heads: int
    hidden_dim: int
    intermediate_dim: int
    head_dim: int
    layer_norm_epsilon: float = 1e-6
    dropout: float = 0.0
    tie_word_embeddings: bool = True
    # No result depends on it, and not every format has it.
    max_sequence_length: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_sequence_length is not None:
            check_whole("max_sequence_length", self.max_sequence_length)
        for name in (
            "vocabulary_size",
            "num_layers",
            "num_query_heads",
            "num_key_value_heads",
            "hidden_dim",
            "intermediate_dim",
            "head_dim",
        ):
            check_whole(name, getattr(self, name))
        check_groups(self.num_query_heads, self.num_key_value_heads)
        if self.head_dim % 2:
            raise InputError(f"head_dim is {self.head_dim}; rotary embedding needs an even number")
        check_rates(self, "dropout")

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values, without a `max_sequence_length` of None."""
        fields = super().to_dict()
        if self.max_sequence_length is None:
            del fields["max_sequence_length"]
        return fields

    @property
    def published_length(self) -> int:
        """`max_sequence_length` of the published models."""
        raise NotImplementedError

    @property
    def context_length(self) -> int:
        """Longest text, in tokens, that the model was made for."""
        return self.max_sequence_length or self.published_length

    @property
    def mlp_dim(self) -> int:
        """Width of the gate, and of the layer that it multiplies."""
        return self.intermediate_dim

    @property
    def per_layer_vocabulary(self) -> int:
        """Rows of the table of per-layer embeddings, if blocks have a `per_layer_dim`."""
        return self.vocabulary_size

    @property
    def decoder(self) -> "DecoderConfig":
        """The config that each block holds: this one, without the vision encoder."""
        return self

    def resized(self, vocabulary_size: int) -> Self:
        """Returns this config with tables of another number of rows."""
        return replace(self, vocabulary_size=vocabulary_size)

    @property
    def scales_embeddings(self) -> bool:
        """True if embeddings are multiplied by sqrt(hidden_dim)."""
        return False

    @property
    def is_causal(self) -> bool:
        """True if tokens do not attend to later tokens."""
        return True

    @property
    def norm_offset(self) -> float:
        """The number that is added to the scale of every norm."""
        return 0.0

    @property
    def logit_soft_cap(self) -> float | None:
        """The soft cap of the logits, or None."""
        return None

    def looks_ahead(self, layer: int) -> bool:
        """Returns True if the tokens of an image attend to later ones of it in this layer too."""
        return True

    def block(self, index: int) -> BlockConfig:
        """Returns the settings of the block with this number, from 0."""
        raise NotImplementedError


def presets(
    names: Sequence[str], sizes: Mapping[str, Sequence[Any]], **shared: Any
) -> dict[str, dict[str, Any]]:
    """Returns the named sizes of a family: values of the fields `names`, and the shared fields."""
    return {name: shared | dict(zip(names, row, strict=True)) for name, row in sizes.items()}


# === The kind of attention of each layer, and layers that share keys and values ===

# As `layer_types` calls them: with a window, and without one.
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def check_kinds(kinds: Sequence[str], layers: int, shared: int) -> None:
    """Raises `InputError` for kinds that do not fit the layers of a model.

    The last `shared` layers use keys and values of layers before them.
    """
    check_whole("num_kv_shared_layers", shared, least=0)
    if strange := sorted(set(kinds) - {LOCAL, GLOBAL}):
        raise InputError(f"layer_types has {strange[0]!r}; give {LOCAL!r} and {GLOBAL!r}")
    if len(kinds) != layers:
        raise InputError(f"layer_types names {len(kinds)} layers of {layers}; give one for each")
    if lacking := sorted(set(kinds) - set(kinds[: max(layers - shared, 0)])):
        raise InputError(
            f"num_kv_shared_layers is {shared}, and no layer before them has {lacking[0]} to "
            "share; give fewer"
        )


def kv_sources(kinds: Sequence[str], shared: int) -> list[int | None]:
    """Returns the layer whose keys and values each layer uses, None for its own.

    The last `shared` layers use those of the last layer of their kind that has its own.
    """
    own = len(kinds) - shared
    last = {kind: index for index, kind in enumerate(kinds[:own])}
    return [None if index < own else last[kind] for index, kind in enumerate(kinds)]
