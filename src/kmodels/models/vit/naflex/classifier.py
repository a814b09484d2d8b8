"""Classification of images of any aspect ratio, one or several in each row of patches."""

from collections.abc import Mapping
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.models.blocks.hub_order import in_order
from kmodels.models.vit.classification import Head, ImageClassifier
from kmodels.models.vit.naflex.layers import POOLINGS, ImageSegments, NaFlexPooling
from kmodels.models.vit.naflex.model import MASK, SHAPES, VALUES, NaFlexViTBackbone, PatchInputs
from kmodels.models.vit.naflex.preprocessor import NaFlexViTImageClassifierPreprocessor
from kmodels.task import Backbone, Compiled, is_auto


@keras.saving.register_keras_serializable(package="kmodels")
class NaFlexViTImageClassifier(PatchInputs, ImageClassifier):
    """A `NaFlexViTBackbone` with a head for images of one class each.

    It reads the files of every `ViTImageClassifier` that pools its patches. Arguments are
    `ImageClassifier`'s. `pooling` is "gap" or "avg" (mean over the patches of an image), the
    default, or "map" (attention pooling).

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
    pool_class = NaFlexPooling
    usual_pooling = "gap"
    __init__ = in_order(
        *("backbone", "num_classes", "preprocessor", "pooling", "intermediate_dim", "activation"),
        *("dropout", "pooled_norm", "head_bias", "head_dtype", "class_names", "problem_type"),
        *("name", "compile"),
    )(ImageClassifier.__init__)

    @staticmethod
    def check_head(backbone: Backbone, settings: Mapping[str, Any]) -> None:
        """Raises `InputError` for a pooling that rows of patches do not have."""
        if (pooling := settings["pooling"]) not in POOLINGS:
            raise InputError(
                f"pooling is {pooling!r}; rows of patches are pooled by {' or '.join(POOLINGS)}"
            )
        if not isinstance(backbone, NaFlexViTBackbone) or backbone.pools:
            raise InputError(f"{type(backbone).__name__} is given; give a NaFlexViTBackbone")

    @staticmethod
    def connect(backbone: Backbone, head: Head) -> tuple[Any, Any]:
        """Returns patches and logits."""
        inputs: Any = backbone.input
        segments = ImageSegments(name="segments")(inputs[VALUES], inputs[SHAPES], inputs[MASK])
        return inputs, head(backbone(inputs), segments, inputs[SHAPES])

    def with_defaults(self, arguments: Compiled) -> Compiled:
        """Returns the arguments of `compile`, as in `ViTImageClassifier`.

        The accuracy is a weighted metric, so that empty image slots of a row do not count. Put
        your own metrics into `weighted_metrics` too if rows hold several images.
        """
        if is_auto(arguments.loss) and is_auto(arguments.metrics) and not self._problem():
            arguments = arguments.filled(
                metrics=lambda: None, weighted_metrics=lambda: [self._defaults()[1]]
            )
        return super().with_defaults(arguments)
