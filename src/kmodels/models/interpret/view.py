"""Give classifiers, backbones and two towers one form for interpretation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.core.types import Data, Tensor, Tree
from kmodels.data.pipeline.batch import to_numpy
from kmodels.models.blocks.encoder_block import NO_INFO, EncoderInfo
from kmodels.models.gemma_vision import Gemma3VisionEncoder
from kmodels.models.two_towers import TwoTowersBackbone
from kmodels.models.vit import ViTBackbone, ViTImageClassifier
from kmodels.models.vit.fewer_tokens import PatchDropout
from kmodels.models.vit.layers import Pooling


@dataclass(frozen=True)
class View:
    """A model, and the ViT in it that reads the images.

    Args:
        model: as the user gave it.
        tower: its ViT.
        pooling: how it makes one vector of the tokens, as in `ViTImageClassifier`.
        pool: the layer with the attention of a "map" head, else None.
    """

    model: keras.Layer
    tower: ViTBackbone
    pooling: str
    pool: Pooling | None = None

    @property
    def prefix(self) -> int:
        """Tokens in front of the patches."""
        return self.tower.config.num_prefix_tokens

    def pixels(self, images: Data) -> Any:
        """Returns images (B, height, width, C) as the ViT takes them, by the model's preprocessor.

        Raises:
            InputError: for one image alone, or images of another size than the model's.
        """
        held = getattr(self.model, "preprocessor", None)
        held = getattr(held, "image_preprocessor", held)
        if held is not None:
            images = held(images)
        found: Any = np.asarray(images) if isinstance(images, list | tuple) else images
        wanted = self.tower.config.image_shape
        if tuple(found.shape[1:]) != wanted:
            raise InputError(
                f"images have the shape {tuple(found.shape)}; give (batch, "
                f"{', '.join(map(str, wanted))}), or raw images to a model with a preprocessor"
            )
        (tensor,) = keras_internals.standardized(self.tower, self.given(found))
        return tensor

    def given(self, images: Tree) -> Tree:
        """Returns images in the structure that the ViT's graph has."""
        return {self.tower.input_name: images} if self.tower.named_inputs else images

    def steps(self) -> list[Any]:
        """Returns the layers of the ViT from images to tokens, outside of training."""
        return [step for step in self.tower.steps if not isinstance(step, Pooling | PatchDropout)]

    def walk(self, x: Tensor, steps: Sequence[keras.Layer], info: EncoderInfo = NO_INFO) -> Any:
        """Returns what these layers make of images or tokens.

        Args:
            x: images or tokens.
            steps: some of `steps`, one after the other.
            info: of the tokens, as `tower.info` returns it.
        """
        for step in steps:
            x = step(x, info=info) if step in self.tower.blocks else step(x)
        return x

    def maps(self, rows: np.ndarray) -> np.ndarray:
        """Returns values (B, P) of the patches as float32 maps (B, rows, columns)."""
        return rows.reshape(len(rows), *self.tower.config.grid).astype("float32")


def view_of(model: keras.Layer) -> View:
    """Returns what is common of a model.

    Raises:
        InputError: for a model without a ViT.
    """
    backbone = getattr(model, "backbone", model)
    if isinstance(model, ViTImageClassifier):
        pool = model.get_layer("pooling") if model.pooling == "map" else None
        return View(model, model.backbone, model.pooling, pool)
    if isinstance(backbone, TwoTowersBackbone):
        return _of_backbone(model, backbone.vision_encoder)
    tower = backbone.tower if isinstance(backbone, Gemma3VisionEncoder) else backbone
    if isinstance(tower, ViTBackbone):
        return _of_backbone(model, tower)
    raise InputError(
        f"{type(model).__name__} has no ViT to look inside; give a ViTImageClassifier, a "
        "ViTBackbone, or CLIP or SigLIP with both towers"
    )


def _of_backbone(model: keras.Layer, tower: ViTBackbone) -> View:
    pool = tower.steps[-1]
    if isinstance(pool, Pooling):
        return View(model, tower, "map", pool)
    return View(model, tower, "token" if tower.config.use_class_token else "gap")


def array(x: Tensor) -> np.ndarray:
    """Returns a tensor of floats as float64."""
    return np.asarray(to_numpy(keras.ops.cast(x, "float32")), "float64")
