"""Texts as vectors beside those of images, with CLIP."""

import keras

from kmodels.models.clip.model import CLIPTextEncoder
from kmodels.models.clip.text import CLIPPreprocessor
from kmodels.models.common.encoder.text_embedder import TextEmbedder


@keras.saving.register_keras_serializable(package="kmodels")
class CLIPTextModelWithProjection(TextEmbedder):
    """A CLIP text tower that gives one vector for each text; all is as in `TextEmbedder`."""

    backbone_class = CLIPTextEncoder
    preprocessor_class = CLIPPreprocessor
