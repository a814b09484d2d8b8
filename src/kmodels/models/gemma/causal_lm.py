"""Text generation with Gemma, and its training without logits."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras

from kmodels import ops, presets
from kmodels.core import keras_internals
from kmodels.core.errors import InputError, check_whole
from kmodels.generation.settings import sampler_of
from kmodels.generation.task import Generates
from kmodels.layers import Embedding
from kmodels.layers import block_compile as compiling
from kmodels.models.gemma.exports import gguf
from kmodels.models.gemma.inputs import OptionalInputs
from kmodels.models.gemma.model import Gemma3Backbone, GemmaBackbone
from kmodels.models.gemma.preprocessor import (
    Gemma3CausalLMPreprocessor,
    GemmaCausalLMPreprocessor,
)
from kmodels.task import Task

ACCURACIES = ("accuracy", "acc", "sparse_categorical_accuracy")
REDUCTIONS = ("sum_over_batch_size", "sum", "mean_with_sample_weight")


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaCausalLM(
    keras_internals.OwnCompile, OptionalInputs, keras_internals.ClonedAs, Generates, Task
):
    """A Gemma that predicts the next token.

    Args:
        backbone: a `GemmaBackbone`.
        preprocessor: turns text into what the backbone takes, or None where the data comes as
            token ids.
        generation_config: the content of a checkpoint's generation_config.json, which is written
            again with the model. `compile(sampler="generation_config")` draws as it says.
        name: of the model.
        compile: with the defaults of `compile` when training begins without that call; False has
            Keras say that it is missing.

    Call:
        what the backbone takes -> logits (B, T, V), float32, soft-capped in Gemma 2.
    """

    backbone_class = GemmaBackbone
    preprocessor_class = GemmaCausalLMPreprocessor

    def __init__(
        self,
        backbone: GemmaBackbone,
        preprocessor: GemmaCausalLMPreprocessor | None = None,
        generation_config: Mapping[str, Any] | None = None,
        name: str | None = None,
        compile: bool = True,
        **kwargs: Any,
    ):
        _check_vocabulary(backbone.config.vocabulary_size, preprocessor)
        # === Graph ===
        inputs = backbone.input
        outputs = backbone.token_embedding(backbone(inputs), reverse=True)
        super().__init__(
            backbone=backbone,
            preprocessor=preprocessor,
            inputs=inputs,
            outputs=outputs,
            name=name,
            **kwargs,
        )

        # === Config ===
        self.head_dtype = backbone.dtype_policy
        self.generation_config = dict(generation_config or {})
        self.settings = {"generation_config": self.generation_config}
        self.head = Head()
        self.use_sampler("greedy")
        self._compiles_itself = compile

    def before_use(self) -> None:
        """Compiles with the defaults where nobody did; Keras asks it before it trains."""
        if not self.compiled and self._compiles_itself:
            # On an accelerator torch.compile takes the blocks only for who asks for it.
            self.compile(jit_compile="auto" if compiling.declines() else False)

    def use_sampler(self, sampler: Any, jit_compile: bool | str = "auto") -> None:
        """As in `Generates`; "generation_config" draws as the checkpoint's file of that name says.

        Args:
            sampler: also "generation_config".
            jit_compile: as there.

        Raises:
            InputError: for an unknown name, or what the file asks for and no `Sampler` does.
        """
        if isinstance(sampler, str) and sampler == "generation_config":
            sampler = sampler_of(self.generation_config)
        super().use_sampler(sampler, jit_compile)

    def compile(
        self,
        optimizer: Any = "auto",
        loss: Any = "auto",
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = "auto",
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: bool | str = "auto",
        auto_scale_loss: bool = True,
        *,
        sampler: Any = "greedy",
    ) -> None:
        """Keras' `compile`, with a loss that never holds logits where it can.

        That is the case for `SparseCategoricalCrossentropy(from_logits=True)`, the default, and for
        `SparseCategoricalAccuracy` as weighted metric; `fit` and `evaluate` then stop at the hidden
        states, and calling the model and `predict` still give logits. With other losses or metrics
        they work on the logits.

        Args:
            optimizer: Adam with rate 2e-5 by default.
            loss: cross-entropy of the next token by default.
            loss_weights: as in Keras.
            metrics: as in Keras.
            weighted_metrics: `[SparseCategoricalAccuracy()]` by default.
            run_eagerly: as in Keras.
            steps_per_execution: as in Keras.
            jit_compile: as in Keras; the token step of `generate` on torch follows it too, where
                "auto" means compiled on accelerators and eager on CPUs.
            auto_scale_loss: as in Keras.
            sampler: for `generate`: "greedy", "random", "top_k", "top_p", "beam", "contrastive", a
                `kmodels.generation.Sampler`, or "generation_config" for what the checkpoint's file
                of that name asks for.
        """
        if optimizer == "auto":
            optimizer = keras.optimizers.Adam(2e-5)
        if loss == "auto":
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if weighted_metrics == "auto":
            weighted_metrics = ["sparse_categorical_accuracy"]
        if isinstance(weighted_metrics, list | tuple):
            weighted_metrics = [_accuracy(metric) for metric in weighted_metrics]
        self.use_sampler(sampler, jit_compile)
        self.head.choose(loss, metrics, weighted_metrics)
        super().compile(
            optimizer=optimizer,
            loss=loss,
            loss_weights=loss_weights,
            metrics=metrics,
            weighted_metrics=weighted_metrics,
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            jit_compile=jit_compile,
            auto_scale_loss=auto_scale_loss,
        )

    def train_step(self, *args: Any) -> Any:
        """One step of `fit`."""
        with self.head.inside_step():
            return super().train_step(*args)

    def test_step(self, *args: Any) -> Any:
        """One step of `evaluate`."""
        with self.head.inside_step():
            return super().test_step(*args)

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Logits, or inside a step of `fit` or `evaluate` the hidden states."""
        hidden = self.backbone(inputs, training=training)
        return hidden if self.head.active else self.backbone.token_embedding(hidden, reverse=True)

    def clone_graph(self, inputs: Any, clone: Any, call: Any) -> Any:
        """The backbone's layers in one graph with the head: the table then stays one in all clones.

        As a layer and as part of a model it would become two.
        """
        hidden = keras_internals.through_graph(self.backbone, inputs, clone, call)
        return call(clone(self.backbone.token_embedding), hidden, reverse=True)

    def score(
        self,
        token_ids: Any,
        padding_mask: Any = None,
        scoring_mode: str = "logits",
        layer_intercept_fn: Any = None,
        target_ids: Any = None,
    ) -> Any:
        """Logits, or the loss of each token.

        Args:
            token_ids: (B, T) int.
            padding_mask: (B, T), or None for all tokens.
            scoring_mode: "logits" or "loss".
            layer_intercept_fn: called with (x, i) for the embeddings, which are scaled already, at
                i = -1 and for the output of each block from i = 0; what it returns, (B, T, D), goes
                on.
            target_ids: (B, T) int, the tokens that the loss is of.

        Returns:
            (B, T, V), or (B, T) for "loss".

        Raises:
            InputError: for another mode, or a loss without targets.
        """
        if scoring_mode not in ("logits", "loss"):
            raise InputError(f"scoring_mode is {scoring_mode!r}; give 'logits' or 'loss'")
        if scoring_mode == "loss" and target_ids is None:
            raise InputError("scoring_mode is 'loss'; give target_ids, the tokens to compare with")
        inputs = {"token_ids": token_ids, "padding_mask": padding_mask}
        hidden = self.backbone.intercepted(inputs, layer_intercept_fn)
        logits = self.backbone.token_embedding(hidden, reverse=True)
        if scoring_mode == "logits":
            return logits
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        return loss(target_ids, logits)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """The loss of hidden states; of logits where `compile` was given another loss.

        Raises:
            InputError: for a weight of each row, (B,), which Keras would take for one of each place
                in a row; `class_weight` makes such.
        """
        sample_weight = _by_token(sample_weight, y)
        if not self.head.active:
            return super().compute_loss(x, y, y_pred, sample_weight, training)
        table = self.backbone.token_embedding
        loss = self.head.loss(y_pred, table, y, sample_weight)
        for extra in keras_internals.additional_losses(self):
            loss = loss + keras.ops.cast(extra, loss.dtype)
        return loss

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """What `compute_loss` counted; the usual where it did not."""
        if not self.head.active:
            return super().compute_metrics(x, y, y_pred, sample_weight)
        keras_internals.build_metrics(self, y, y_pred)
        return self.get_metrics_result()

    def resize_token_embeddings(
        self, new_num_tokens: int, pad_to_multiple_of: int | None = None
    ) -> Embedding:
        """As `GemmaBackbone.resize_token_embeddings`; the logits have as many columns.

        Args:
            new_num_tokens: rows of the new table.
            pad_to_multiple_of: rounds the number of rows up to a multiple of this.

        Returns:
            The layer with the table.

        Raises:
            InputError: as there, or for fewer rows than the preprocessor's tokenizer has tokens.
        """
        check_whole("new_num_tokens", new_num_tokens)
        _check_vocabulary(new_num_tokens, self.preprocessor)
        table = self.backbone.resize_token_embeddings(new_num_tokens, pad_to_multiple_of)
        keras_internals.forget_parameters(self)
        return table

    def get_quantization_layer_structure(self, mode: str | None = None) -> dict[str, Any] | None:
        """The parts that a method which quantizes block by block walks through, as keras-hub's.

        `quantize` itself knows int8 and int4 alone, which need no such walk.

        Args:
            mode: "gptq" or "awq".

        Returns:
            {"pre_block_layers": a list with one model of token ids (B, T) to what the first block
            takes, "sequential_blocks": the blocks}; None for other modes.
        """
        if mode not in ("gptq", "awq"):
            return None
        token_ids = keras.Input((None,), dtype="int32")
        embedding = keras.Model(token_ids, self.backbone.token_embedding(token_ids))
        return {"pre_block_layers": [embedding], "sequential_blocks": self.backbone.blocks}

    def export_to_gguf(
        self, path: str | Path, dtype: str = "float16", text_only: bool = False
    ) -> Path:
        """Writes a GGUF file that llama.cpp runs, atomically, with the tokenizer if there is one.

        Args:
            path: ends in .gguf.
            dtype: how kernels and embeddings are stored: "float32", "bfloat16", "float16", or
                "q8_0" for 8 bits with a scale for every 32.
            text_only: writes the text part of a checkpoint whose other parts were left out.

        Raises:
            InputError: for a model with adapters, one that llama.cpp's Gemma cannot express, or
                without the gguf package.
        """
        presets.check_parts(self, text_only, "a GGUF file")
        return gguf.export_to_gguf(self, path, dtype)


def _check_vocabulary(rows: int, preprocessor: Any) -> None:
    """Raises where a tokenizer belongs to another model; ids beyond the table have no embedding.

    Tokens that were added later may go beyond it: Gemma 3 has one for pictures, of no use here.
    """
    core = getattr(getattr(preprocessor, "tokenizer", None), "core", None)
    if core is not None and (tokens := core.get_vocab_size(with_added_tokens=False)) > rows:
        raise InputError(
            f"the tokenizer has {tokens} tokens and the embedding table {rows} rows; give the "
            "tokenizer of this model, or the backbone as many rows by resize_token_embeddings"
        )


class Head:
    """The output layer during training: cross-entropy straight from hidden states.

    An object of its own, so that Keras does not track the metrics a second time.
    """

    def __init__(self) -> None:
        # Replicas on TensorFlow are threads, which enter and leave a step in turns.
        self._inside = 0
        self._chosen = False
        self._reduction = REDUCTIONS[0]
        self._metrics: Sequence[Any] = ()

    def choose(self, loss: Any, metrics: Any, weighted_metrics: Any) -> None:
        """Decides from the arguments of `compile` whether logits can be left out."""
        weighted = list(weighted_metrics or ())
        known = isinstance(loss, keras.losses.SparseCategoricalCrossentropy)
        settings = loss.get_config() if known else {}
        self._chosen = (
            settings.get("from_logits", False)
            and settings.get("ignore_class") is None
            and not settings.get("label_smoothing")
            and loss.reduction in REDUCTIONS
            and not metrics
            and all(type(m) is keras.metrics.SparseCategoricalAccuracy for m in weighted)
        )
        self._metrics = weighted if self._chosen else ()
        self._reduction = loss.reduction if self._chosen else REDUCTIONS[0]

    @contextmanager
    def inside_step(self) -> Iterator[None]:
        """Hidden states instead of logits inside the block, where that was chosen."""
        self._inside += self._chosen
        try:
            yield
        finally:
            self._inside -= self._chosen

    @property
    def active(self) -> bool:
        """Whether the model is inside a step that needs no logits."""
        return self._inside > 0

    def loss(self, hidden: Any, embedding: Any, labels: Any, weights: Any) -> Any:
        """The loss as Keras reduces it, a float32 scalar; the metrics count along.

        Args:
            hidden: (B, T, D).
            embedding: the layer with the table.
            labels: (B, T) int.
            weights: (B, T), or None for ones.
        """
        flat = keras.ops.reshape(hidden, (-1, hidden.shape[-1]))
        labels = keras.ops.reshape(labels, (-1,))
        if weights is None:
            weights = keras.ops.ones_like(labels, dtype="float32")
        weights = keras.ops.reshape(keras.ops.cast(weights, "float32"), (-1,))
        rows = embedding.rows
        instead = {} if rows is None else {"rows": rows.values, "row_ids": rows.places()}
        total, hits = embedding.with_table(
            ops.linear_cross_entropy,
            flat,
            embedding.embeddings,
            labels,
            weights,
            soft_cap=embedding.soft_cap,
            trainable_table=embedding.embeddings.trainable,
            **instead,
        )
        count = keras.ops.sum(weights)
        share = keras.ops.divide_no_nan(hits, count)
        for metric in self._metrics:
            # A mean of hits, whose sum is known already.
            keras.metrics.Mean.update_state(metric, share, sample_weight=count)
        if self._reduction == "sum":
            return total
        if self._reduction != "mean_with_sample_weight":
            count = keras.ops.cast(keras.ops.shape(weights)[0], total.dtype)
        return keras_internals.part_of_loss(keras.ops.divide_no_nan(total, count))


def _by_token(weights: Any, labels: Any) -> Any:
    """Weights of shape (B, T) from such, or from (B, 1); what is None stays so."""
    given, wanted = (tuple(getattr(each, "shape", ())) for each in (weights, labels))
    if len(wanted) != 2 or not given:
        return weights
    if len(given) == 1:
        raise InputError(
            f"sample_weight has the shape {given} beside targets of {wanted}; give one for each "
            "token, or for each row as (rows, 1), and no class_weight"
        )
    return weights * keras.ops.ones_like(labels, dtype=weights.dtype) if given[1] == 1 else weights


def _accuracy(metric: Any) -> Any:
    if metric in ACCURACIES:
        return keras.metrics.SparseCategoricalAccuracy(name=metric)
    return metric


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3CausalLM(GemmaCausalLM):
    """`GemmaCausalLM` over a `Gemma3Backbone`: keras-hub's name."""

    backbone_class = Gemma3Backbone
    preprocessor_class = Gemma3CausalLMPreprocessor
