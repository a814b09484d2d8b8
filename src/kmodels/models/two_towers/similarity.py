"""Zero-shot classification, retrieval and training with an image tower and a text tower."""

from typing import Any

import keras

from kmodels.core.types import DTypeLike
from kmodels.layers.layout_family import of_family
from kmodels.models.common.image_text.zero_shot import ZeroShot
from kmodels.models.common.inputs import OptionalInputs
from kmodels.models.two_towers.model import TwoTowersBackbone
from kmodels.models.two_towers.preprocessor import ImageTextPreprocessor
from kmodels.task import Compiled, Task
from kmodels.training.losses import CLIPLoss, SigLIPLoss


@keras.saving.register_keras_serializable(package="kmodels")
class ImageTextSimilarity(OptionalInputs, ZeroShot, Task):
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

    def with_defaults(self, given: Compiled) -> Compiled:
        """Returns what is compiled, by default with the loss that the towers were trained with.

        That is `kmodels.training.CLIPLoss()` of a CLIP and `kmodels.training.SigLIPLoss()` of a
        SigLIP; the optimizer is Adam with a learning rate of 1e-5.
        """
        loss = CLIPLoss if self.backbone.config.projects else SigLIPLoss
        return super().with_defaults(
            given.filled(optimizer=lambda: keras.optimizers.Adam(1e-5), loss=loss)
        )

    @property
    def gives_logits(self) -> bool:
        """Whether it gives logits of classes: it never does."""
        return False
