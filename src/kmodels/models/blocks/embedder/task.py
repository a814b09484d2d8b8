"""Embedders: a backbone, pooling and dense layers, which give one vector per text."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np

from kmodels.core.errors import InputError, check_choice, check_whole
from kmodels.core.types import DTypeLike, Tensor, Tree
from kmodels.generation.request import pad_rows
from kmodels.layers import Dense
from kmodels.layers.placement import of_family
from kmodels.models.blocks.decoder import DecoderBackbone
from kmodels.models.blocks.embedder import sentence_transformers
from kmodels.models.blocks.embedder.preprocessor import TextEmbedderPreprocessor
from kmodels.models.blocks.embedder.sentence_transformers import FIRST, LAST, MEAN, MODES
from kmodels.models.blocks.hub_order import in_order
from kmodels.models.blocks.inputs import GRAPH, OptionalInputs, Reordered, as_tensors
from kmodels.ops._wide import wide
from kmodels.task import Compiled, Task, setting
from kmodels.training.losses import ContrastiveLoss
from kmodels.weights import Rule, gather

# keras-hub's names of modes of pooling.
HUB_MODES = {"last": LAST, "mean": MEAN}
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
# Prompts that `encode_document` looks for, in this order.
DOCUMENTS = ("document", "passage", "corpus")
# Rows are padded to few lengths, so that one compiled step serves many: multiples of a quarter of
# the next power of two, and at least this.
SHORTEST = 16


def _text(text: object) -> str:
    if not isinstance(text, str | bytes):
        raise InputError(f"encode got a {type(text).__name__} among the texts; give texts")
    return text if isinstance(text, str) else text.decode()


# See `Family.parts`.
PARTS = {"dense": ("dense_",)}
ACTIVATIONS = ("linear", "tanh")


@keras.saving.register_keras_serializable(package="kmodels")
class TokenPooling(keras.Operation):
    """The mean of the hidden states of all tokens, or those of the first or the last.

    Args:
        mode: "mean", "cls" for the first token, or "lasttoken".

    Call:
        hidden (B, T, D), mask (B, T) int, 0 for padding, or None -> (B, D), at least
        float32. A row without tokens gives zeros as its mean.

    Raises:
        InputError: for another mode.
    """

    def __init__(self, mode: str = MEAN):
        super().__init__()
        if mode not in MODES:
            raise InputError(f"pooling is {mode!r}; the model supports {', '.join(MODES)}")
        self.mode = mode

    def call(self, hidden: Tensor, mask: Tensor | None = None) -> Any:
        """(B, T, D), (B, T) -> (B, D)."""
        hidden = keras.ops.cast(hidden, wide(hidden))
        if mask is None:
            if self.mode == MEAN:
                return keras.ops.mean(hidden, axis=1)
            return hidden[:, 0] if self.mode == FIRST else hidden[:, -1]
        is_token = keras.ops.cast(mask, "bool")
        if self.mode == MEAN:
            weights = keras.ops.cast(is_token, hidden.dtype)
            total = keras.ops.einsum("bt,btd->bd", weights, hidden)
            return total / keras.ops.maximum(keras.ops.sum(weights, axis=1, keepdims=True), 1.0)
        count = keras.ops.cast(is_token, "int32")
        if self.mode == LAST:
            # The first place by which all tokens are counted is that of the last one.
            count = keras.ops.cumsum(count, axis=1)
        place = keras.ops.argmax(count, axis=1, keepdims=True)
        return Reordered()(hidden, keras.ops.cast(place, "int32"))[:, 0]

    def compute_output_spec(
        self, hidden: keras.KerasTensor, mask: keras.KerasTensor | None = None
    ) -> keras.KerasTensor:
        """Returns the shape and the dtype of the vectors."""
        return keras.KerasTensor((hidden.shape[0], hidden.shape[2]), dtype=wide(hidden))


@keras.saving.register_keras_serializable(package="kmodels")
class UnitLength(keras.Operation):
    """Divides vectors by their length; those of length 0 stay, and pass finite gradients.

    Call:
        x (..., D) -> (..., D).
    """

    def call(self, x: Tensor) -> Any:
        """(..., D) -> (..., D)."""
        square = keras.ops.sum(keras.ops.square(x), axis=-1, keepdims=True)
        # As in PyTorch's normalize, whose shortest length is 1e-12.
        return x * keras.ops.rsqrt(keras.ops.maximum(square, 1e-24))

    def compute_output_spec(self, x: keras.KerasTensor) -> keras.KerasTensor:
        """Returns the shape and the dtype of x."""
        return keras.KerasTensor(x.shape, dtype=x.dtype)


class TextEmbedder(OptionalInputs, Task):
    """A decoder that gives one vector for each text; the base of each family's own.

    Args:
        backbone: a `DecoderBackbone` of the family.
        preprocessor: turns texts into inputs of the backbone, or None if the data are token
            ids.
        pooling: vector of a text: the "mean" of its tokens, the first ("cls") or the last
            ("lasttoken").
        dense: layers behind that, each with "units", and if wanted "use_bias" and an "activation",
            which is "linear" or "tanh".
        normalize: divides each vector by its length.
        prompts: texts that `encode` puts before others, by names such as "query" and "document".
        default_prompt_name: name of the prompt that `encode` uses if none is given; None for no
            prompt.
        similarity_fn_name: measure of `similarity`: "cosine", "dot", "euclidean" or "manhattan".
        truncate_dim: numbers of each vector that `encode` keeps; None for all.
        head_dtype: policy of the dense layers; by default the dtype of the backbone's variables.
        name: name of the model.
        compile: with the defaults of `compile` when training begins without that call; False has
            Keras say that it is missing.
        pooling_mode: "last" or "mean", keras-hub's names; in place of `pooling`.

    Attributes:
        usual_pooling: `pooling` if neither is given.
        prompts: as given, like the attributes that follow; all four may be set later.
        default_prompt_name: name of the prompt if none is given, or None.
        similarity_fn_name: measure of `similarity`.
        truncate_dim: numbers of each vector that `encode` keeps, or None for all.

    Call:
        inputs of the backbone, token ids (B, T) -> (B, D), float32; for pairs (B, C, T) it is
        (B, C, D), the input of `ContrastiveLoss`.

    Raises:
        InputError: for settings that are none of these.
    """

    # The output has one vector for each row, so that a row cannot hold several texts.
    takes = GRAPH
    usual_pooling: ClassVar[str] = MEAN
    prompts = setting("prompts", "Texts in front of a text, by name.")
    default_prompt_name = setting("default_prompt_name", "Name of the usual prompt, or None.")
    similarity_fn_name = setting("similarity_fn_name", "Measure of `similarity`.")
    truncate_dim = setting("truncate_dim", "Numbers of a vector that `encode` keeps, or None.")

    @of_family
    def __init__(
        self,
        backbone: DecoderBackbone,
        preprocessor: TextEmbedderPreprocessor | None = None,
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
        self.settings = {
            "pooling": pooling,
            "dense": layers,
            "normalize": normalize,
            "prompts": dict(prompts or {}),
            "default_prompt_name": default_prompt_name,
            "similarity_fn_name": similarity_fn_name,
            "truncate_dim": truncate_dim,
        }
        self.check_settings(self.settings)

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raises `InputError` for an unknown measure or prompt, or too many numbers to keep."""
        check_choice("similarity_fn_name", settings["similarity_fn_name"], SIMILARITIES)
        if not isinstance(prompts := settings["prompts"], Mapping):
            raise InputError(f"prompts is {prompts!r}; give a dictionary of texts by name")
        _prompt(prompts, settings["default_prompt_name"], None)
        self._width(settings["truncate_dim"])

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
        """The pooling, by keras-hub's name if it has one."""
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

    def with_defaults(self, arguments: Compiled) -> Compiled:
        """Returns the compiled loss and metrics, by default `ContrastiveLoss` for pairs.

        The optimizer is Adam with a learning rate of 2e-5, and the loss
        `kmodels.training.ContrastiveLoss()`.
        """
        return super().with_defaults(
            arguments.filled(optimizer=lambda: keras.optimizers.Adam(2e-5), loss=ContrastiveLoss)
        )

    def beside_transformer(self) -> tuple[dict[str, Any], list[Rule]]:
        """Returns the files of a sentence-transformers directory besides the transformer's."""
        return sentence_transformers.form_of(self)

    @property
    def gives_logits(self) -> bool:
        """Whether it gives logits: it never does."""
        return False

    def encode(
        self,
        texts: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        truncate_dim: int | None = None,
        normalize_embeddings: bool = True,
        show_progress_bar: bool = False,
    ) -> np.ndarray:
        """Returns one vector for each text.

        Texts are cut to the preprocessor's `sequence_length`. They are computed in the order of
        their lengths, so that a batch needs little padding.

        Args:
            texts: a text, or a list or an array of texts.
            prompt_name: name of one of `prompts`, which stands in front of each text;
                `default_prompt_name` by default.
            prompt: the prompt itself.
            batch_size: largest number of texts computed at a time.
            truncate_dim: numbers of each vector to keep, the first ones; the model's `truncate_dim`
                by default.
            normalize_embeddings: divides the vectors by their length after they are cut, instead
                of returning the outputs of the model.
            show_progress_bar: prints one.

        Returns:
            float32, (N, D) in the order of the texts, or (D,) for a single text.

        Raises:
            InputError: for an unknown prompt, a width that the vectors do not have, values other
                than texts, or a model without a preprocessor.
        """
        check_whole("batch_size", batch_size)
        if self.preprocessor is None:
            raise InputError(
                "encode needs a preprocessor, and the model has none; attach one, or call the "
                "model on token ids"
            )
        gather.check_callable(self, "encode")
        width = self._width(self.truncate_dim if truncate_dim is None else truncate_dim)
        single = isinstance(texts, str | bytes)
        first = _prompt(self.prompts, prompt_name or self.default_prompt_name, prompt)
        strings = [_text(text) for text in ([texts] if single else texts)]
        rows = self.preprocessor.token_rows([first + text for text in strings])
        vectors = np.zeros((len(rows), width), "float32")
        order = np.argsort([-len(row) for row in rows], kind="stable")
        bar = keras.utils.Progbar(len(rows), unit_name="text") if show_progress_bar else None
        for start in range(0, len(rows), batch_size):
            places = order[start : start + batch_size]
            vectors[places] = self._vectors([rows[i] for i in places], batch_size)[:, :width]
            if bar is not None:
                bar.update(start + len(places))
        if normalize_embeddings:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors[0] if single else vectors

    def encode_text(self, text: str | Sequence[str], **kwargs: Any) -> np.ndarray:
        """Returns one vector for each text as the model gives it, with keras-hub's name.

        They are float32 (N, D), also for a single text. Further arguments are those of `predict`.
        """
        return self.predict([text] if isinstance(text, str) else text, **kwargs)

    def encode_query(self, texts: str | Sequence[str], **settings: Any) -> np.ndarray:
        """Returns the vectors of queries: `encode` with the prompt "query", if there is one.

        Further arguments are those of `encode`.
        """
        return self._encode_as(("query",), texts, settings)

    def encode_document(self, texts: str | Sequence[str], **settings: Any) -> np.ndarray:
        """Returns the vectors of documents: `encode` with the first of their prompts there is.

        They are called "document", "passage" and "corpus". Further arguments are those of `encode`.
        """
        return self._encode_as(DOCUMENTS, texts, settings)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> np.ndarray:
        """Returns how alike vectors are, each of the first with each of the second.

        Args:
            embeddings1: (N, D), or (D,) for one.
            embeddings2: (M, D), or (D,).

        Returns:
            float32 (N, M): cosines, dot products or negative distances, as `similarity_fn_name`
                says.
        """
        a, b = (np.atleast_2d(np.asarray(x, "float32")) for x in (embeddings1, embeddings2))
        if self.similarity_fn_name == "cosine":
            a, b = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (a, b))
        if self.similarity_fn_name in ("cosine", "dot"):
            return a @ b.T
        order = 2 if self.similarity_fn_name == "euclidean" else 1
        return np.stack([-np.linalg.norm(x - b, ord=order, axis=1) for x in a])

    def _encode_as(
        self, names: Sequence[str], texts: str | Sequence[str], settings: dict[str, Any]
    ) -> np.ndarray:
        if settings.get("prompt") is None and settings.get("prompt_name") is None:
            # As in sentence-transformers, the default prompt is for `encode` alone.
            name = next((name for name in names if name in self.prompts), None)
            settings = {**settings, **({"prompt_name": name} if name else {"prompt": ""})}
        return self.encode(texts, **settings)

    def _vectors(self, rows: list[list[int]], batch_size: int) -> np.ndarray:
        """Returns the vectors of rows of token ids, longest first, (N, D)."""
        count = min(batch_size, 1 << (len(rows) - 1).bit_length())
        longest = max(map(len, rows))
        step = max(SHORTEST, 1 << max((longest - 1).bit_length() - 2, 0))
        length = min(-(-longest // step) * step, self.preprocessor.sequence_length)
        filled = [*rows, *[rows[-1]] * (count - len(rows))]
        x = pad_rows(filled, length, self.preprocessor.tokenizer.pad_token_id)
        return np.asarray(self.predict_on_batch(x), "float32")[: len(rows)]

    def _width(self, wanted: int | None) -> int:
        width = self.outputs[0].shape[-1]
        if wanted is None:
            return width
        check_whole("truncate_dim", wanted)
        if wanted > width:
            raise InputError(f"truncate_dim is {wanted}; the vectors have {width} numbers")
        return wanted


class HubEmbedder(TextEmbedder):
    """A `TextEmbedder` by keras-hub's name, which pools the last token by default.

    As in keras-hub, arguments without a name are backbone, preprocessor, `pooling_mode` and
    `normalize`.
    """

    usual_pooling = LAST
    __init__ = in_order("backbone", "preprocessor", "pooling_mode", "normalize")(
        TextEmbedder.__init__
    )


def _prompt(prompts: Mapping[str, str], name: str | None, prompt: str | None) -> str:
    if prompt is not None or name is None:
        return prompt or ""
    if name not in prompts:
        known = ", ".join(prompts) or "none"
        raise InputError(f"there is no prompt {name!r}; the model's are {known}")
    return prompts[name]


def _checked(number: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a dense layer, all of them."""
    layer = {"use_bias": True, "activation": "linear", **settings}
    if strange := sorted(set(layer) - {"units", "use_bias", "activation"}):
        raise InputError(
            f"dense layer {number} has {', '.join(strange)}; give units, use_bias and activation"
        )
    check_whole(f"units of dense layer {number}", layer.get("units"))
    check_choice(f"activation of dense layer {number}", layer["activation"], ACTIVATIONS)
    return layer
