"""Classification of images of any aspect ratio, one or several in each row of patches."""

from collections.abc import Sequence
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.core.types import ActivationLike, DTypeLike
from kmodels.layers.placement import of_family
from kmodels.models.vit.classification import Head, ImageClassifier
from kmodels.models.vit.classifier import ALSO
from kmodels.models.vit.naflex.layers import POOLINGS, ImageSegments, NaFlexPooling
from kmodels.models.vit.naflex.model import MASK, SHAPES, VALUES, NaFlexViTBackbone, PatchInputs
from kmodels.models.vit.naflex.preprocessor import NaFlexViTImageClassifierPreprocessor
from kmodels.task import Compiled, is_auto


@keras.saving.register_keras_serializable(package="kmodels")
class NaFlexViTImageClassifier(PatchInputs, ImageClassifier):
    """A `NaFlexViTBackbone` with a head for images of one class each.

    It reads the files of every `ViTImageClassifier` that pools its patches.

    Args:
        backbone: a `NaFlexViTBackbone`.
        num_classes: number of logits; 0 for no head.
        preprocessor: turns raw images into inputs of the backbone, or None.
        pooling: "gap" or "avg" (mean over the patches of an image), or "map" (attention pooling).
        intermediate_dim: width of a tanh layer in front of the logits, or None for none.
        activation: on the logits, such as "softmax"; None leaves logits.
        dropout: rate in front of the head.
        pooled_norm: a norm after pooling, for backbones without a final one (timm's `fc_norm`).
        head_bias: whether the logits have a bias.
        class_names: names of the classes in the order of the outputs, or None; they are saved
            and exported with the model.
        problem_type: "regression" (any numbers), "multi_label_classification" (several classes or
            none for an image) or "single_label_classification"; None for the last. It decides the
            default loss and metric of `compile`.
        head_dtype: policy of the head; by default the dtype of the backbone's variables.
        name: name of the model.
        compile: compiles with the defaults of `compile` if they fit the head of the model.

    Call:
        as of `NaFlexViTBackbone` -> logits (B, S, num_classes), float32, or (B, num_classes) of one
        image in each row.

    Raises:
        InputError: for another pooling, or another backbone.

    Example:
        model = kmodels.models.NaFlexViTImageClassifier.from_preset(path, num_classes=10)
        model.predict(list_of_images)
        loader = kmodels.data.NaFlexLoader(source, 32, patch_size=16, row_length=256)
        model.fit(loader)
    """

    backbone_class = NaFlexViTBackbone
    preprocessor_class = NaFlexViTImageClassifierPreprocessor
    by_image = True

    @of_family
    def __init__(
        self,
        backbone: NaFlexViTBackbone,
        num_classes: int,
        preprocessor: NaFlexViTImageClassifierPreprocessor | None = None,
        pooling: str = "gap",
        intermediate_dim: int | None = None,
        activation: ActivationLike = None,
        dropout: float = 0.0,
        pooled_norm: bool = False,
        head_bias: bool = True,
        head_dtype: DTypeLike = None,
        class_names: Sequence[str] | None = None,
        problem_type: str | None = None,
        name: str | None = None,
        compile: bool = True,
        **kwargs: Any,
    ):
        pooling = ALSO.get(pooling, pooling)
        if pooling not in POOLINGS:
            raise InputError(
                f"pooling is {pooling!r}; rows of patches are pooled by {' or '.join(POOLINGS)}"
            )
        if not isinstance(backbone, NaFlexViTBackbone) or backbone.pools:
            raise InputError(f"{type(backbone).__name__} is given; give a NaFlexViTBackbone")
        head = Head(
            backbone,
            NaFlexPooling,
            head_dtype,
            num_classes=num_classes,
            pooling=pooling,
            intermediate_dim=intermediate_dim,
            activation=activation,
            dropout=dropout,
            pooled_norm=pooled_norm,
            head_bias=head_bias,
            class_names=class_names,
            problem_type=problem_type,
        )
        inputs: Any = backbone.input
        segments = ImageSegments(name="segments")(inputs[VALUES], inputs[SHAPES], inputs[MASK])
        super().__init__(
            head=head,
            compile=compile,
            backbone=backbone,
            preprocessor=preprocessor,
            inputs=inputs,
            outputs=head(backbone(inputs), segments, inputs[SHAPES]),
            name=name,
            **kwargs,
        )

    def with_defaults(self, arguments: Compiled) -> Compiled:
        """Returns the arguments of `compile`, as in `ViTImageClassifier`.

        The accuracy is a weighted metric, so that empty image slots of a row do not count. Put
        your own metrics into `weighted_metrics` too if rows hold several images.
        """
        if is_auto(arguments.loss) and is_auto(arguments.metrics) and not self._problem():
            arguments = arguments.filled(
                metrics=lambda: None, weighted_metrics=lambda: [self._default_metric()]
            )
        return super().with_defaults(arguments)
