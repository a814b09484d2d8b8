"""A text encoder with one vector for each text, to compare with those of images."""

import math
from typing import Any

import keras

from kmodels.core.errors import check_whole
from kmodels.core.types import DTypeLike, Tensor
from kmodels.layers import Dense
from kmodels.layers.layout_family import of_family
from kmodels.models.common.encoder.config import TextEncoderConfig
from kmodels.models.common.encoder.text_encoder import TextEncoderBackbone
from kmodels.models.common.inputs import OptionalInputs
from kmodels.models.common.text_preprocessor import TextPreprocessor
from kmodels.ops._wide import wide
from kmodels.task import Task

# See `Family.parts`.
PARTS = {"projection_dim": ("text_projection/",)}


def fit_preprocessor(given: dict[str, Any], config: TextEncoderConfig) -> dict[str, Any]:
    """See `Family.fit_preprocessor`: rows are as long as the position embedding by default."""
    return {"sequence_length": config.max_sequence_length, **given}


class TextEmbedder(OptionalInputs, Task):
    """A text encoder that gives what it pools, projected; the base of each family's own.

    Args:
        backbone: a `TextEncoderBackbone` of the family.
        projection_dim: width of the projection, which has no bias; None for none.
        preprocessor: turns texts into what the backbone takes, or None where the data comes as
            token ids.
        logit_scale: logarithm of what cosines of images and texts are multiplied by.
        head_dtype: policy of the projection; by default the dtype of the backbone's variables.
        name: name of the model.
        **kwargs: of `keras.Model`.

    Call:
        what the backbone takes -> (B, projection_dim), or without projection (B, D); float32.
    """

    @of_family
    def __init__(
        self,
        backbone: TextEncoderBackbone,
        projection_dim: int | None = None,
        preprocessor: TextPreprocessor | None = None,
        logit_scale: float = math.log(1 / 0.07),
        head_dtype: DTypeLike = None,
        name: str | None = None,
        **kwargs: Any,
    ):
        policy = keras.dtype_policies.get(head_dtype or backbone.variable_dtype)

        # === Graph ===
        inputs = backbone.input
        hidden = backbone(inputs)
        if isinstance(hidden, dict):
            hidden = hidden["sequence_output"]
        x = backbone.pool(hidden, inputs["token_ids"])
        if projection_dim is not None:
            check_whole("projection_dim", projection_dim)
            x = Dense(projection_dim, use_bias=False, name="text_projection", dtype=policy)(x)
        super().__init__(
            backbone=backbone,
            preprocessor=preprocessor,
            inputs=inputs,
            outputs=keras.ops.cast(x, wide(x)),
            name=name,
            **kwargs,
        )

        # === Config ===
        self.logit_scale = float(logit_scale)
        self.settings = {"projection_dim": projection_dim, "logit_scale": self.logit_scale}
        self.head_dtype = policy

    @property
    def gives_logits(self) -> bool:
        """Whether it gives logits: it never does."""
        return False

    def logits_per_image(self, image_embeds: Tensor, text_embeds: Tensor) -> Any:
        """Returns how well each text goes with each image; softmax makes probabilities of it.

        Args:
            image_embeds: (B, P), what an image tower with a projection gives.
            text_embeds: (N, P), what this model gives.

        Returns:
            (B, N): cosines times exp(logit_scale).
        """
        images, texts = (keras.ops.normalize(x, axis=-1) for x in (image_embeds, text_embeds))
        return keras.ops.matmul(images, keras.ops.transpose(texts)) * math.exp(self.logit_scale)
