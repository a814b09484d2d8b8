"""The methods that every model has, whatever its family."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import keras
import numpy as np

from kmodels.core import dispatch, remote, runtime
from kmodels.core.arguments import Checked
from kmodels.core.errors import InputError, check_names, same_shape
from kmodels.core.files import local_path
from kmodels.core.keras_internals import (
    ClonedAs,
    average_by_update,
    forget_metrics,
    make_functional,
    weighted_metrics,
)
from kmodels.core.types import DTypeLike, LossLike, MetricsLike, OptimizerLike, Tree
from kmodels.distribution.layout import Axes, register
from kmodels.distribution.rank_zero import without_distribution
from kmodels.layers import block_compile as compiling
from kmodels.layers import changes
from kmodels.layers.direct_calls import CalledDirectly
from kmodels.lora.methods import Adapters
from kmodels.registry import Named
from kmodels.training.loop import Loop, Predicts, TaskStep, follow_variables, like
from kmodels.training.losses import PairLoss, warn_of_logits
from kmodels.training.optax import as_optimizer, is_optax
from kmodels.training.sparse_labels import check_classes, mask_ignored
from kmodels.weights import gather
from kmodels.weights.engine import warn_of_average

runtime.native.trim_after_compiling()


# Keras' formats: what `kmodels convert` calls each, and the backends that can write it there.
EXPORTS = {
    "tf_saved_model": ("savedmodel", ("jax", "tensorflow")),
    "onnx": ("onnx", ("torch", "tensorflow")),
    "openvino": ("openvino", ("torch", "tensorflow")),
    "litert": ("litert", ("tensorflow",)),
    "torch": ("torch-export", ("torch",)),
}


def _check_arguments(cls: type, left: Mapping[str, Any]) -> None:
    """Raises `InputError` for arguments that Keras' functional models would ignore.

    Args:
        cls: class of the model.
        left: arguments that no constructor of kmodels uses.
    """
    if left.keys() >= {"inputs", "outputs"}:
        own = [name for name in _parameters(cls) if name not in left]
        check_names(cls.__name__, left.keys() - {"inputs", "outputs"}, [*own, "name", "trainable"])


def _parameters(cls: type) -> list[str]:
    parameters = inspect.signature(cls.__init__).parameters.values()
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.kind not in starred and one.name != "self"]


def setting(name: str, doc: str) -> Any:
    """Returns a property of a task for one of its `settings` that may change; files hold it."""

    def set_value(task: Any, value: object) -> None:
        changed = {**task.settings, name: value}
        task.check_settings(changed)
        task.settings = changed

    return property(lambda task: task.settings[name], set_value, doc=doc)


# Attributes of a task from which its graph is made, besides its settings.
_PARTS = ("backbone", "head_dtype")


def _check_fixed(model: Any, values: Mapping[str, Any], name: str, value: object) -> None:
    """Raises `InputError` for a new value of a setting that a model reads only when it is made.

    Args:
        model: a backbone or task.
        values: values of its settings.
        name: name of an attribute.
        value: its new value.
    """
    if name not in values or getattr(getattr(type(model), name, None), "fset", None) is not None:
        return
    # A layer is the part of the model that a setting of its name describes.
    if (name in _PARTS or not isinstance(value, keras.Layer)) and values[name] != value:
        where = "its constructor" if name == "backbone" else "from_preset"
        raise InputError(
            f"{name} of a {type(model).__name__} is fixed when the model is made; give {name} to "
            f"{where}, or make another model"
        )


class Presets(Checked, keras.Model if TYPE_CHECKING else object):
    """Making a model from a name or a file, and writing it to one.

    Attributes:
        presets: the registered names, each with the fields of its architecture.
    """

    presets: ClassVar[Named] = Named()

    @classmethod
    def from_preset(
        cls,
        preset: str | Path,
        dtype: DTypeLike = None,
        load_weights: bool = True,
        quantized: bool | None = None,
        **overrides: Any,
    ) -> Self:
        """Makes the model that a name or a directory describes.

        Called on `CausalLM`, `ImageClassifier`, `TextEmbedder`, `Task` or `Backbone`, it makes one
        of the class that fits.

        Args:
            preset: a registered name (an architecture with new weights), a directory written by
                `save_to_preset`, a checkpoint file or directory of another package, one of these at
                an address such as "gs://bucket/model", or an explicit "hf://" or "kaggle://" name.
                The network is used for the last three alone.
            dtype: policy, such as "mixed_bfloat16"; Keras' global one by default.
            load_weights: False gives the same architecture with random initial weights. Tensors are
                opened for their names and shapes; a directory without any is as its config.json
                says.
            quantized: True keeps linear kernels that are quantized in the file as they are: 4 bits
                of bitsandbytes, GPTQ and AWQ, and the types Q8_0, Q4_0, Q4_K and Q6_K of GGUF
                files. False makes floats of them. None keeps all but those of GGUF files.
            **overrides: fields of the config and arguments of the task to change.

        Raises:
            InputError: for an unknown name, or a file that does not fit; lists every mismatch, and
                loads nothing then.
        """
        from kmodels import presets

        cls = presets.class_below(cls, preset)
        return presets.load(cls, preset, dtype, load_weights, quantized, **overrides)

    def save_to_preset(self, directory: str | Path, card: bool | Mapping[str, Any] = False) -> Path:
        """Writes config and weights, atomically, to a directory that `from_preset` reads.

        Args:
            directory: to make or replace; local, or an address such as "gs://bucket/model".
            card: also writes README.md, a model card that the Hugging Face Hub reads, with an
                example that runs. True, or facts for it: `license`, `base_model`, `datasets`,
                `metrics` (names, or values by name), `language`, `tags` and `description`.

        Returns:
            The directory.

        Raises:
            InputError: if it has other files, or cannot be written, or for an unknown fact; its
                content then stays.
        """
        from kmodels import presets

        return presets.save(self, directory, card)

    def export(
        self,
        filepath: str | Path,
        format: str = "tf_saved_model",
        verbose: bool | None = None,
        input_signature: Tree = None,
        **kwargs: Any,
    ) -> None:
        """Keras' `export`; `kmodels convert` supports more formats, and compares its files.

        Args:
            filepath: as in Keras, like the other arguments.
            format: as in Keras.
            verbose: as in Keras.
            input_signature: as in Keras.
            **kwargs: as in Keras.

        Raises:
            InputError: if Keras or its exporter does not support the model; names another format.
        """
        warn_of_average(self)
        # TensorFlow, on any device, runs a SavedModel; an override may be for this device alone.
        portable = dispatch.generic_only() if format == "tf_saved_model" else nullcontext()
        try:
            with portable:
                super().export(filepath, format, verbose, input_signature, **kwargs)
        except Exception as error:  # each exporter has its own
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            name, able = EXPORTS.get(format, ("", ()))
            advice = f"`kmodels convert --to {name}` writes it from {' and '.join(able)}"
            raise InputError(
                f"Keras could not export {format} from {keras.backend.backend()} ({reason}); "
                f"{advice if able else f'give one of {chr(44).join(EXPORTS)}'}"
            ) from error

    def export_to_transformers(self, directory: str | Path, text_only: bool = False) -> Path:
        """Writes a directory that Hugging Face transformers loads with equal logits.

        Args:
            directory: to make or replace; local, or an address such as "gs://bucket/model".
            text_only: writes the text part of a checkpoint whose other parts, such as a vision
                tower, were left out when it was read; without it such a model is refused.
        """
        from kmodels import presets

        return presets.export_to_transformers(self, directory, text_only)


class Backbone(CalledDirectly, Presets, Adapters, Predicts, keras.Model):
    """A model without a head, described by a frozen config.

    Attributes:
        config: the family's dataclass.
        family: the name of the family.
        layout: meaning of each dimension of its variables, see `kmodels.distribution.layout`.
        peft_names: gives the names that a model's layers have in transformers, see
            `kmodels.lora.modules`.
        left_out: parts of the checkpoint that the model was read from and does not have.
        own_parts: prefixes of variables that in this family a task has, and in this class it.
    """

    config_class: ClassVar[type]
    family: ClassVar[str]
    layout: ClassVar[Mapping[str, Axes]]
    peft_names: ClassVar[Callable[[Any], Sequence[Mapping[str, str]]]] = staticmethod(lambda _: ())
    left_out: Sequence[str] = ()
    own_parts: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, config: Any, intermediates: dict[str, Any], **kwargs: Any):
        _check_arguments(type(self), kwargs)
        make_functional(Backbone)
        super().__init__(**kwargs)
        self.config = config
        self._named = dict(intermediates)
        self._inspector: keras.Model | None = None

    def __setattr__(self, name: str, value: object) -> None:
        """Keras' own; refuses other values for fields of the config."""
        if "_named" in vars(self) and name in self.config_class.__dataclass_fields__:
            _check_fixed(self, vars(self.config), name, value)
        super().__setattr__(name, value)

    def check_data(self, x: Any) -> None:
        """Raises `InputError` for arrays of inputs that the model cannot use.

        Args:
            x: one input, or a dictionary.
        """
        if isinstance(x, Mapping) and (check := getattr(self, "check_inputs", None)) is not None:
            check(x)
        else:
            self.check_token_ids(x)

    def check_token_ids(self, x: Any) -> None:
        """Raises `InputError` for arrays of token ids that have no row in the embedding table.

        JAX would compute NaN, count negative ids from the end, and say nothing.

        Args:
            x: inputs of the model: token ids alone, or a dictionary with "token_ids".
        """
        ids = x.get("token_ids") if isinstance(x, Mapping) else x
        if not isinstance(ids, np.ndarray) or not ids.size or ids.dtype.kind not in "iuf":
            return
        config = getattr(self.config, "text_encoder", self.config)
        read = config.get if isinstance(config, Mapping) else partial(getattr, config)
        if (rows := read("vocabulary_size", None)) is None:
            return
        if ids.dtype.kind == "f" and not (whole := ids == np.floor(ids)).all():
            raise InputError(f"token_ids has {ids[~whole].flat[0]}; give whole numbers")
        if ids.min() >= 0 and ids.max() < rows:
            return
        # Images take the place of this token, which then needs no row.
        ids = ids[ids != read("image_token_id", None)]
        ends = (ids.min(), ids.max()) if ids.size else ()
        if wrong := [int(i) for i in ends if i < 0 or i >= rows]:
            raise InputError(
                f"token_ids has {wrong[-1]}; the embedding table has rows 0 to {rows - 1}: use the "
                "model's own tokenizer, or a model with that token"
            )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "family" in vars(cls):
            register(cls.layout, family=cls.family)

    @classmethod
    def fits_preset(cls, name: str, fields: Mapping[str, Any]) -> bool:
        """Returns True if a preset of the family with these fields is of this class."""
        return True

    @classmethod
    def make_config(cls, **fields: Any) -> Any:
        """Returns the config of these fields; unknown names raise."""
        check_names(cls.__name__, fields, list(cls.config_class.__dataclass_fields__))
        return cls.config_class(**fields)

    @classmethod
    def class_of(cls, config: Any) -> type[Self]:
        """Returns the class of a model of this config, if a family has several."""
        return cls

    def intermediates(self, inputs: Tree) -> dict[str, Any]:
        """Returns every named intermediate of one forward pass, in the order of computation."""
        inspector = self._inspector
        if inspector is None:
            inspector = self._inspector = keras.Model(self.input, self._named)
        values = inspector(inputs, training=False)
        return {name: values[name] for name in self._named}

    def get_config(self) -> dict[str, Any]:
        """Returns the config's fields, policy and name, and later changes of the model."""
        return {
            **self.config.to_dict(),
            "dtype": keras.dtype_policies.serialize(self.dtype_policy),
            "name": self.name,
            **({"left_out": list(self.left_out)} if self.left_out else {}),
            **changes.describe(self),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Self:
        """Returns the model of `get_config`."""
        config = dict(config)
        if isinstance(config.get("dtype"), dict):
            config["dtype"] = keras.dtype_policies.deserialize(config["dtype"])
        left_out = config.pop("left_out", ())
        changed = {key: config.pop(key) for key in changes.KEYS if key in config}
        model = cls(**config)
        model.left_out = left_out
        changes.restore(model, changed)
        return model


class Compiled(NamedTuple):
    """What a task is trained with: four arguments of `compile`.

    Attributes:
        optimizer: name, config or object, as in Keras.
        loss: as in Keras.
        metrics: as in Keras.
        weighted_metrics: as in Keras.
    """

    optimizer: OptimizerLike
    loss: LossLike
    metrics: MetricsLike
    weighted_metrics: MetricsLike

    def filled(
        self,
        optimizer: Callable[[], Any] | None = None,
        loss: Callable[[], Any] | None = None,
        metrics: Callable[[], Any] | None = None,
        weighted_metrics: Callable[[], Any] | None = None,
    ) -> Self:
        """Returns a copy with the results of these functions for arguments that are "auto"."""
        makers = {
            "optimizer": optimizer,
            "loss": loss,
            "metrics": metrics,
            "weighted_metrics": weighted_metrics,
        }
        filled = {k: make() for k, make in makers.items() if make and is_auto(getattr(self, k))}
        return self._replace(**filled)


def is_auto(value: Any) -> bool:
    """Returns True for the text "auto"."""
    return isinstance(value, str) and value == "auto"


class Task(ClonedAs, CalledDirectly, Presets, Adapters, Loop, TaskStep, keras.Model):
    """A backbone with a head, trained by `fit`.

    Attributes:
        backbone: the model without its head.
        preprocessor: applied by `fit`, `evaluate` and `predict` to their data; None if the data
            are preprocessed. Calling the task skips it.
        compiles_itself: whether `fit` and `evaluate` compile a task that is not, with its defaults.
    """

    backbone_class: ClassVar[type[Backbone]]
    preprocessor_class: ClassVar[type]
    compiles_itself = False
    settings: dict[str, Any]

    def __init__(self, *, backbone: Backbone, preprocessor: Callable[..., Any], **kwargs: Any):
        _check_arguments(type(self), kwargs)
        make_functional(Task)
        super().__init__(**kwargs)
        # The head's policy is its own; Keras scales the loss by this one, and tells it to others.
        self.dtype_policy = backbone.dtype_policy
        self.backbone = backbone
        self.preprocessor = preprocessor

    def __setattr__(self, name: str, value: object) -> None:
        """Keras' own; a preprocessor is not a layer of the graph, and most settings are fixed."""
        values = vars(self).get("settings", {})
        if name in _PARTS and hasattr(self, name):
            values = {name: getattr(self, name)}
        _check_fixed(self, values, name, value)
        if name == "preprocessor":
            if value is not None and (isinstance(value, type) or not callable(value)):
                given = value.__name__ if isinstance(value, type) else repr(value)
                usual = self.preprocessor_class.__name__
                raise InputError(f"preprocessor is {given}; give one such as {usual}(), or None")
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

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
    ) -> None:
        """Keras' `compile`, with the defaults of the task for arguments that are "auto".

        Args:
            optimizer: as in Keras, or an optimizer of optax on JAX, see
                `kmodels.training.OptaxOptimizer`; "auto", here and below, as `with_defaults` of the
                class says.
            loss: as in Keras.
            loss_weights: for models with several outputs.
            metrics: metrics of outputs and labels.
            weighted_metrics: the same with sample weights.
            run_eagerly: compiles nothing.
            steps_per_execution: batches in one call of the compiled step; 1 on torch.
            jit_compile: on torch True has `torch.compile` take each block, False never, and "auto"
                does so if that is faster, see `kmodels.layers.block_compile`. On JAX and TensorFlow
                as in Keras: whether XLA compiles the step; "auto" is True on JAX and, if there is
                an accelerator, on TensorFlow.
            auto_scale_loss: wraps the optimizer under "mixed_float16", as in Keras.

        Raises:
            InputError: on torch, if compiled blocks cannot work; for a loss or a metric that the
                task cannot have.
        """
        arguments = self.with_defaults(Compiled(optimizer, loss, metrics, weighted_metrics))
        if self.gives_logits:
            warn_of_logits(self, arguments.loss)
        # The value that Keras makes of "auto" holds for one backend alone, and a file may go to
        # another.
        options = {"jit_compile": jit_compile, "auto_scale_loss": auto_scale_loss}
        # Around Keras' __setattr__, which would watch it for layers.
        object.__setattr__(self, "_as_given", options)
        forget_metrics(self)
        super().compile(
            **arguments._replace(optimizer=as_optimizer(arguments.optimizer))._asdict(),
            loss_weights=loss_weights,
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            jit_compile=compiling.choose(self, jit_compile, run_eagerly),
            auto_scale_loss=auto_scale_loss,
        )
        if self.optimizer is not None:
            average_by_update(self.optimizer)

    def with_defaults(self, arguments: Compiled) -> Compiled:
        """Returns the arguments to compile: by default Keras' defaults, RMSprop and no loss.

        Args:
            arguments: arguments of `compile`.

        Raises:
            InputError: for arguments that the task cannot be trained with.
        """
        arguments = arguments.filled(optimizer=lambda: "rmsprop", loss=lambda: None)
        return arguments.filled(metrics=lambda: None, weighted_metrics=lambda: None)

    def before_use(self) -> None:
        """Compiles with the defaults before `fit` or `evaluate`, see `compiles_itself`."""
        if not self.compiled and self.compiles_itself:
            # On an accelerator torch.compile takes the blocks only if the user asks for it.
            self.compile(jit_compile="auto" if compiling.declines() else False)

    @property
    def gives_logits(self) -> bool:
        """True if nothing comes between the head and the outputs."""
        activation = keras.activations.get(self.settings.get("activation"))
        return activation is keras.activations.linear

    def compile_by_default(self) -> None:
        """Compiles a model that was just made, in families whose tasks have defaults for it."""

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raises `InputError` for values that `setting` properties cannot have."""

    def get_compile_config(self) -> dict[str, Any]:
        """Returns the arguments of `compile` for a `.keras` file, and if the optimizer is built.

        They are left out, with a warning, if the optimizer is one of optax.
        """
        if is_optax(getattr(self, "optimizer", None)):
            warnings.warn(
                "the file has no optimizer, loss and metrics, since it cannot hold functions of "
                "optax; call compile after loading it, or use kmodels.callbacks.Checkpoint to "
                "continue the run",
                stacklevel=2,
            )
            return {}
        config = super().get_compile_config()
        if not config:
            return config
        config = {**config, **self._as_given}
        if self.optimizer is None:
            return config
        # Keras removes the optimizer from these arguments once it has written a .h5 file.
        settings = config.get("optimizer", self.optimizer)
        if not isinstance(settings, dict):
            settings = keras.optimizers.serialize(keras.optimizers.get(settings))
        # Keras ignores "built", also if `clone_model` gives the arguments to a plain model.
        return {**config, "optimizer": {**settings, "built": self.optimizer.built}}

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Calls `compile` with the result of `get_compile_config`, and makes its slots."""
        config = dict(config)
        optimizer = config.get("optimizer")
        slots = not isinstance(optimizer, dict) or optimizer.get("built", True)
        self.compile(**keras.saving.deserialize_keras_object(config))
        if slots and self.built and self.optimizer is not None:
            self.optimizer.build(self.trainable_variables)

    def make_train_function(self, force: bool = False) -> Any:
        """Returns Keras' step, with an optimizer for the variables that are trained now."""
        if self.optimizer is not None and self.built:
            # Keras would make the slots while it traces TensorFlow's first step: a condition in the
            # graph for each of them, and the whole step traced again without.
            follow_variables(self.optimizer, self.trainable_variables)
        return super().make_train_function(force)

    @like(keras.Model.save)
    def save(self, filepath: str | Path, **kwargs: Any) -> None:
        """Saves as Keras does; of several processes that hold all weights one may call it alone.

        A `.keras` file may also go to an address such as "gs://bucket/model.keras".
        """
        gather.check_whole(self, "save")
        self._save(super().save, filepath, kwargs)

    @like(keras.Model.save_weights)
    def save_weights(self, filepath: str | Path, **kwargs: Any) -> None:
        """Saves the weights as Keras does; one process may call it alone, see `save`."""
        gather.check_whole(self, "save_weights")
        self._save(super().save_weights, filepath, kwargs)

    def _save(self, save: Callable[..., None], path: str | Path, kwargs: dict[str, Any]) -> None:
        with without_distribution():
            if not remote.is_remote(path):
                save(local_path(path), **kwargs)
                return
            several = kwargs.get("max_shard_size") or str(path).endswith(".json")
            if several or not kwargs.get("overwrite", True):
                raise InputError(
                    f"{path} is an address, where one file is made or replaced; leave "
                    "max_shard_size and overwrite out, or use save_to_preset"
                )
            remote.write_file(path, lambda file: save(file, **kwargs))

    def get_config(self) -> dict[str, Any]:
        """Returns the serialised backbone, the head's settings, and its later changes."""
        return {
            "backbone": keras.saving.serialize_keras_object(self.backbone),
            "preprocessor": _serialized(self.preprocessor),
            **self._head_policy(),
            "name": self.name,
            **self.settings,
            **changes.describe(self, without=self.backbone),
        }

    def compute_loss(
        self,
        x: Tree = None,
        y: Tree = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns Keras' loss; its mean of `has_sparse_labels` is over the labels that count.

        Raises:
            InputError: if there are no labels to compare with.
        """
        self._check_labelled(y)
        if self.has_sparse_labels and y is not None:
            y, sample_weight, counted = mask_ignored(y, y_pred, sample_weight)
            if self.loss.reduction == "sum_over_batch_size":
                # Keras divides by the number of all labels.
                share = keras.ops.mean(keras.ops.cast(counted, sample_weight.dtype))
                sample_weight = keras.ops.divide_no_nan(sample_weight, share)
        return super().compute_loss(x, y, y_pred, sample_weight, training)

    def compute_metrics(self, x: Tree, y: Tree, y_pred: Any, sample_weight: Any = None) -> Any:
        """Updates the metrics; those that are weighted do not count ignored labels.

        Raises:
            InputError: as `compute_loss`, which Keras calls later when it builds both.
        """
        self._check_labelled(y)
        if self.has_sparse_labels and y is not None and weighted_metrics(self):
            sample_weight = mask_ignored(y, y_pred, sample_weight)[1]
        return super().compute_metrics(x, y, y_pred, sample_weight)

    @property
    def number_of_labels(self) -> int:
        """The number of classes; 0 for a task whose labels are not classes."""
        return 0

    @property
    def has_sparse_labels(self) -> bool:
        """True if labels are whole numbers for cross-entropy, of which -100 is ignored.

        Transformers ignores the same. An `ignore_class` of the loss is then the only one.
        """
        sparse = isinstance(self.loss, keras.losses.SparseCategoricalCrossentropy)
        given = sparse and getattr(self.loss, "ignore_class", None) is not None
        return sparse and not given and self.number_of_labels > 0

    def check_labels(self, y: Any) -> None:
        """Raises `InputError` for arrays of labels, or lists of numbers, that no class has."""
        if isinstance(y, list | tuple) and y and isinstance(y[0], int):
            y = np.asarray(y)
        if self.has_sparse_labels and isinstance(y, np.ndarray) and y.dtype.kind in "iuf":
            check_classes(y, self.number_of_labels)

    def _check_labelled(self, y: Tree) -> None:
        if y is None and self.loss is not None and not isinstance(self.loss, PairLoss):
            raise InputError("the loss needs labels, and there are none; give y, or batches (x, y)")

    def check_data(self, x: Any) -> None:
        """Raises `InputError` for token ids or shapes of arrays that the model does not have.

        Keras checks shapes in the first call, and inside a step that TensorFlow has traced for
        several shapes it has none to check.

        Args:
            x: inputs of the model.
        """
        self.backbone.check_data(x)
        inputs = getattr(self, "inputs", None) or ()
        if len(inputs) != 1 or not isinstance(x, np.ndarray) or self.preprocessor is not None:
            return
        wanted = tuple(inputs[0].shape)
        if x.ndim == len(wanted) and not same_shape(x.shape[1:], wanted[1:]):
            raise InputError(
                f"the inputs have shape {x.shape} and the model takes {wanted}; give that shape, "
                "or the model a preprocessor"
            )

    def _head_policy(self) -> dict[str, Any]:
        """Returns the policy of the head if the task has one."""
        if not any("head_dtype" in _parameters(kind) for kind in type(self).__mro__):
            return {}
        return {"head_dtype": keras.dtype_policies.serialize(self.head_dtype)}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Self:
        """Returns the task of `get_config`."""
        config = dict(config)
        if "backbone" not in config:
            raise InputError(
                f"{cls.__name__}.from_config got {', '.join(config) or 'nothing'} and no backbone; "
                "give what get_config returns"
            )
        config["backbone"] = keras.saving.deserialize_keras_object(config["backbone"])
        if isinstance(settings := config.get("preprocessor"), dict):
            # Files written before preprocessors were layers hold the arguments alone.
            config["preprocessor"] = (
                keras.saving.deserialize_keras_object(settings)
                if "class_name" in settings
                else cls.preprocessor_class(**settings)
            )
        if isinstance(config.get("head_dtype"), dict):
            config["head_dtype"] = keras.dtype_policies.deserialize(config["head_dtype"])
        changed = {key: config.pop(key) for key in changes.KEYS if key in config}
        task = cls(**config)
        changes.restore(task, changed, without=task.backbone)
        return task


def _serialized(preprocessor: Any) -> Any:
    if isinstance(preprocessor, keras.Layer) or not hasattr(preprocessor, "to_dict"):
        return keras.saving.serialize_keras_object(preprocessor)
    return preprocessor.to_dict()
