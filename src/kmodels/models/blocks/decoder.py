"""A decoder, readable from token ids to hidden states, with images among the tokens."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import keras

from kmodels.core import keras_internals
from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import DTypeLike, Tensor, Tree
from kmodels.distribution import layout as layouts
from kmodels.layers import Embedding, RMSNorm
from kmodels.layers.direct_calls import direct_calls
from kmodels.layers.placement import of_family
from kmodels.models.blocks import module_names, sharding
from kmodels.models.blocks.config import DecoderConfig
from kmodels.models.blocks.decoder_block import DecoderBlock, DecoderInfo, PerLayerEmbedding
from kmodels.models.blocks.encoder_config import config_field
from kmodels.models.blocks.inputs import (
    OptionalInputs,
    PaddingApart,
    Reordered,
    TokensFirst,
    as_tensors,
    complete,
)
from kmodels.task import Backbone
from kmodels.weights import gather

# === Images among the tokens ===


def without_images(token_ids: Tensor, vision_mask: Tensor) -> Any:
    """Returns token ids (B, T) with 0 at image positions, given by the mask (B, T)."""
    return keras.ops.where(
        keras.ops.cast(vision_mask, "bool"), keras.ops.zeros_like(token_ids), token_ids
    )


def block_ids(vision_mask: Tensor) -> Any:
    """Returns the number (B, T) of the image that each token belongs to, and -1 for text.

    Tokens that follow one another are of one image: between two of them a text has the end of the
    first and the start of the second.
    """
    mask = keras.ops.cast(keras.ops.cast(vision_mask, "bool"), "int32")
    before = keras.ops.pad(mask[:, :-1], ((0, 0), (1, 0)))
    number = keras.ops.cumsum(mask * (1 - before), axis=1)
    return keras.ops.cast(mask * number - 1, "int32")


# === Backbone ===


class _Steps(NamedTuple):
    """The way from token ids to hidden states, for symbols as for numbers."""

    embedding: Embedding
    per_layer: PerLayerEmbedding | None
    blocks: list[DecoderBlock]
    final_norm: RMSNorm
    order: TokensFirst
    move: Reordered
    apart: PaddingApart | None
    looks: list[bool]

    def embed(
        self, token_ids: Tensor, features: Tensor | None = None, vision_mask: Tensor | None = None
    ) -> tuple[Any, Any]:
        """Returns embeddings of tokens, and the `block_ids` of images among them or None."""
        if features is None or vision_mask is None:
            return self.embedding(token_ids), None
        # The token that stands for a piece of an image may lie outside the table.
        x = self.embedding(without_images(token_ids, vision_mask))
        # As in transformers' `masked_scatter`, the n-th place of a row gets its n-th feature
        # (B, M, D), whichever image it is of. Features beyond the last place are left out.
        number = keras.ops.cumsum(keras.ops.cast(vision_mask, "int32"), axis=1) - 1
        order = keras.ops.cast(keras.ops.maximum(number, 0), "int32")
        if (count := features.shape[1]) is not None:  # it is not known in a graph
            order = keras.ops.minimum(order, count - 1)
        there = keras.ops.expand_dims(keras.ops.cast(vision_mask, "bool"), -1)
        x = keras.ops.where(there, keras.ops.cast(self.move(features, order), x.dtype), x)
        return x, block_ids(vision_mask)

    def run(
        self,
        token_ids: Tensor,
        padding_mask: Tensor,
        positions: Tensor | None = None,
        segment_ids: Tensor | None = None,
        training: bool | None = None,
        intercept: Callable[[Any, int], Any] | None = None,
        features: Tensor | None = None,
        vision_mask: Tensor | None = None,
    ) -> tuple[dict[str, Any], Any]:
        """Returns every named intermediate with padding last, and the order that undoes that."""
        front, back = self.order(padding_mask)
        if positions is not None and len(positions.shape) == 2:
            positions = self.move(positions, front)
        if segment_ids is not None:
            segment_ids = self.move(segment_ids, front)
        if self.apart is not None:
            segment_ids = self.apart(self.move(padding_mask, front), segment_ids)
        token_ids = self.move(token_ids, front)
        if vision_mask is not None:
            vision_mask = self.move(vision_mask, front)
        x, block_ids = self.embed(token_ids, features, vision_mask)
        if intercept is not None:
            x = self.move(intercept(self.move(x, back), -1), front)
        out = {"token_embedding": x}
        parts = self.parts(token_ids, x, vision_mask)
        shared: dict[int | None, list[Any]] = {None: [None, None]}
        for number, block in enumerate(self.blocks):
            info = DecoderInfo(
                positions,
                segment_ids,
                block_ids if self.looks[number] else None,
                *shared[block.block.key_value_source],
            )
            more = {} if parts is None else {"per_layer": parts[number]}
            x = block(x, info=info, training=training, **more)
            if block.block.shares_key_value:
                x, *shared[number] = x
            if intercept is not None:
                x = self.move(intercept(self.move(x, back), number), front)
            out[block.name] = x
        out["final_norm"] = self.final_norm(x)
        return out, back

    def parts(self, token_ids: Tensor, x: Tensor, vision_mask: Tensor | None = None) -> Any:
        """Returns the per-layer embeddings of each block, or None if there are none."""
        if self.per_layer is None:
            return None
        if vision_mask is not None:
            token_ids = without_images(token_ids, vision_mask)
        return self.per_layer(token_ids, x)

    def all(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the results of `run` in the order of the row."""
        out, back = self.run(*args, **kwargs)
        return {name: self.move(x, back) for name, x in out.items()}


class DecoderBackbone(OptionalInputs, Backbone):
    """Embeddings, blocks and a norm, as a config describes them; the base of each family's own.

    A family's class names its config and its block, and may replace the layout and PEFT's names.
    The arguments are fields of the config, see `DecoderConfig`; each field is an attribute of the
    model too. `head_dim` is hidden_dim / num_query_heads by default, and `dtype` a policy, such as
    "bfloat16", by default Keras' global one.

    Attributes:
        layer_fields: fields of the config by whose names the model has layers.

    Call:
        {"token_ids": (B, T) int, "padding_mask": (B, T) int or bool} -> hidden states (B, T, D).
        Tokens with mask 0 are ignored, wherever they are in the row: no token attends to them,
        positions and windows do not count them, and their hidden states are meaningless.
        Without a mask, or for token ids (B, T) alone, all are there. For several texts in a row add
        "segment_ids" (B, T) int, tokens of one text sharing a number, and "positions" (B, T) int,
        from 0 in each text, which may be called "position_ids" too. Other names are left out with
        Keras' warning.

    Raises:
        InputError: for sizes that do not fit together, or names that the config lacks.
    """

    block_class: ClassVar[type[DecoderBlock]]
    layout: ClassVar[Mapping[str, layouts.Axes]] = sharding.DECODER
    peft_names = staticmethod(module_names.names)
    layer_fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name in getattr(getattr(cls, "config_class", None), "__dataclass_fields__", ()):
            if not hasattr(cls, name) and name not in cls.layer_fields:
                setattr(cls, name, config_field(name))

    @of_family
    def __init__(
        self,
        vocabulary_size: int,
        num_layers: int,
        num_query_heads: int,
        num_key_value_heads: int,
        hidden_dim: int,
        intermediate_dim: int,
        head_dim: int | None = None,
        dtype: DTypeLike = None,
        name: str | None = None,
        **variants: Any,
    ):
        config = self.make_config(
            vocabulary_size=vocabulary_size,
            num_layers=num_layers,
            num_query_heads=num_query_heads,
            num_key_value_heads=num_key_value_heads,
            hidden_dim=hidden_dim,
            intermediate_dim=intermediate_dim,
            head_dim=hidden_dim // (num_query_heads or 1) if head_dim is None else head_dim,
            **variants,
        )
        policy = keras.dtype_policies.get(dtype or keras.config.dtype_policy())

        # === Layers ===
        embedding = Embedding(
            config.vocabulary_size,
            config.hidden_dim,
            soft_cap=config.logit_soft_cap,
            scaled=config.scales_embeddings,
            tie_weights=config.tie_word_embeddings,
            name="token_embedding",
            dtype=policy,
        )
        blocks = [
            self.block_class(config.decoder, i, name=f"block_{i}", dtype=policy)
            for i in range(config.num_layers)
        ]
        final_norm = RMSNorm(
            config.layer_norm_epsilon, offset=config.norm_offset, name="final_norm", dtype=policy
        )
        per_layer = None
        if width := config.block(0).per_layer_dim:
            per_layer = PerLayerEmbedding(
                config.per_layer_vocabulary,
                config.num_layers,
                width,
                config.layer_norm_epsilon,
                config.norm_offset,
                name="per_layer_embedding",
                dtype=policy,
            )

        # === Graph ===
        inputs = {
            name: keras.Input((None,), dtype="int32", name=name, optional=name != "token_ids")
            for name in ("token_ids", "padding_mask")
        }
        order = TokensFirst(), Reordered(), None if config.is_causal else PaddingApart()
        looks = [config.looks_ahead(i) for i in range(config.num_layers)]
        steps = _Steps(embedding, per_layer, blocks, final_norm, *order, looks)
        beside, seen, parts = self.beside_text(config, policy)
        out = steps.all(**inputs, **seen)
        super().__init__(
            config=config,
            intermediates=out,
            inputs={**inputs, **beside},
            outputs=out["final_norm"],
            name=name,
        )

        # === Config ===
        self.token_embedding = embedding
        self.per_layer_embedding = per_layer
        self.blocks = blocks
        self.final_norm = final_norm
        self.dtype_policy = policy
        self._steps = steps
        for part, layer in parts.items():
            setattr(self, part, layer)

    def beside_text(
        self, config: DecoderConfig, policy: keras.DTypePolicy
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, keras.Layer]]:
        """Returns inputs other than text, their values after `seen`, and the layers for them."""
        return {}, {}, {}

    def seen(self, inputs: dict[str, Any], training: bool | None = False) -> dict[str, Any]:
        """Returns the inputs as the steps from token ids to hidden states take them."""
        return inputs

    def call(self, inputs: Tree, training: bool | None = None, mask: Tree = None) -> Any:
        """Returns hidden states (B, T, D), as the graph, and with positions and segments too."""
        seen = self.seen(as_tensors(self, inputs), training)
        out, back = self._steps.run(**seen, training=training)
        return self._steps.move(out["final_norm"], back)

    def intercepted(self, inputs: Tree, intercept: Callable[[Any, int], Any]) -> Any:
        """Returns hidden states (B, T, D), with `intercept(x, i)` between the blocks, or None.

        It gets the embeddings at i = -1 and the output of each block from i = 0, (B, T, D); its
        result replaces them.
        """
        inputs = self.seen(as_tensors(self, inputs))
        out, back = self._steps.run(**inputs, training=False, intercept=intercept)
        return self._steps.move(out["final_norm"], back)

    def intermediates(self, inputs: Tree) -> dict[str, Any]:
        """Embeddings, the output of every block and of the final norm."""
        return self._steps.all(**self.seen(as_tensors(self, inputs)), training=False)

    def compute_output_spec(self, inputs: Tree, *_: object, **__: object) -> keras.KerasTensor:
        """(B, T, D) in the compute dtype."""
        shape = (*complete(self, inputs)["token_ids"].shape, self.config.hidden_dim)
        return keras.KerasTensor(shape, dtype=self.dtype_policy.compute_dtype)

    def resize_token_embeddings(
        self, new_num_tokens: int, pad_to_multiple_of: int | None = None
    ) -> Embedding:
        """Gives the embedding table and the output layer more or fewer rows.

        Compiled functions, `.keras` files, presets and exports follow. An optimizer that has made
        steps starts over, with a warning.

        Args:
            new_num_tokens: rows of the new table. New ones are the mean of all old ones; those that
                go are the last.
            pad_to_multiple_of: rounds the number of rows up to a multiple of this.

        Returns:
            The layer with the table.

        Raises:
            InputError: for numbers that are not whole numbers above 0, or a model in parts.

        Source:
            The method of this name in Transformers, which draws new rows around that mean.
        """
        check_whole("new_num_tokens", new_num_tokens)
        if pad_to_multiple_of is not None:
            check_whole("pad_to_multiple_of", pad_to_multiple_of)
            new_num_tokens += -new_num_tokens % pad_to_multiple_of
        gather.check_whole(self, "resize_token_embeddings")
        self.token_embedding.resize(new_num_tokens)
        if self.per_layer_embedding is not None:
            self.per_layer_embedding.table.resize(new_num_tokens)
            self.per_layer_embedding.input_dim = new_num_tokens
        keras_internals.forget_parameters(self)
        before, after = self.config, self.config.resized(new_num_tokens)
        of_blocks, of_new_blocks = before.decoder, after.decoder
        for layer in keras_internals.sublayers(self):
            if getattr(layer, "config", None) in (before, of_blocks):
                layer.config = after if layer is self else of_new_blocks
        return self.token_embedding

    @property
    def transformer_layers(self) -> list[DecoderBlock]:
        """The blocks, by keras-hub's name."""
        return self.blocks

    @property
    def cache_shapes(self) -> list[tuple[int, int]]:
        """Heads and width of a token's key, and of its value, in each cache."""
        return [(b.block.num_key_value_heads, b.block.head_dim) for b in self._keepers]

    @property
    def cache_windows(self) -> list[int | None]:
        """The most tokens that blocks with each cache see, the new one included; None for all."""
        return [block.attention.window for block in self._keepers]

    @property
    def cache_numbers(self) -> list[int]:
        """Number of the cache of each block; those that share keys and values have one."""
        places = {block.index: number for number, block in enumerate(self._keepers)}
        sources = [(b.index, b.block.key_value_source) for b in self.blocks]
        return [places[index if source is None else source] for index, source in sources]

    @property
    def _keepers(self) -> list[DecoderBlock]:
        """The blocks with keys and values of their own."""
        return [block for block in self.blocks if block.block.key_value_source is None]

    def extend(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: list[Any],
        images: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Returns hidden states (B, T, D) of new tokens (B, T) behind those that the caches hold.

        Positions are (T,) or (B, T) int, or None for 0, 1, ... There is a cache for each block, see
        `DecoderBlock`; blocks that share keys and values have the same one. The images are those of
        the prompts, by the names of the inputs.
        """
        if not self.config.is_causal:
            raise InputError(
                "use_bidirectional_attention is True, so tokens see what follows them and no text "
                "is generated; load a causal checkpoint, or encode texts with a text embedder"
            )
        seen = {"token_ids": token_ids}
        if images is not None:
            seen = self.seen({**seen, **images})
        with direct_calls():
            x, block_ids = self._steps.embed(**seen)
            with keras_internals.autocast(self.dtype_policy):
                parts = self._steps.parts(token_ids, x, seen.get("vision_mask"))
                for number, (block, cache) in enumerate(zip(self.blocks, caches, strict=True)):
                    looks = self._steps.looks[number]
                    info = DecoderInfo(positions, block_ids=block_ids if looks else None)
                    more = {} if parts is None else {"per_layer": parts[number]}
                    x = block(x, info=info, cache=cache, **more)
                return self.final_norm(x)

    @classmethod
    def get_layout_map(
        cls,
        device_mesh: keras.distribution.DeviceMesh,
        model_parallel_dim_name: str = "model",
        data_parallel_dim_name: str = "batch",
    ) -> keras.distribution.LayoutMap:
        """Returns how the weights lie on a mesh, as keras-hub's method of this name."""
        inner = dict.fromkeys(("heads", "mlp", "experts", "vocab"), model_parallel_dim_name)
        return layouts.layout_map(
            device_mesh, cls.layout, {**inner, "embed": data_parallel_dim_name}
        )
