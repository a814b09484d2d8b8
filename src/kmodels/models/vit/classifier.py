"""Image classification with a ViT."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.core.types import Tensor, Tree
from kmodels.layers.direct_calls import calls
from kmodels.models.vit.classification import ALSO, Head, ImageClassifier
from kmodels.models.vit.layers import KEPT
from kmodels.models.vit.model import ViTBackbone, feature_model
from kmodels.models.vit.preprocessor import ViTImageClassifierPreprocessor
from kmodels.task import Backbone

POOLINGS = ("token", "gap", "max", "avgmax", "token_gap", "distilled", "map")


@keras.saving.register_keras_serializable(package="kmodels")
class ViTImageClassifier(ImageClassifier):
    """A ViT with a head for images of one class each.

    Arguments are those of `ImageClassifier`. `pooling` is "token" (the class token, the default),
    "gap" or "avg" (mean over the patches), "max" (their maximum), "avgmax" (the mean of both),
    "token_gap" (class token and mean, one behind the other, as DINOv2's classifier), "distilled"
    (DeiT: a head each on class and distillation token, and the mean of their logits) or "map"
    (attention pooling).

    Call:
        images (B, height, width, C), preprocessed floats -> logits (B, num_classes), float32, or
        with num_classes=0 pooled features, (B, D) or (B, 2 D).

    Raises:
        InputError: for an unknown pooling, or one whose token the backbone lacks.
    """

    backbone_class = ViTBackbone
    preprocessor_class = ViTImageClassifierPreprocessor
    export_to_timm = ViTBackbone.export_to_timm
    export_to_npz = ViTBackbone.export_to_npz
    resized = ViTBackbone.resized

    @staticmethod
    def check_head(backbone: Backbone, settings: Mapping[str, Any]) -> None:
        """Raises `InputError` for a pooling whose tokens the backbone lacks."""
        pooling, config = settings["pooling"], backbone.config
        if pooling not in POOLINGS:
            raise InputError(
                f"pooling is {pooling!r}; choose one of {', '.join((*POOLINGS, *ALSO))}; tokens "
                "that are not pooled are what the backbone gives"
            )
        if len(backbone.output.shape) != 3:
            raise InputError(f"{type(backbone).__name__} gives no tokens; give a ViTBackbone")
        if pooling in ("token", "token_gap") and not config.use_class_token:
            raise InputError(
                f'pooling is "{pooling}" but the backbone has no class token; give "gap"'
            )
        if pooling != "distilled":
            return
        if not config.use_distillation_token:
            raise InputError('pooling is "distilled" but the backbone has no distillation token')
        if settings["intermediate_dim"] is not None or settings["pooled_norm"]:
            raise InputError(
                'pooling is "distilled", whose heads are on the tokens themselves; leave out '
                "intermediate_dim and pooled_norm"
            )

    @staticmethod
    def connect(backbone: Backbone, head: Head) -> tuple[Any, Any]:
        """Returns images and logits."""
        # The last block need not make the other tokens for a model that reads only the first ones.
        inputs = backbone.inputs[0]
        return inputs, head(backbone(inputs, **_kept(head.settings["pooling"])))

    def call(self, inputs: Tree, training: bool | None = None, mask: Tree = None) -> Any:
        """Images to logits; calls the layers directly if no part needs Keras' graph."""
        if mask is not None or not calls.sealed:
            return super().call(inputs, training=training, mask=mask)
        return self.classify(self.backbone(inputs, **_kept(self.pooling)))

    def clone_graph(self, inputs: Tree, clone: Callable[..., Any], call: Callable[..., Any]) -> Any:
        """Returns the graph with all tokens: the backbone may be cloned without `keep`."""

        def call_whole(
            layer: keras.Layer, *args: object, keep: int | None = None, **kwargs: object
        ) -> Any:
            return call(layer, *args, **kwargs)

        return super().clone_graph(inputs, clone, call_whole)

    def head(self, tokens: Tensor, pre_logits: bool = False) -> Any:
        """Returns the logits of the backbone's tokens, without dropout.

        Args:
            tokens: (B, prefix + P, D), as the backbone gives them.
            pre_logits: True to return the input of the last layer instead.

        Returns:
            logits (B, num_classes), float32, or the pooled features.
        """
        if pre_logits or not self.num_classes:
            return self.classify.pooled(tokens)
        return self.classify(tokens, drop=lambda x: x)

    def feature_model(self, outputs: str | Sequence[str] = "pooled_output") -> keras.Model:
        """Returns a model of intermediate features that shares the weights.

        Args:
            outputs: as in `ViTBackbone.feature_model`, or "pooled_output": the input of the head,
                (B, D), or (B, 2 D) with pooling "token_gap".

        Returns:
            images -> the output of that name, or a dictionary by name for several.

        Raises:
            InputError: for a name that is not there.
        """
        return feature_model(self.backbone, outputs, {"pooled_output": self.classify.pooled})


def _kept(pooling: str) -> dict[str, int]:
    """Returns the tokens that a pooling reads, as an argument of the backbone; empty for all."""
    return {"keep": KEPT[pooling]} if pooling in KEPT else {}
