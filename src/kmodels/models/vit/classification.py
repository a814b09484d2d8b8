"""Base of image classifiers: the head, defaults of `compile`, class names, a new head."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import keras
import numpy as np

from kmodels.core import keras_internals
from kmodels.core.errors import InputError, check_choice, check_whole, pluralize
from kmodels.core.types import ActivationLike, Data, DTypeLike, Tensor, Tree
from kmodels.data.images.decoding import is_picture
from kmodels.layers import Dense, Dropout, LayerNorm
from kmodels.layers import block_compile as compiling
from kmodels.layers.placement import of_family
from kmodels.models.blocks.class_names import NamedClasses, best, check_class_names
from kmodels.models.blocks.preprocessing import Preprocessor
from kmodels.models.vit.layers import Pooling
from kmodels.task import Backbone, Compiled, Task, is_auto
from kmodels.training.loop import like
from kmodels.training.metrics import SparseAccuracy
from kmodels.weights.rules import PROBLEM_TYPES

REGRESSION, SINGLE_LABEL, MULTI_LABEL = PROBLEM_TYPES


# timm's name for the mean over the patches.
ALSO = {"avg": "gap"}


class Head:
    """The layers from tokens to logits, and the settings that describe them.

    Args:
        pool: class of the layer that pools them.
        policy: policy of the layers.
        settings: of the task, see `ImageClassifier`.

    Raises:
        InputError: for another number of names than of classes, or an unknown problem_type.
    """

    def __init__(
        self,
        backbone: Backbone,
        pool: type[Pooling],
        policy: keras.DTypePolicy,
        settings: dict[str, Any],
    ):
        num_classes, pooling = settings["num_classes"], settings["pooling"]
        check_whole("num_classes", num_classes, 0)
        if settings["problem_type"] is not None:
            check_choice("problem_type", settings["problem_type"], PROBLEM_TYPES)
        config = backbone.config
        # Attention over all tokens is the one pooling whose cost is that of a block.
        pool_policy = backbone.dtype_policy if pooling == "map" else policy
        self.pool = pool(pooling, config, name="pooling", dtype=pool_policy)
        self.norm = self.pre_logits = None
        if settings["pooled_norm"]:
            self.norm = LayerNorm(config.layer_norm_epsilon, name="pooled_norm", dtype=policy)
        if (width := settings["intermediate_dim"]) is not None:
            self.pre_logits = Dense(width, name="pre_logits", dtype=policy)
        self.drop = Dropout(settings["dropout"], name="head_dropout", dtype=policy)
        names = ["logits", "distillation_logits"] if pooling == "distilled" else ["logits"]
        self.logits = [
            Dense(
                num_classes,
                use_bias=settings["head_bias"],
                kernel_initializer=keras.initializers.TruncatedNormal(stddev=0.02),
                name=name,
                dtype=policy,
            )
            for name in (names if num_classes else ())
        ]
        # The loss needs float32 at least, under every policy of the head.
        last = policy if num_classes or self.norm or self.pre_logits else pool_policy
        self.dtype = "float64" if last.compute_dtype == "float64" else "float32"
        self.activation = keras.activations.get(settings["activation"])
        self.settings = {
            **settings,
            "activation": keras.activations.serialize(self.activation),
            "class_names": check_class_names(settings["class_names"], num_classes),
        }

    def pooled(self, *inputs: Tensor) -> Any:
        """Returns the input of the logits for the inputs of the pooling layer."""
        x = self.pool(*inputs)
        x = x if self.norm is None else self.norm(x)
        return x if self.pre_logits is None else keras.ops.tanh(self.pre_logits(x))

    def __call__(self, *inputs: Tensor, drop: Callable[[Tensor], Any] | None = None) -> Any:
        """Returns the outputs of the model.

        Args:
            *inputs: those of the pooling layer, the tokens first.
            drop: the dropout; None for the head's own.
        """
        drop = drop or self.drop
        if len(self.logits) == 2:
            x = self.logits[0](drop(inputs[0][:, 0]))
            x = (x + self.logits[1](drop(inputs[0][:, 1]))) / 2
        else:
            x = drop(self.pooled(*inputs))
            x = self.logits[0](x) if self.logits else x
        return self.activation(keras.ops.cast(x, self.dtype))


# Losses that take a number from 0 to 1 for each class.
OF_SHARES = (keras.losses.BinaryCrossentropy, keras.losses.CategoricalCrossentropy)


class ImageClassifier(NamedClasses, Task):
    """Base of image classifiers.

    Its `from_preset` finds the class of a preset.

    Args:
        backbone: the ViT.
        num_classes: number of logits; 0 for no head: the model returns the pooled features, for
            a probe or another model.
        preprocessor: turns raw images into inputs of the backbone, or None.
        pooling: how tokens become one vector, see the class; None for its default.
        intermediate_dim: width of a tanh layer in front of the logits (the pre-logits of the
            original), or None for none.
        activation: on the logits, such as "softmax"; None leaves logits.
        dropout: rate in front of the head.
        head_dtype: policy of the head; by default the dtype of the backbone's variables, so that
            under "mixed_bfloat16" it computes in float32. A logit of 0.1 would otherwise be off by
            2e-4 there, and the head is a ten-thousandth of the work.
        pooled_norm: a norm after pooling, for backbones without a final one (timm's `fc_norm`).
        head_bias: whether the logits have a bias; False for CLIP's projection, whose "classes"
            are the dimensions that images and texts share.
        class_names: names of the classes in the order of the outputs, or None; they are saved
            and exported with the model.
        problem_type: "regression" (any numbers), "multi_label_classification" (several classes or
            none for an image) or "single_label_classification"; None for the last. It decides the
            default loss and metric of `compile`.
        name: name of the model.
        compile: compiles with the defaults of `compile` if they fit the head of the model.
        **kwargs: of `keras.Model`.

    Attributes:
        pool_class: class of the layer that pools.
        usual_pooling: default of `pooling`.
    """

    pool_class: ClassVar[type[Pooling]] = Pooling
    usual_pooling: ClassVar[str] = "token"

    @of_family
    def __init__(
        self,
        backbone: Backbone,
        num_classes: int,
        preprocessor: Preprocessor | None = None,
        pooling: str | None = None,
        intermediate_dim: int | None = None,
        activation: ActivationLike = None,
        dropout: float = 0.0,
        head_dtype: DTypeLike = None,
        pooled_norm: bool = False,
        head_bias: bool = True,
        class_names: Sequence[str] | None = None,
        problem_type: str | None = None,
        name: str | None = None,
        compile: bool = True,
        **kwargs: Any,
    ):
        pooling = pooling or self.usual_pooling
        settings = {
            "num_classes": num_classes,
            "pooling": ALSO.get(pooling, pooling),
            "intermediate_dim": intermediate_dim,
            "activation": activation,
            "dropout": dropout,
            "pooled_norm": pooled_norm,
            "head_bias": head_bias,
            "class_names": class_names,
            "problem_type": problem_type,
        }
        self.check_head(backbone, settings)
        policy = keras.dtype_policies.get(head_dtype or backbone.variable_dtype)
        head = Head(backbone, self.pool_class, policy, settings)
        inputs, outputs = self.connect(backbone, head)
        super().__init__(
            backbone=backbone,
            preprocessor=preprocessor,
            inputs=inputs,
            outputs=outputs,
            name=name,
            **kwargs,
        )
        self.classify = head
        self.settings = head.settings
        self.num_classes: int = num_classes
        self.pooling: str = head.settings["pooling"]
        self.head_dtype = policy
        if compile:
            self.compile_by_default()

    @staticmethod
    def check_head(backbone: Backbone, settings: Mapping[str, Any]) -> None:
        """Raises `InputError` for a pooling, or a backbone, that the class does not support."""
        raise NotImplementedError

    @staticmethod
    def connect(backbone: Backbone, head: Head) -> tuple[Any, Any]:
        """Returns the symbolic inputs and outputs of the model."""
        raise NotImplementedError

    def compile_by_default(self) -> None:
        """Compiles with the defaults of `compile` if they fit the head of the model."""
        # A model without values has no place for those of an optimizer; its loader calls again.
        if keras_internals.in_stateless_scope() or not self.num_classes or self._problem():
            return
        # On an accelerator torch.compile takes the blocks only if the user asks for it.
        self.compile(jit_compile="auto" if compiling.declines() else False)

    def before_use(self) -> None:
        """Raises `InputError` for a model without defaults that was not compiled."""
        if not self.compiled and self.num_classes and (problem := self._problem()):
            raise InputError(problem)

    @property
    def output_dense(self) -> Any:
        """The layer that gives the logits, by keras-hub's name; None without a head."""
        return self.get_layer("logits") if self.num_classes else None

    @property
    def activation(self) -> Any:
        """The activation of the logits."""
        return keras.activations.get(self.settings["activation"])

    @property
    def number_of_labels(self) -> int:
        """The number of classes."""
        return self.num_classes

    @property
    def problem_type(self) -> str | None:
        """The kind of problem, named as in transformers; None for one class per image."""
        return self.settings["problem_type"]

    def check_labels(self, y: Any) -> None:
        """Raises `InputError` for arrays of labels that do not fit the loss."""
        if isinstance(y, np.ndarray) and y.dtype.kind in "biuf":
            self._check_array(y)
        super().check_labels(y)

    def _check_array(self, y: np.ndarray) -> None:
        rank, last = len(self.outputs[0].shape), y.shape[-1] if y.ndim else None
        whole = y.ndim == rank and last == self.num_classes
        single = self.num_classes == 1 and y.ndim == rank - 1
        if self.has_sparse_labels and y.ndim == rank and last != 1:
            raise InputError(
                f"labels have shape {y.shape}, and the loss takes the number of one class for each "
                f"image; for several classes give the model problem_type={MULTI_LABEL!r}, for "
                "one-hot labels compile(loss=keras.losses.CategoricalCrossentropy(True))"
            )
        if isinstance(self.loss, OF_SHARES) and not whole and not single:
            raise InputError(
                f"labels have shape {y.shape}, and the loss takes a 0 or 1 for each of the "
                f"{self.num_classes} classes of an image"
            )
        if self.problem_type == REGRESSION and not whole and not single:
            raise InputError(
                f"labels have shape {y.shape}, and the model gives "
                f"{pluralize(self.num_classes, 'number')} for each image"
            )

        if isinstance(self.loss, OF_SHARES) and not (fits := (y >= 0) & (y <= 1)).all():
            raise InputError(f"a label is {y[~fits].flat[0]}; give 0 to 1 for each class")
        if self.problem_type == REGRESSION and not (fits := np.isfinite(y)).all():
            raise InputError(f"a label is {y[~fits].flat[0]}; give finite numbers")

    @like(keras.Model.predict)
    def predict(self, x: Data, **kwargs: Any) -> Any:
        """Predicts, as Keras does, on anything that `fit` takes, and on files of images.

        Args:
            x: also the path of an image file, an image of Pillow, or a list of either, if the
                model has a preprocessor.
            **kwargs: as in `keras.Model.predict`.
        """
        return super().predict([x] if is_picture(x) else x, **kwargs)

    def decode_predictions(self, predictions: Tree, top: int = 5) -> list[list[tuple[str, float]]]:
        """Returns names and probabilities of the most probable classes of each image.

        Args:
            predictions: outputs of the model (B, num_classes), as `predict` returns them.
            top: number of classes of each image.

        Returns:
            For each image (name, probability) of its classes, the most probable first; a class
            without a name has its number as a text.

        Raises:
            InputError: for outputs of another shape, or a model for regression.
        """
        scores = keras.ops.convert_to_numpy(predictions)
        if self.problem_type == REGRESSION or not self.num_classes:
            raise InputError("the outputs are no scores of classes; read them as they are")
        if scores.ndim != 2 or scores.shape[1] != self.num_classes:
            raise InputError(
                f"predictions have shape {scores.shape}; give (images, {self.num_classes})"
            )
        if self.activation is keras.activations.linear:
            apart = self.problem_type == MULTI_LABEL or self.num_classes == 1
            turned = keras.ops.sigmoid if apart else keras.ops.softmax
            scores = keras.ops.convert_to_numpy(turned(keras.ops.cast(scores, "float32")))
        return best(scores, [self.class_name(i) for i in range(self.num_classes)], top)

    def with_defaults(self, arguments: Compiled) -> Compiled:
        """Returns the arguments of `compile`, filled with keras-hub's defaults for integer labels.

        The optimizer is Adam with a learning rate of 5e-5. The loss is cross-entropy of
        whole-number labels, from logits or, with a "softmax", from probabilities, in which labels
        of -100 do not count. With a "sigmoid" or `problem_type="multi_label_classification"` it is
        binary cross-entropy of 0 and 1, (B, num_classes); with "regression" it is the mean squared
        error. The metric is the accuracy that belongs to this loss; with a loss of your own there
        is none.

        Args:
            arguments: arguments of `compile`.

        Raises:
            InputError: for the default loss with another activation, and for cross-entropy over one
                class, which is always 0.
        """
        if is_auto(arguments.loss):
            if problem := self._problem():
                raise InputError(problem)
            loss, metric = self._defaults()
            arguments = arguments.filled(loss=lambda: loss, metrics=lambda: [metric])
        loss = arguments.loss
        if self.num_classes == 1 and _compares_classes(loss):
            raise InputError(
                f"the loss {loss if isinstance(loss, str) else type(loss).__name__} over one class "
                f"is always 0; {_ONE_CLASS}"
            )
        return super().with_defaults(
            arguments.filled(optimizer=lambda: keras.optimizers.Adam(5e-5))
        )

    def _problem(self) -> str:
        """Returns why there is no default loss, or an empty text."""
        activation, problem = self.activation, self.problem_type
        if activation not in (
            keras.activations.sigmoid,
            keras.activations.softmax,
            keras.activations.linear,
        ):
            return (
                f"no loss is known for the activation {self.settings['activation']!r}; give "
                'compile a loss, or choose activation=None, "softmax" or "sigmoid"'
            )
        if problem == REGRESSION and activation is not keras.activations.linear:
            return "problem_type is 'regression', whose outputs have no activation; leave it out"
        if problem == MULTI_LABEL and activation is keras.activations.softmax:
            return (
                f"problem_type is {problem!r}, whose classes are independent of each other; leave "
                'activation out or give "sigmoid"'
            )
        sigmoid = activation is keras.activations.sigmoid
        if self.num_classes == 1 and not sigmoid and problem in (None, SINGLE_LABEL):
            return f"num_classes is 1, which leaves nothing to choose from; {_ONE_CLASS}"
        return ""

    def _defaults(self) -> tuple[Any, Any]:
        """Returns the loss and the metric."""
        linear = self.activation is keras.activations.linear
        if self.problem_type == REGRESSION:
            return keras.losses.MeanSquaredError(), keras.metrics.MeanAbsoluteError()
        if self.problem_type == MULTI_LABEL or self.activation is keras.activations.sigmoid:
            return (
                keras.losses.BinaryCrossentropy(from_logits=linear),
                keras.metrics.BinaryAccuracy(threshold=0.0 if linear else 0.5),
            )
        return (
            keras.losses.SparseCategoricalCrossentropy(from_logits=linear),
            SparseAccuracy(name="sparse_categorical_accuracy"),
        )

    def with_head(self, num_classes: int, pooling: str | None = None) -> Self:
        """Returns a classifier with a new head over the same backbone, whose weights they share.

        Args:
            num_classes: number of classes of the new head; 0 for none.
            pooling: as in the class; None keeps it.
        """
        policy = self.head_dtype
        settings = {**self.settings, "num_classes": num_classes}
        if num_classes != self.num_classes:
            settings["class_names"] = None
        settings["pooling"] = pooling or self.pooling
        make: Any = type(self)
        return make(self.backbone, preprocessor=self.preprocessor, head_dtype=policy, **settings)


_ONE_CLASS = (
    f"give problem_type={REGRESSION!r} for numbers or {MULTI_LABEL!r} for yes and no, or at least "
    "2 classes"
)


def _compares_classes(loss: Any) -> bool:
    """Returns True for a loss that compares the outputs of an image with each other."""
    if isinstance(loss, str):
        return loss in ("sparse_categorical_crossentropy", "categorical_crossentropy")
    kinds = (keras.losses.SparseCategoricalCrossentropy, keras.losses.CategoricalCrossentropy)
    return isinstance(loss, kinds)
