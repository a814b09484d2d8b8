"""Gemma, readable from token ids to hidden states.

What differs from a plain decoder, generation by generation:
- 1: embeddings times sqrt(D), norms that multiply by 1 + scale, rotary positions, few key/value
  heads, a gated MLP with the tanh form of GELU, and the embedding table as output layer;
- 2: norms behind attention and MLP too, soft caps on attention scores and logits, and a sliding
  window in every other block;
- 3: norms on queries and keys instead of the caps, five local blocks to a global one, and another
  rotary base in the global ones.
"""

from typing import Any

import keras

from kmodels import compat
from kmodels.distribution import layout
from kmodels.errors import InputError
from kmodels.layers import Embedding, RMSNorm
from kmodels.layers.base import direct_calls
from kmodels.models.gemma import weights_peft
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.gemma.layers import GemmaBlock
from kmodels.models.gemma.presets import GEMMA_3
from kmodels.models.gemma.sharding import LAYOUT
from kmodels.task import Backbone

OPTIONAL_INPUTS = ("positions", "segment_ids")


class OptionalInputs:
    """Lets a functional model be called without its optional inputs."""

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """What the class says, of the inputs that are given."""
        return super().__call__(complete(inputs), *args, **kwargs)  # type: ignore[misc]

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """As `__call__`; Keras' trainer on JAX comes in here."""
        return super().call(complete(inputs), training=training, mask=mask)  # type: ignore[misc]


def complete(inputs: Any) -> Any:
    """The inputs with None for each optional one that is not there."""
    if isinstance(inputs, dict):
        return {**dict.fromkeys(OPTIONAL_INPUTS), **inputs}
    return inputs


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaBackbone(OptionalInputs, Backbone):
    """A Gemma 1, 2 or 3 without its output layer.

    Args:
        vocabulary_size: rows of the embedding table.
        num_layers: blocks.
        num_query_heads: heads of the queries.
        num_key_value_heads: heads of keys and values.
        hidden_dim: width of the hidden states.
        intermediate_dim: keras-hub's: for Gemma 1 and 2 twice the width of the MLP's gate.
        head_dim: width of each head.
        dtype: policy, such as "bfloat16"; Keras' global one by default.
        name: of the model.
        **variants: the other fields of `GemmaConfig`.

    Call:
        {"token_ids": (B, T) int, "padding_mask": (B, T) int or bool} -> hidden states (B, T, D).
        Rows are padded on the right: no token sees a later one, so padding needs no mask, and what
        stands at padded positions has no meaning. For several texts in a row add "segment_ids"
        (B, T) int, tokens of one text sharing a number, and "positions" (B, T) int, from 0 in each
        text; rows padded on the left are such rows too.

    Raises:
        InputError: for sizes that do not fit together, or names that `GemmaConfig` lacks.

    Source:
        Gemma Team, arXiv:2403.08295, arXiv:2408.00118, arXiv:2503.19786; variants as in
        Transformers' `modeling_gemma`, `modeling_gemma2`, `modeling_gemma3`.
    """

    config_class = GemmaConfig
    family = "gemma"
    peft_names = staticmethod(weights_peft.names)

    def __init__(
        self,
        vocabulary_size: int,
        num_layers: int,
        num_query_heads: int,
        num_key_value_heads: int,
        hidden_dim: int,
        intermediate_dim: int,
        head_dim: int,
        dtype: Any = None,
        name: str = "gemma_backbone",
        **variants: Any,
    ):
        config = self.make_config(
            vocabulary_size=vocabulary_size,
            num_layers=num_layers,
            num_query_heads=num_query_heads,
            num_key_value_heads=num_key_value_heads,
            hidden_dim=hidden_dim,
            intermediate_dim=intermediate_dim,
            head_dim=head_dim,
            **variants,
        )
        policy = keras.dtype_policies.get(dtype or keras.config.dtype_policy())

        # === Layers ===
        embedding = Embedding(
            config.vocabulary_size,
            config.hidden_dim,
            soft_cap=config.final_logit_soft_cap,
            name="token_embedding",
            dtype=policy,
        )
        blocks = [
            GemmaBlock(config, i, name=f"block_{i}", dtype=policy) for i in range(config.num_layers)
        ]
        final_norm = RMSNorm(config.layer_norm_epsilon, name="final_norm", dtype=policy)

        # === Graph ===
        inputs = {
            key: keras.Input((None,), dtype="int32", name=key, optional=key in OPTIONAL_INPUTS)
            for key in ("token_ids", "padding_mask", *OPTIONAL_INPUTS)
        }
        x = embedding(inputs["token_ids"])
        out = {"token_embedding": x}
        for block in blocks:
            x = out[block.name] = block(
                x, segment_ids=inputs["segment_ids"], positions=inputs["positions"]
            )
        x = out["final_norm"] = final_norm(x)
        super().__init__(config=config, intermediates=out, inputs=inputs, outputs=x, name=name)

        # === Config ===
        self.token_embedding = embedding
        self.blocks = blocks
        self.final_norm = final_norm
        self.dtype_policy = policy

    def intermediates(self, inputs: Any) -> dict[str, Any]:
        """Embeddings, the output of every block and of the final norm."""
        return super().intermediates(complete(inputs))

    def compute_output_spec(self, inputs: Any, *_: Any, **__: Any) -> keras.KerasTensor:
        """(B, T, D) in the compute dtype."""
        shape = (*inputs["token_ids"].shape, self.config.hidden_dim)
        return keras.KerasTensor(shape, dtype=self.dtype_policy.compute_dtype)

    @property
    def cache_shape(self) -> tuple[int, int]:
        """Heads and width of a token's key, and of its value."""
        return (self.config.num_key_value_heads, self.config.head_dim)

    @property
    def cache_windows(self) -> list[int | None]:
        """How many tokens each block sees at most, the new one included; None for all."""
        return [block.attention.window for block in self.blocks]

    def extend(self, token_ids: Any, positions: Any, caches: list[Any]) -> Any:
        """Hidden states of new tokens behind those that the caches hold.

        Args:
            token_ids: (B, T) int.
            positions: (T,) or (B, T) int, or None for 0, 1, ...
            caches: one per block, see `GemmaBlock`.

        Returns:
            (B, T, D).
        """
        x = self.token_embedding(token_ids)
        with compat.autocast(self.dtype_policy), direct_calls():
            for block, cache in zip(self.blocks, caches, strict=True):
                x = block(x, positions=positions, cache=cache)
            return self.final_norm(x)

    @staticmethod
    def get_layout_map(
        device_mesh: keras.distribution.DeviceMesh,
        model_parallel_dim_name: str = "model",
        data_parallel_dim_name: str = "batch",
    ) -> keras.distribution.LayoutMap:
        """How the weights lie on a mesh, as keras-hub's method of this name."""
        inner = dict.fromkeys(("heads", "mlp", "vocab"), model_parallel_dim_name)
        return layout.layout_map(device_mesh, LAYOUT, {**inner, "embed": data_parallel_dim_name})


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3Backbone(GemmaBackbone):
    """`GemmaBackbone` with the defaults and arguments of keras-hub's class of this name.

    Args:
        image_size: of the vision encoder, which is not here; ignored.
        vision_encoder: None.
        **fields: as of `GemmaBackbone`.

    Raises:
        InputError: for a vision encoder.
    """

    def __init__(self, image_size: Any = None, vision_encoder: Any = None, **fields: Any):
        if vision_encoder is not None:
            raise InputError("Gemma3Backbone is text only; leave vision_encoder out")
        keras_hub = ("use_query_key_norm", "global_rope_wavelength", "gate_dim_reduction")
        defaults = {name: GEMMA_3[name] for name in (*keras_hub, "sliding_window_pattern")}
        super().__init__(**{**defaults, "sliding_window_size": 1024, **fields})
