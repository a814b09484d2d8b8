"""Image classification with a ViT."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import keras

from kmodels.core.errors import InputError
from kmodels.core.types import ActivationLike, DTypeLike, Tensor, Tree
from kmodels.layers.direct_calls import calls
from kmodels.layers.placement import of_family
from kmodels.models.vit.classification import Head, ImageClassifier
from kmodels.models.vit.layers import KEPT, Pooling
from kmodels.models.vit.model import ViTBackbone, feature_model, resized
from kmodels.models.vit.preprocessor import ViTImageClassifierPreprocessor

POOLINGS = ("token", "gap", "max", "avgmax", "token_gap", "distilled", "map")
# timm's name for the mean over the patches.
ALSO = {"avg": "gap"}


@keras.saving.register_keras_serializable(package="kmodels")
class ViTImageClassifier(ImageClassifier):
    """A ViT with a head for images of one class each.

    Args:
        backbone: a `ViTBackbone`.
        num_classes: number of logits; 0 for no head: the model returns the pooled features, for
            a probe or another model.
        preprocessor: turns raw images into inputs of the backbone, or None.
        pooling: "token" (the class token), "gap" or "avg" (mean over the patches), "max"
            (their maximum), "avgmax" (the mean of both), "token_gap" (class token and mean, one
            behind the other, as DINOv2's classifier), "distilled" (DeiT: a head each on class and
            distillation token, and the mean of their logits) or "map" (attention pooling).
        intermediate_dim: width of a tanh layer in front of the logits (the pre-logits of the
            original), or None for none.
        activation: on the logits, such as "softmax"; None leaves logits.
        dropout: rate in front of the head.
        pooled_norm: a norm after pooling, for backbones without a final one (timm's `fc_norm`).
        head_bias: whether the logits have a bias; False for CLIP's projection, whose "classes"
            are the dimensions that images and texts share.
        class_names: names of the classes in the order of the outputs, or None; they are saved
            and exported with the model.
        problem_type: "regression" (any numbers), "multi_label_classification" (several classes or
            none for an image) or "single_label_classification"; None for the last. It decides the
            default loss and metric of `compile`.
        head_dtype: policy of the head; by default the dtype of the backbone's variables, so that
            under "mixed_bfloat16" it computes in float32. A logit of 0.1 would otherwise be off by
            2e-4 there, and the head is a ten-thousandth of the work.
        compile: compiles with the defaults of `compile` if they fit the head of the model.

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

    @of_family
    def __init__(
        self,
        backbone: ViTBackbone,
        num_classes: int,
        preprocessor: ViTImageClassifierPreprocessor | None = None,
        pooling: str = "token",
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
        pooling = ALSO.get(pooling, pooling)
        if pooling not in POOLINGS:
            raise InputError(
                f"pooling is {pooling!r}; choose one of {', '.join((*POOLINGS, *ALSO))}; tokens "
                "that are not pooled are what the backbone gives"
            )
        if len(backbone.output.shape) != 3:
            raise InputError(f"{type(backbone).__name__} gives no tokens; give a ViTBackbone")
        config = backbone.config
        if pooling in ("token", "token_gap") and not config.use_class_token:
            raise InputError(
                f'pooling is "{pooling}" but the backbone has no class token; give "gap"'
            )
        if pooling == "distilled" and not config.use_distillation_token:
            raise InputError('pooling is "distilled" but the backbone has no distillation token')
        if pooling == "distilled" and (intermediate_dim is not None or pooled_norm):
            raise InputError(
                'pooling is "distilled", whose heads are on the tokens themselves; leave out '
                "intermediate_dim and pooled_norm"
            )
        head = Head(
            backbone,
            Pooling,
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
        inputs = backbone.inputs[0]
        # The last block need not make the other tokens for a model that reads only the first ones.
        super().__init__(
            head=head,
            compile=compile,
            backbone=backbone,
            preprocessor=preprocessor,
            inputs=inputs,
            outputs=head(backbone(inputs, **_kept(pooling))),
            name=name,
            **kwargs,
        )

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

    def resized(self, image_size: Sequence[int], patch_size: int | None = None) -> Self:
        """Returns a copy for images, or patches, of another size; see `ViTBackbone.resized`."""
        return resized(self, image_size, patch_size)

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
