"""A decoder with its output layer: text generation, and training without logits."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import keras

from kmodels import ops, presets
from kmodels.core import keras_internals, runtime
from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import LossLike, MetricsLike, OptimizerLike, Tensor, Tree
from kmodels.generation.generation_config import sampler_of
from kmodels.generation.request import as_numpy
from kmodels.generation.sampler import Sampler
from kmodels.generation.task import Generates
from kmodels.layers import Embedding
from kmodels.models.blocks.decoder import DecoderBackbone
from kmodels.models.blocks.gguf.adapters import write_adapter
from kmodels.models.blocks.gguf.writing import GGUFExport
from kmodels.models.blocks.inputs import OptionalInputs
from kmodels.models.blocks.preprocessor import CausalLMPreprocessor
from kmodels.ops.linear_cross_entropy import IGNORED, without_ignored
from kmodels.overrides import meshes
from kmodels.task import Compiled, Task, setting
from kmodels.training.losses import InsideStep
from kmodels.training.normalization import (
    BatchWeight,
    TokenWeights,
    batch_weight,
    check_normalization,
    mean_loss,
    normalized,
    weighed,
)
from kmodels.training.optimizers import weigh_batches
from kmodels.training.sparse_labels import check_classes, mask_ignored
from kmodels.training.step_loss import LossTracker


class CausalLM(OptionalInputs, Generates, Task):
    """A decoder that predicts the next token; the base of each family's own.

    Args:
        backbone: a `DecoderBackbone` of the family.
        preprocessor: turns text into inputs of the backbone, or None if the data are token
            ids.
        generation_config: the content of a checkpoint's generation_config.json, which is written
            again with the model. `compile(sampler="generation_config")` draws as it says.
        name: name of the model.
        compile: with the defaults of `compile` when training begins without that call; False has
            Keras say that it is missing.

    Attributes:
        gguf_export: writes the family's models as GGUF files.
        loss_normalization: argument of the last `compile`.

    Call:
        inputs of the backbone -> logits (B, T, V), float32, with the soft cap of the config.
    """

    gguf_export: ClassVar[GGUFExport]
    generation_config = setting(
        "generation_config", "Content of a generation_config.json; files of the model hold it."
    )
    loss_normalization = "tokens"

    def __init__(
        self,
        backbone: DecoderBackbone,
        preprocessor: CausalLMPreprocessor | None = None,
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
        self.settings = {"generation_config": dict(generation_config or {})}
        self.head = Head()
        self.use_sampler("greedy")
        self.compiles_itself = compile

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raises `InputError` for a `generation_config` that is not a dictionary."""
        if not isinstance(generation := settings["generation_config"], Mapping):
            raise InputError(
                f"generation_config is {generation!r}; give the content of a generation_config.json"
            )

    def use_sampler(
        self, sampler: str | Mapping[str, Any] | Sampler, jit_compile: bool | str = "auto"
    ) -> None:
        """See `Generates.use_sampler`; "generation_config" draws as the checkpoint's file says.

        Raises:
            InputError: for an unknown name, or a setting of the file that no `Sampler` supports.
        """
        if isinstance(sampler, str) and sampler == "generation_config":
            sampler = sampler_of(self.generation_config)
        super().use_sampler(sampler, jit_compile)

    def compile(
        self,
        optimizer: OptimizerLike = "auto",
        loss: LossLike = "auto",
        loss_weights: MetricsLike = None,
        metrics: MetricsLike = "auto",
        weighted_metrics: MetricsLike = "auto",
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: bool | str = "auto",
        auto_scale_loss: bool = True,
        *,
        sampler: str | Mapping[str, Any] | Sampler = "greedy",
        loss_normalization: str = "tokens",
    ) -> None:
        """Same as `Task.compile`, with a loss that avoids storing logits if it can.

        `jit_compile` is also for the step of `generate` on torch: "auto" means compiled on
        accelerators and eager on CPUs. An optimizer of Keras with `gradient_accumulation_steps`
        supports only the normalization "positions".

        `sampler` is for `generate`: "greedy", "random", "top_k", "top_p", "beam", "contrastive", a
        `kmodels.generation.Sampler`, or "generation_config" for the settings of the checkpoint's
        generation_config.json.

        `loss_normalization` is the divisor of a `SparseCategoricalCrossentropy` that is a mean.
        "tokens": the sum of the weighted losses of an update by the sum of the weights, over all
        its batches and all devices, as transformers' Trainer does. "examples": the mean over the
        rows of an update of each row's mean over its learnt tokens; a packed row counts once.
        "positions": the mean over all positions with a label other than -100, whatever they weigh,
        then over the batches of an update, as Keras does. An update without a learnt token has a
        gradient of zero. Another loss keeps its own reduction.

        Raises:
            InputError: for an unknown normalization or sampler, and an optimizer that does not
                support it; see `Task.compile` too.
        """
        check_normalization(loss_normalization)
        self.loss_normalization = loss_normalization
        super().compile(
            optimizer,
            loss,
            loss_weights,
            metrics,
            weighted_metrics,
            run_eagerly,
            steps_per_execution,
            jit_compile,
            auto_scale_loss,
        )
        self.normalize_loss(loss_normalization)
        self.use_sampler(sampler, jit_compile)

    def normalize_loss(self, loss_normalization: str) -> None:
        """Changes the `loss_normalization` of a compiled model, see `compile`.

        Raises:
            InputError: for an optimizer that does not support it.
        """
        self.loss_normalization = loss_normalization
        divisor = self.divisor
        weigh_batches(self.optimizer, divisor is not None)
        tracker = LossTracker(keeps_last=False, perplexity=divisor == "tokens")
        keras_internals.set_loss_tracker(self, tracker)
        # Functions that were traced before divide the loss as before.
        self.train_function = self.test_function = None

    @property
    def divisor(self) -> str | None:
        """The normalization if the loss is divided by a weight, else None: "tokens", "examples"."""
        applies = self.has_sparse_labels and self.loss.reduction == REDUCTIONS[0]
        return self.loss_normalization if applies and self.loss_normalization in DIVISORS else None

    def get_compile_config(self) -> dict[str, Any]:
        """See `Task.get_compile_config`; the loss has the normalization too."""
        config = super().get_compile_config()
        if config and self.has_sparse_labels:
            # Keras ignores it, also if `clone_model` gives the arguments to a plain model.
            config["loss"] = {**config["loss"], "normalization": self.loss_normalization}
        return config

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """See `Task.compile_from_config`; files from before this setting have "positions"."""
        loss = config.get("loss")
        name = loss.get("normalization", "positions") if isinstance(loss, Mapping) else "tokens"
        super().compile_from_config({**config, "loss_normalization": name})

    def with_defaults(self, arguments: Compiled) -> Compiled:
        """Returns the compiled loss and metrics, by default for the next token.

        The optimizer is Adam with a learning rate of 2e-5, the loss cross-entropy, and the weighted
        metric `SparseCategoricalAccuracy`. With that loss, from logits, and that metric `fit` and
        `evaluate` stop at the hidden states; calling the model and `predict` still give logits, and
        so do other losses and metrics need them. Labels of -100 count neither in the sum nor in the
        mean of a `SparseCategoricalCrossentropy` without an `ignore_class`, as in transformers. Its
        reduction "mean_with_sample_weight" is that of `loss_normalization="tokens"`.
        """
        arguments = super().with_defaults(
            arguments.filled(
                optimizer=lambda: keras.optimizers.Adam(2e-5),
                loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                weighted_metrics=lambda: ["sparse_categorical_accuracy"],
            )
        )
        loss: Any = arguments.loss
        if (
            self.loss_normalization in DIVISORS
            and isinstance(loss, keras.losses.SparseCategoricalCrossentropy)
            and loss.get_config().get("ignore_class") is None
            and loss.reduction in ("mean", "mean_with_sample_weight")
        ):
            settings = {**loss.get_config(), "reduction": REDUCTIONS[0]}
            arguments = arguments._replace(loss=type(loss).from_config(settings))
        if isinstance(arguments.weighted_metrics, list | tuple):
            named = keras.metrics.SparseCategoricalAccuracy
            weighted = [
                named(name=metric) if metric in ACCURACIES else metric
                for metric in arguments.weighted_metrics
            ]
            arguments = arguments._replace(weighted_metrics=weighted)
        self.head.choose(arguments.loss, arguments.metrics, arguments.weighted_metrics)
        return arguments

    def train_step(self, *args: Any) -> Any:
        """Runs one step of `fit`."""
        with self.head.inside_step(), self._weighed(args[-1]):
            return super().train_step(*args)

    def test_step(self, *args: Any) -> Any:
        """Runs one step of `evaluate`."""
        with self.head.inside_step(), self._weighed(args[-1]):
            return super().test_step(*args)

    def _weighed(self, batch: Tree) -> AbstractContextManager:
        """Returns a block with the weight of a batch on all devices."""
        _, labels, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        if self.divisor is None or labels is None:
            return weighed(None)
        weights, weight = self._weights_of(labels, sample_weight)
        # A subclass that overrides the loss may change labels and weights, also in place.
        overridden = type(self).compute_loss is not CausalLM.compute_loss
        tokens = None if overridden else TokenWeights(labels, sample_weight, weights, weight)
        total, shards = self.over_devices(weight)
        return weighed(BatchWeight(total, shards, tokens))

    def _weights_of(self, labels: Any, sample_weight: Any) -> tuple[Any, Any]:
        """Returns the weights of tokens, (B, T), and that of the batch, None if nothing needs it.

        The step has computed them if both arguments are those of its batch.
        """
        step = batch_weight()
        if step is not None and step.tokens is not None:
            known = step.tokens
            if known.labels is labels and known.sample_weight is sample_weight:
                return known.weights, known.weight
        weights = token_weights(labels, by_token(sample_weight, labels))
        return (weights, None) if self.divisor is None else normalized(self.divisor, weights)

    def call(self, inputs: Tree, training: bool | None = None, mask: Tree = None) -> Any:
        """Returns logits, or inside a step of `fit` or `evaluate` the hidden states."""
        hidden = self.backbone(inputs, training=training)
        return hidden if self.head.active else self.backbone.token_embedding(hidden, reverse=True)

    def clone_graph(self, inputs: Tree, clone: Callable[..., Any], call: Callable[..., Any]) -> Any:
        """Returns backbone and head as one graph, so that the table stays one in all clones.

        It would become two, as a layer and as part of a model.
        """
        hidden = keras_internals.through_graph(self.backbone, inputs, clone, call)
        return call(clone(self.backbone.token_embedding), hidden, reverse=True)

    def score(
        self,
        token_ids: Tree,
        padding_mask: Tree = None,
        scoring_mode: str = "logits",
        layer_intercept_fn: Callable[[Any, int], Any] | None = None,
        target_ids: Tree = None,
    ) -> Any:
        """Returns logits, or the loss of each token.

        Args:
            token_ids: (B, T) int.
            padding_mask: (B, T), or None for all tokens.
            scoring_mode: "logits" or "loss".
            layer_intercept_fn: called with (x, i) for the scaled embeddings at i = -1 and for the
                output of each block from i = 0; its result, (B, T, D), replaces x.
            target_ids: (B, T) int, the tokens that the loss is of; the loss of -100 is 0.

        Returns:
            (B, T, V), or (B, T) for "loss".

        Raises:
            InputError: for another mode, a loss without targets, or token ids or targets beyond
                the table.
        """
        if scoring_mode not in ("logits", "loss"):
            raise InputError(f"scoring_mode is {scoring_mode!r}; give 'logits' or 'loss'")
        if scoring_mode == "loss" and target_ids is None:
            raise InputError("scoring_mode is 'loss'; give target_ids, the tokens to compare with")
        if not runtime.native.tracing():
            self.backbone.check_token_ids(as_numpy(token_ids))
            if scoring_mode == "loss":
                check_classes(as_numpy(target_ids), self.number_of_labels)
        inputs = {"token_ids": token_ids, "padding_mask": padding_mask}
        hidden = self.backbone.intercepted(inputs, layer_intercept_fn)
        if scoring_mode == "logits":
            return self.backbone.token_embedding(hidden, reverse=True)
        return -self._log_probs(hidden, keras.ops.convert_to_tensor(target_ids), None)

    def log_probs(
        self,
        x: Tree,
        y: Any,
        sample_weight: Any = None,
        training: bool = False,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_hits: bool = False,
    ) -> Any:
        """Returns the log-probability of each label, without storing logits if it can.

        For losses of a `kmodels.training.TrainStep`, of which it is a part like any call of the
        model.

        Args:
            x: inputs of the model.
            y: (B, T) int, the tokens whose log-probabilities are asked for; those of -100 are 0.
            sample_weight: (B, T), multiplies the results; at a weight of 0 nothing plays a part,
                and nothing is computed on CPUs. None for ones.
            training: whether dropout drops.
            temperature: divides the logits.
            with_entropy: returns the entropies too, in nats.
            with_hits: returns 1 for each label with the highest logit too, else 0.

        Returns:
            (B, T), float32, or a tuple of the log-probabilities, the entropies and the hits, if
            these are wanted. All but the hits have gradients.
        """
        hidden, labels = self.backbone(x, training=training), keras.ops.convert_to_tensor(y)
        settings = {
            "temperature": temperature,
            "with_entropy": with_entropy,
            "with_hits": with_hits,
        }
        return self._log_probs(hidden, labels, sample_weight, training, **settings)

    def divergence(
        self,
        teacher: "CausalLM",
        x: Tree,
        sample_weight: Any = None,
        training: bool = False,
        kind: str = "forward_kl",
        beta: float | None = None,
        temperature: float = 1.0,
    ) -> Any:
        """Returns how far each prediction is from a teacher's, without storing logits.

        For distillation in a `kmodels.training.TrainStep`, of which it is a part like any call of
        the model.

        Args:
            teacher: another model with the same vocabulary. It gets no gradient.
            x: inputs of both models.
            sample_weight: (B, T), multiplies the results; at a weight of 0 nothing plays a part.
                None for ones.
            training: whether this model's dropout drops; the teacher's does not.
            kind: "forward_kl", "reverse_kl" or "jsd", as in `kmodels.ops.linear_divergence`.
            beta: of "jsd"; None for 0.5.
            temperature: divides the logits of both.

        Returns:
            (B, T), float32, in nats.

        Raises:
            InputError: for another vocabulary, or arguments that the op refuses.
        """
        sizes = [each.backbone.vocabulary_size for each in (self, teacher)]
        if sizes[0] != sizes[1]:
            raise InputError(
                f"the student has {sizes[0]} tokens and the teacher {sizes[1]}; distillation needs "
                "one vocabulary"
            )
        hidden = self.backbone(x, training=training)
        taught = keras.ops.stop_gradient(teacher.backbone(x, training=False))
        shape = keras.ops.shape(hidden)[:2]
        weights = keras.ops.ones(shape) if sample_weight is None else sample_weight
        weights = meshes.merged(keras.ops.cast(weights, "float32"))
        own, theirs = self.backbone.token_embedding, teacher.backbone.token_embedding

        def of_tables() -> Any:
            return own.with_table(
                _over_table,
                ops.linear_divergence,
                meshes.merged(hidden),
                *_taught(theirs, meshes.merged(taught)),
                weights,
                embedding=own,
                training=training,
                kind=kind,
                beta=beta,
                temperature=temperature,
                teacher_soft_cap=theirs.soft_cap,
            )

        return meshes.unmerged(theirs.with_table(of_tables), *shape)

    def _log_probs(
        self, hidden: Tensor, labels: Tensor, weights: Any, training: bool = False, **settings: Any
    ) -> Any:
        table, shape = self.backbone.token_embedding, keras.ops.shape(labels)
        weights = meshes.merged(token_weights(labels, weights))
        results = table.with_table(
            _over_table,
            ops.linear_log_probs,
            *(meshes.merged(hidden), meshes.merged(labels), weights),
            embedding=table,
            training=training,
            **settings,
        )
        return keras.tree.map_structure(lambda each: meshes.unmerged(each, *shape), results)

    def compute_loss(
        self,
        x: Tree = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Tensor | None = None,
        training: bool = True,
    ) -> Any:
        """Returns the loss of hidden states, or of logits if `compile` got another loss.

        Raises:
            InputError: for a weight of each row, (B,), which Keras would take for one of each place
                in a row; `class_weight` makes such.
        """
        self._check_labelled(y)
        if not self.head.active:
            sample_weight, divisor = by_token(sample_weight, y), self.divisor
            if divisor is not None and y is not None:
                y, weights, _ = mask_ignored(y, y_pred, sample_weight)
                weights, weight = normalized(divisor, weights)
                # Keras divides by the number of positions.
                count = keras.ops.cast(keras.ops.size(weights), "float32")
                sample_weight = weights * mean_loss(count, weight)
            return super().compute_loss(x, y, y_pred, sample_weight, training)
        table = self.backbone.token_embedding
        weights, weight = self._weights_of(y, sample_weight)
        loss = self.head.loss(y_pred, table, y, weights, weight, training)
        return keras_internals.with_additional_losses(self, loss)

    def compute_metrics(
        self, x: Tree, y: Any, y_pred: Any, sample_weight: Tensor | None = None
    ) -> Any:
        """Returns the metrics that `compute_loss` updated, else Keras' usual ones."""
        if not self.head.active:
            if self.divisor == "examples" and y is not None:
                weights = token_weights(y, by_token(sample_weight, y))
                sample_weight = normalized("examples", weights)[0]
            return super().compute_metrics(x, y, y_pred, sample_weight)
        keras_internals.build_metrics(self, y, y_pred)
        return self.get_metrics_result()

    @property
    def number_of_labels(self) -> int:
        """The rows of the output table."""
        return self.backbone.token_embedding.input_dim

    def resize_token_embeddings(
        self, new_num_tokens: int, pad_to_multiple_of: int | None = None
    ) -> Embedding:
        """Resizes the table as the backbone's method does; the logits have as many columns.

        Raises:
            InputError: as there, or for fewer rows than the preprocessor's tokenizer has tokens.
        """
        check_whole("new_num_tokens", new_num_tokens)
        _check_vocabulary(new_num_tokens, self.preprocessor)
        table = self.backbone.resize_token_embeddings(new_num_tokens, pad_to_multiple_of)
        keras_internals.forget_parameters(self)
        return table

    def get_quantization_layer_structure(self, mode: str | None = None) -> dict[str, Any] | None:
        """Returns the layers that quantization block by block walks through, as keras-hub's.

        `quantize` itself supports only int8 and int4, which need no such walk.

        Args:
            mode: "gptq" or "awq".

        Returns:
            {"pre_block_layers": a list with one model of token ids (B, T) to inputs of the first
            block, "sequential_blocks": the blocks}; None for other modes, and for a model whose
            blocks take more than hidden states.
        """
        blocks = [block.block for block in self.backbone.blocks]
        more = any(block.per_layer_dim or block.shares_key_value for block in blocks)
        if mode not in ("gptq", "awq") or more:
            return None
        token_ids = keras.Input((None,), dtype="int32")
        embedding = keras.Model(token_ids, self.backbone.token_embedding(token_ids))
        return {"pre_block_layers": [embedding], "sequential_blocks": self.backbone.blocks}

    def export_to_gguf(
        self,
        path: str | Path,
        dtype: str = "float16",
        text_only: bool = False,
        mmproj: str | Path | None = None,
        imatrix: str | Path | None = None,
    ) -> Path:
        """Writes a GGUF file that llama.cpp runs, atomically, with the tokenizer if there is one.

        The file of a model with images is that of its text; its vision encoder is another file.

        Args:
            path: ends in .gguf.
            dtype: how kernels and embeddings are stored: "float32", "bfloat16", "float16", "q8_0"
                for 8 bits with a scale for every 32, or one of llama.cpp's mixtures "q6_k",
                "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s" and "q4_0" ("q5_k" and "q4_k" are those with
                _m). A vision encoder beside a mixture is float16.
            text_only: writes the text part of a checkpoint whose other parts were left out, or of a
                model with images.
            mmproj: path for the vision encoder, which llama.cpp takes as `--mmproj`. `from_preset`
                reads it if it is in the same folder and its name begins with mmproj.
            imatrix: path of an importance matrix that llama-imatrix wrote of the model, by which a
                mixture weighs errors.

        Raises:
            InputError: for a model with adapters, one that llama.cpp's model of this name cannot
                express, weights that are not finite or too large for the dtype, or without the gguf
                package; for a model with images without either of `text_only` and `mmproj`, and
                `mmproj` for another model; for an importance matrix that is
                damaged, of another model, or that the dtype does not use.
        """
        presets.check_parts(self, text_only, "a GGUF file", splits=True)
        self.check_mmproj(path, dtype, text_only, mmproj)
        written = self.gguf_export.write(self, path, dtype, imatrix)
        if mmproj is not None:
            self.write_mmproj(mmproj, dtype)
        return written

    def export_adapter_to_gguf(self, path: str | Path, dtype: str = "float32") -> Path:
        """Writes the LoRA adapters to a GGUF file, atomically, which llama.cpp takes as `--lora`.

        It fits the file that `export_to_gguf` writes of the base, in any dtype.

        Args:
            path: ends in .gguf.
            dtype: dtype of the two matrices, "float32" or "float16".

        Raises:
            InputError: for a model without adapters, for what llama.cpp's adapters lack (DoRA,
                trained rows, modules and biases, adapters of embedding tables or images), for a
                base that a GGUF file cannot store, or without the gguf package.
        """
        return write_adapter(self.gguf_export, self, path, dtype)

    def check_mmproj(
        self, path: str | Path, dtype: str, text_only: bool, mmproj: str | Path | None
    ) -> None:
        """Raises `InputError` for a vision encoder that `export_to_gguf` would refuse to write."""
        if mmproj is not None:
            raise InputError(f"{type(self).__name__} has no vision encoder; leave mmproj out")

    def write_mmproj(self, path: str | Path, dtype: str) -> Path:
        """Writes the vision encoder of a model that has one beside a text of `dtype`."""
        raise NotImplementedError


def _check_vocabulary(rows: int, preprocessor: CausalLMPreprocessor | None) -> None:
    """Raises `InputError` if a tokenizer has ids beyond the embedding table.

    Tokens that were added later may go beyond it: Gemma 3 has one for images, of no use here.
    """
    core = getattr(getattr(preprocessor, "tokenizer", None), "core", None)
    if core is not None and (tokens := core.get_vocab_size(with_added_tokens=False)) > rows:
        raise InputError(
            f"the tokenizer has {tokens} tokens and the embedding table {rows} rows; give the "
            "tokenizer of this model, or the backbone as many rows by resize_token_embeddings"
        )


ACCURACIES = ("accuracy", "acc", "sparse_categorical_accuracy")
REDUCTIONS = ("sum_over_batch_size", "sum", "mean_with_sample_weight")
# The normalizations by the sum of the weights of an update.
DIVISORS = ("tokens", "examples")


class Head(InsideStep):
    """The output layer during training: cross-entropy straight from hidden states.

    A separate object, so that Keras does not track the metrics twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reduction = REDUCTIONS[0]
        self._metrics: Sequence[Any] = ()

    def choose(self, loss: Any, metrics: MetricsLike, weighted_metrics: MetricsLike) -> None:
        """Decides from the arguments of `compile` whether logits can be left out."""
        weighted = list(weighted_metrics or ())
        known = isinstance(loss, keras.losses.SparseCategoricalCrossentropy)
        settings = loss.get_config() if known else {}
        self.chosen = (
            settings.get("from_logits", False)
            and settings.get("ignore_class") is None
            and not settings.get("label_smoothing")
            and loss.reduction in REDUCTIONS
            and not metrics
            and all(type(m) is keras.metrics.SparseCategoricalAccuracy for m in weighted)
        )
        self._metrics = weighted if self.chosen else ()
        self._reduction = loss.reduction if self.chosen else REDUCTIONS[0]

    def loss(
        self,
        hidden: Tensor,
        embedding: Embedding,
        labels: Tensor,
        weights: Tensor,
        weight: Any,
        training: bool = True,
    ) -> Any:
        """Returns the loss of a batch, a float32 scalar; the metrics count along.

        Hidden states are (B, T, D), labels (B, T) int, weights (B, T) float32, 0 for labels of
        -100. The loss is divided by `weight`, the sum of the weights; None for the loss as Keras
        reduces it.
        """
        weights = meshes.merged(weights)
        flat, labels = meshes.merged(hidden), meshes.merged(labels)
        total, hits = embedding.with_table(
            _over_table,
            *(ops.linear_cross_entropy, flat, labels, weights),
            embedding=embedding,
            training=training,
        )
        count = keras.ops.sum(weights) if weight is None else weight
        share = keras.ops.divide_no_nan(hits, count)
        for metric in self._metrics:
            # A mean of hits, whose sum is known already.
            keras.metrics.Mean.update_state(metric, share, sample_weight=count)
        if weight is not None:
            return keras_internals.part_of_loss(mean_loss(total, weight))
        if self._reduction == "sum":
            return total
        if self._reduction != "mean_with_sample_weight":
            counted = keras.ops.not_equal(keras.ops.cast(labels, "int32"), IGNORED)
            count = keras.ops.cast(keras.ops.sum(keras.ops.cast(counted, "int32")), total.dtype)
        return keras_internals.part_of_loss(keras.ops.divide_no_nan(total, count))


def _over_table(
    op: Callable[..., Any],
    hidden: Tensor,
    *others: Tensor,
    embedding: Embedding,
    training: bool,
    **settings: Any,
) -> Any:
    """Returns `op(hidden, table, *others)` of an embedding's table, such as the cross-entropy."""
    rows = embedding.rows if embedding.tie_weights else None
    instead = {} if rows is None else {"rows": rows.values, "row_ids": rows.places()}
    hidden, table, is_trained = embedding.output_product(hidden, training)
    return op(
        *(hidden, table, *others),
        soft_cap=embedding.soft_cap,
        trainable_table=is_trained,
        **instead,
        **settings,
    )


def _taught(embedding: Embedding, hidden: Tensor) -> tuple[Any, Any]:
    """Returns hidden states and a table whose product are a teacher's logits, uncapped."""
    hidden, table, _ = embedding.output_product(hidden, training=False)
    rows = embedding.rows if embedding.tie_weights else None
    if rows is not None:
        places = keras.ops.expand_dims(rows.places(), 1)
        table = keras.ops.scatter_update(table, places, keras.ops.cast(rows.values, table.dtype))
    return hidden, table


def by_token(weights: Any, labels: Tensor) -> Any:
    """Returns weights (B, T) from weights (B, T) or (B, 1), and None for None."""
    shape, wanted = (tuple(getattr(each, "shape", ())) for each in (weights, labels))
    if len(wanted) != 2 or not shape:
        return weights
    if len(shape) == 1:
        raise InputError(
            f"sample_weight has the shape {shape} beside targets of {wanted}; give one for each "
            "token, or for each row as (rows, 1), and no class_weight"
        )
    return weights * keras.ops.ones_like(labels, dtype=weights.dtype) if shape[1] == 1 else weights


def token_weights(labels: Any, weights: Any) -> Any:
    """Returns float32 weights (B, T), 0 for labels of -100, from labels (B, T) or (B, T, 1)."""
    labels = keras.ops.convert_to_tensor(labels)
    if len(labels.shape) == 3:
        labels = keras.ops.squeeze(labels, -1)
    if weights is None:
        weights = keras.ops.ones_like(labels, dtype="float32")
    return without_ignored(labels, keras.ops.cast(weights, "float32"))
