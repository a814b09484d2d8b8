"""Zero-shot classification, retrieval and training with an image tower and a text tower."""

from typing import Any

import keras

from kmodels.core.types import DTypeLike, LossLike, MetricsLike, OptimizerLike
from kmodels.layers.layout_family import of_family
from kmodels.models.common.image_text.zero_shot import ZeroShot
from kmodels.models.common.inputs import OptionalInputs
from kmodels.models.two_towers.model import TwoTowersBackbone
from kmodels.models.two_towers.preprocessor import ImageTextPreprocessor
from kmodels.task import CompiledByDefault, Task
from kmodels.training.similarity_losses import CLIPLoss, SigLIPLoss


@keras.saving.register_keras_serializable(package="kmodels")
class ImageTextSimilarity(CompiledByDefault, OptionalInputs, ZeroShot, Task):
    """Two towers that say how well images and texts go together.

    Args:
        backbone: a `CLIPBackbone` or a `SigLIPBackbone`.
        preprocessor: turns raw images and texts into what the backbone takes, or None.
        head_dtype: not read; the logits are in float32 whatever the dtype of the towers.
        name: name of the model.
        compile: with the defaults of `compile` when training begins without that call; False has
            Keras say that it is missing.
        **kwargs: of `keras.Model`.

    Call:
        {"images", "token_ids", "padding_mask"} as of the backbone, which may take patches in place
        of images -> logits (B, N), float32, of
        each image with each text.

    Example:
        model = kmodels.models.ImageTextSimilarity.from_preset("path/to/hf_directory")
        model.classify(images, ["cat", "dog"], templates=["a photo of a {}."])
        model.fit({"images": images, "captions": captions}, batch_size=64)
    """

    backbone_class = TwoTowersBackbone
    preprocessor_class = ImageTextPreprocessor
    takes = TwoTowersBackbone.takes

    @of_family
    def __init__(
        self,
        backbone: TwoTowersBackbone,
        preprocessor: ImageTextPreprocessor | None = None,
        head_dtype: DTypeLike = None,
        name: str | None = None,
        compile: bool = True,
        **kwargs: Any,
    ):
        # === Graph ===
        inputs = backbone.input
        super().__init__(
            backbone=backbone,
            preprocessor=preprocessor,
            inputs=inputs,
            outputs=backbone(inputs)["vision_logits"],
            name=name,
            **kwargs,
        )

        # === Config ===
        self.head_dtype = keras.dtype_policies.get(head_dtype or backbone.variable_dtype)
        self.compiles_itself = compile
        self.absent = backbone.absent
        self.settings: dict[str, Any] = {}

    def compile(
        self,
        optimizer: OptimizerLike = "auto",
        loss: LossLike = "auto",
        loss_weights: MetricsLike = None,
        metrics: MetricsLike = None,
        weighted_metrics: MetricsLike = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: bool | str = "auto",
        auto_scale_loss: bool = True,
    ) -> None:
        """Keras' `compile`, by default with the loss that the towers were trained with.

        Args:
            optimizer: Adam with rate 1e-5 by default.
            loss: by default `kmodels.training.CLIPLoss()` of a CLIP, and
                `kmodels.training.SigLIPLoss()` of a SigLIP.
            loss_weights: as in Keras, like all that follow.
            metrics: see there.
            weighted_metrics: see there.
            run_eagerly: see there.
            steps_per_execution: see there.
            jit_compile: as of `Task.compile`.
            auto_scale_loss: as in Keras.
        """
        if isinstance(loss, str) and loss == "auto":
            loss = CLIPLoss() if self.backbone.config.projects else SigLIPLoss()
        super().compile(
            optimizer=keras.optimizers.Adam(1e-5) if optimizer == "auto" else optimizer,
            loss=loss,
            loss_weights=loss_weights,
            metrics=metrics,
            weighted_metrics=weighted_metrics,
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            jit_compile=jit_compile,
            auto_scale_loss=auto_scale_loss,
        )

    @property
    def gives_logits(self) -> bool:
        """Whether it gives logits of classes: it never does."""
        return False
