"""A backbone that gives one vector for each text: of what is pooled, through dense layers."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import keras

from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import DTypeLike, Tree
from kmodels.layers import Dense
from kmodels.layers.layout_family import of_family
from kmodels.models.blocks.decoder import DecoderBackbone
from kmodels.models.blocks.embedder import sentence_transformers
from kmodels.models.blocks.embedder.encode import Encodes
from kmodels.models.blocks.embedder.pooling import (
    HUB_MODES,
    LAST,
    MEAN,
    MODES,
    TokenPooling,
    UnitLength,
)
from kmodels.models.blocks.embedder.preprocessor import EmbedderPreprocessor
from kmodels.models.blocks.hub_order import in_order
from kmodels.models.blocks.inputs import GRAPH, OptionalInputs, as_tensors
from kmodels.task import Compiled, Task
from kmodels.training.losses import ContrastiveLoss
from kmodels.weights import Rule

# See `Family.parts`.
PARTS = {"dense": ("dense_",)}
ACTIVATIONS = ("linear", "tanh")


class DecoderEmbedder(OptionalInputs, Encodes, Task):
    """A decoder that gives one vector for each text; the base of each family's own.

    Args:
        backbone: a `DecoderBackbone` of the family.
        preprocessor: turns texts into what the backbone takes, or None where the data comes as
            token ids.
        pooling: what stands for a text: the "mean" of its tokens, the first ("cls") or the last
            ("lasttoken").
        dense: layers behind that, each with "units", and if wanted "use_bias" and an "activation",
            which is "linear" or "tanh".
        normalize: divides each vector by its length.
        prompts: what `encode` puts in front of texts, by names such as "query" and "document".
        default_prompt_name: name of the prompt that `encode` uses where it is given none; None for
            no prompt.
        similarity_fn_name: what `similarity` computes: "cosine", "dot", "euclidean" or "manhattan".
        truncate_dim: numbers of each vector that `encode` keeps; None for all.
        head_dtype: policy of the dense layers; by default the dtype of the backbone's variables.
        name: name of the model.
        compile: with the defaults of `compile` when training begins without that call; False has
            Keras say that it is missing.
        pooling_mode: "last" or "mean", keras-hub's names; in place of `pooling`.

    Attributes:
        usual_pooling: `pooling` where neither is given.

    Call:
        what the backbone takes, token ids (B, T) -> (B, D), float32; for pairs (B, C, T) it gives
        (B, C, D), on which `ContrastiveLoss` works.

    Raises:
        InputError: for settings that are none of these.
    """

    # Vectors of several texts in a row have no place in what it gives.
    takes = GRAPH
    usual_pooling: ClassVar[str] = MEAN

    @of_family
    def __init__(
        self,
        backbone: DecoderBackbone,
        preprocessor: EmbedderPreprocessor | None = None,
        pooling: str | None = None,
        dense: Sequence[Mapping[str, Any]] = (),
        normalize: bool = True,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        similarity_fn_name: str = "cosine",
        truncate_dim: int | None = None,
        head_dtype: DTypeLike = None,
        name: str | None = None,
        compile: bool = True,
        pooling_mode: str | None = None,
        **kwargs: Any,
    ):
        pooling = self._pooling(pooling, pooling_mode)
        policy = keras.dtype_policies.get(head_dtype or backbone.variable_dtype)
        layers = [_checked(number, layer) for number, layer in enumerate(dense)]

        # === Graph ===
        inputs = backbone.input
        x = TokenPooling(pooling)(backbone(inputs), inputs["padding_mask"])
        for number, layer in enumerate(layers):
            settings = {"use_bias": layer["use_bias"], "name": f"dense_{number}", "dtype": policy}
            x = Dense(layer["units"], **settings)(x)
            if layer["activation"] == "tanh":
                x = keras.ops.tanh(x)
        x = keras.ops.cast(x, "float64" if policy.compute_dtype == "float64" else "float32")
        super().__init__(
            backbone=backbone,
            preprocessor=preprocessor,
            inputs=inputs,
            outputs=UnitLength()(x) if normalize else x,
            name=name,
            **kwargs,
        )

        # === Config ===
        # Pairs have an axis more than the graph's inputs, see `call`.
        self.input_spec = None
        self.head_dtype = policy
        self.compiles_itself = compile
        self.use_encoding(prompts, default_prompt_name, similarity_fn_name, truncate_dim)
        self.settings = {
            "pooling": pooling,
            "dense": layers,
            "normalize": normalize,
            **self.encoding_settings,
        }

    @classmethod
    def _pooling(cls, pooling: str | None, pooling_mode: str | None) -> str:
        if pooling_mode is None:
            return pooling or cls.usual_pooling
        if pooling_mode not in HUB_MODES:
            raise InputError(
                f"pooling_mode is {pooling_mode!r}; choose one of {', '.join(HUB_MODES)}, or give "
                f"pooling ({', '.join(MODES)})"
            )
        if pooling not in (None, HUB_MODES[pooling_mode]):
            raise InputError(
                f"pooling is {pooling!r} and pooling_mode {pooling_mode!r}; give one of the two"
            )
        return HUB_MODES[pooling_mode]

    @property
    def pooling_mode(self) -> str:
        """What stands for a text, by keras-hub's name where it has one."""
        mode: str = self.settings["pooling"]
        return {theirs: name for name, theirs in HUB_MODES.items()}.get(mode, mode)

    @property
    def normalize(self) -> bool:
        """True if each vector is divided by its length."""
        return self.settings["normalize"]

    def call(self, inputs: Tree, training: bool | None = None, mask: Tree = None) -> Any:
        """Returns the vectors of texts (B, T), or of the texts of pairs (B, C, T)."""
        inputs = as_tensors(self, inputs)
        ids = inputs["token_ids"]
        if len(ids.shape) < 3:
            return super().call(inputs, training=training, mask=mask)
        columns, length = ids.shape[1:]
        flat = {
            name: None if x is None else keras.ops.reshape(x, (-1, length))
            for name, x in inputs.items()
        }
        vectors = super().call(flat, training=training, mask=mask)
        return keras.ops.reshape(vectors, (-1, columns, vectors.shape[-1]))

    def compute_output_spec(self, inputs: Tree, *_: object, **__: object) -> keras.KerasTensor:
        """(B, D), or for pairs (B, C, D)."""
        ids: Any = inputs["token_ids"] if isinstance(inputs, Mapping) else inputs
        output = self.outputs[0]
        return keras.KerasTensor((*ids.shape[:-1], output.shape[-1]), dtype=output.dtype)

    @property
    def dense_layers(self) -> list[Dense]:
        """The layers behind the pooling."""
        return [self.get_layer(f"dense_{number}") for number in range(len(self.settings["dense"]))]

    def with_defaults(self, given: Compiled) -> Compiled:
        """Returns what is compiled, by default with the loss by which embedders learn from pairs.

        The optimizer is Adam with a learning rate of 2e-5, and the loss
        `kmodels.training.ContrastiveLoss()`.
        """
        return super().with_defaults(
            given.filled(optimizer=lambda: keras.optimizers.Adam(2e-5), loss=ContrastiveLoss)
        )

    def beside_transformer(self) -> tuple[dict[str, Any], list[Rule]]:
        """Returns what a directory of sentence-transformers holds beside the transformer."""
        return sentence_transformers.form_of(self)

    @property
    def gives_logits(self) -> bool:
        """Whether it gives logits: it never does."""
        return False


class HubEmbedder(DecoderEmbedder):
    """A `DecoderEmbedder` by keras-hub's name, which pools the last token where nothing is said.

    As in keras-hub, arguments without a name are backbone, preprocessor, `pooling_mode` and
    `normalize`.
    """

    usual_pooling = LAST
    __init__ = in_order("backbone", "preprocessor", "pooling_mode", "normalize")(
        DecoderEmbedder.__init__
    )


def _checked(number: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a dense layer, all of them."""
    layer = {"use_bias": True, "activation": "linear", **given}
    if strange := sorted(set(layer) - {"units", "use_bias", "activation"}):
        raise InputError(
            f"dense layer {number} has {', '.join(strange)}; give units, use_bias and activation"
        )
    check_whole(f"units of dense layer {number}", layer.get("units"))
    if layer["activation"] not in ACTIVATIONS:
        raise InputError(
            f"dense layer {number} has the activation {layer['activation']!r}; choose one of "
            f"{', '.join(ACTIVATIONS)}"
        )
    return layer
