"""A text encoder, readable from token ids to hidden states."""

from collections.abc import Mapping
from typing import Any, ClassVar

import keras

from kmodels.core.types import DTypeLike, Tensor, Tree
from kmodels.distribution import layout as layouts
from kmodels.layers import Embedding, LayerNorm, PositionEmbedding
from kmodels.layers.placement import of_family
from kmodels.models.blocks import sharding
from kmodels.models.blocks.encoder_block import EncoderBlock, EncoderInfo
from kmodels.models.blocks.encoder_config import config_field
from kmodels.models.blocks.inputs import GRAPH, OptionalInputs, as_tensors
from kmodels.task import Backbone


class TextEncoderBackbone(OptionalInputs, Backbone):
    """Embeddings with learned positions, blocks and a norm; the base of each family's own.

    A family's class names its config and its block, implements `pool`, and may replace the
    layout. The arguments are fields of the config, see `TextEncoderConfig`, in keras-hub's order;
    each field is an attribute of the model too. `dtype` is a policy, such as "mixed_bfloat16", by
    default Keras' global one.

    Call:
        {"token_ids": (B, T) int, "padding_mask": (B, T) int or bool} -> hidden states (B, T, D), or
        with `intermediate_output_index` {"sequence_output", "intermediate_output"}, each
        (B, T, D). Tokens with mask 0 are masked, but count for positions. Without a mask, or for
        token ids (B, T) alone, no token is masked.

    Raises:
        InputError: for sizes that do not fit together, names that the config lacks, or rows that
            are longer than the position embedding.
    """

    block_class: ClassVar[type[EncoderBlock]]
    layout: ClassVar[Mapping[str, layouts.Axes]] = sharding.TEXT_ENCODER
    takes = GRAPH

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name in cls.config_class.__dataclass_fields__:
            setattr(cls, name, config_field(name))

    @of_family
    def __init__(
        self,
        vocabulary_size: int,
        embedding_dim: int,
        hidden_dim: int,
        num_layers: int,
        num_heads: int,
        intermediate_dim: int,
        intermediate_activation: str | None = None,
        intermediate_output_index: int | None = None,
        max_sequence_length: int | None = None,
        dtype: DTypeLike = None,
        name: str | None = None,
        **variants: Any,
    ):
        settings = {
            "intermediate_activation": intermediate_activation,
            "intermediate_output_index": intermediate_output_index,
            "max_sequence_length": max_sequence_length,
        }
        config = self.make_config(
            vocabulary_size=vocabulary_size,
            embedding_dim=embedding_dim,
            hidden_dim=hidden_dim,
            num_layers=num_layers,
            num_heads=num_heads,
            intermediate_dim=intermediate_dim,
            **{name: value for name, value in settings.items() if value is not None},
            **variants,
        )
        policy = keras.dtype_policies.get(dtype or keras.config.dtype_policy())

        # === Layers ===
        sizes = (config.vocabulary_size, config.hidden_dim)
        embedding = Embedding(*sizes, scaled=False, name="token_embedding", dtype=policy)
        positions = PositionEmbedding(
            config.max_sequence_length,
            keras.initializers.RandomNormal(stddev=0.02),
            name="position_embedding",
            dtype=policy,
        )
        blocks = [
            self.block_class(config, name=f"block_{i}", dtype=policy)
            for i in range(config.num_layers)
        ]
        final_norm = LayerNorm(config.layer_norm_epsilon, name="final_norm", dtype=policy)

        # === Graph ===
        inputs = {
            name: keras.Input((None,), dtype="int32", name=name, optional=name != "token_ids")
            for name in self.takes
        }
        x = embedding(inputs["token_ids"])
        x = x + positions(x)
        out = {"tokens": x}
        info = EncoderInfo(padding_mask=inputs["padding_mask"])
        for block in blocks:
            out[block.name] = x = block(x, info=info)
        out["final_norm"] = x = final_norm(x)
        outputs = self.finish(x, config, policy)
        if config.intermediate_output_index is not None:
            intermediate = out[f"block_{config.intermediate_output_index}"]
            outputs = {"sequence_output": outputs, "intermediate_output": intermediate}
        super().__init__(
            config=config, intermediates=out, inputs=inputs, outputs=outputs, name=name
        )

        # === Config ===
        self.token_embedding = embedding
        self.position_embedding = positions
        self.blocks = blocks
        self.final_norm = final_norm
        self.dtype_policy = policy

    def intermediates(self, inputs: Tree) -> dict[str, Any]:
        """Embeddings with positions, the output of every block and of the final norm."""
        return super().intermediates(as_tensors(self, inputs))

    @staticmethod
    def finish(hidden: Tensor, config: Any, policy: keras.DTypePolicy) -> Any:
        """Returns the output for the last hidden states, by default these."""
        return hidden

    def pool(self, hidden: Tensor, token_ids: Tensor) -> Any:
        """Returns one vector per text: (B, T, D), (B, T) -> (B, D)."""
        raise NotImplementedError
