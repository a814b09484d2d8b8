"""A decoder that reads images among the tokens of its texts."""

from collections.abc import Mapping
from typing import Any, ClassVar

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.models.common.config import DecoderConfig
from kmodels.models.common.decoder import DecoderBackbone
from kmodels.models.common.inputs import NAMES

PLACES = ("vision_indices", "vision_mask")
IMAGES = ("images", *PLACES)
GIVEN = ("padding_mask", "images", "vision_mask")


class ImageTextBackbone(DecoderBackbone):
    """A `DecoderBackbone` with a vision encoder, whose features stand among the embeddings.

    A family's class gives the encoder by `make_vision_encoder`; its config has `image_token_id`,
    and for whole images `image_shape` and `num_vision_tokens_per_image`.

    Attributes:
        image_inputs: names of the arrays that the encoder takes.

    Call:
        What `DecoderBackbone` takes, and "images" (B, M, height, width, C), preprocessed floats,
        with "vision_mask" (B, T) int, 1 for each token that stands for a piece of an image, or
        "vision_indices" (B, M * N) int, the places of these tokens, 0 for none; keras-hub's names.
        Without either, the tokens `image_token_id` are those. The tokens of an image see each
        other. Without "images" or with none of them (B, 0, ...) the model is a text model.

    Raises:
        InputError: as of `DecoderBackbone`, or for more such tokens than the images of a row have.
    """

    takes = (*NAMES, *IMAGES)
    absent = GIVEN
    image_inputs: ClassVar[tuple[str, ...]] = ("images",)
    vision_encoder: keras.layers.Layer
    layer_fields = ("vision_encoder",)

    def check_inputs(self, inputs: dict[str, Any]) -> None:
        """Raises `InputError` for more tokens of images in a row than its images have features."""
        mask, images = inputs.get("vision_mask"), inputs.get("images")
        if not isinstance(mask, np.ndarray) or images is None:
            return
        each, count = self.config.num_vision_tokens_per_image, images.shape[1]
        most = int(mask.sum(axis=-1).max(initial=0))
        if most > count * each:
            raise InputError(
                f"a row has {most} tokens for images, and its {count} images have "
                f"{count * each}; give each image {each} tokens"
            )

    @classmethod
    def make_vision_encoder(cls, config: Any, policy: keras.DTypePolicy) -> keras.layers.Layer:
        """Returns the layer of images (B, M, height, width, C) to features (B, M * N, D)."""
        raise NotImplementedError

    @classmethod
    def image_symbols(cls, config: Any, dtype: str) -> dict[str, Any]:
        """Returns the symbols of the arrays that the encoder takes, without batch and optional."""
        shape = (None, *config.image_shape)
        return {"images": keras.Input(shape, name="images", dtype=dtype, optional=True)}

    def beside_text(
        self, config: DecoderConfig, policy: keras.DTypePolicy
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, keras.Layer]]:
        """See `DecoderBackbone.beside_text`."""
        encoder = self.make_vision_encoder(config, policy)
        dtype = "float64" if policy.compute_dtype == "float64" else "float32"
        pictures = self.image_symbols(config, dtype)
        mask = keras.Input((None,), name="vision_mask", dtype="int32", optional=True)
        seen = {"features": encoder(*pictures.values()), "vision_mask": mask}
        return {**pictures, "vision_mask": mask}, seen, {"vision_encoder": encoder}

    def seen(self, inputs: dict[str, Any], training: bool | None = False) -> dict[str, Any]:
        """See `DecoderBackbone.seen`: images become features, and their places a mask."""
        images = [inputs.get(name) for name in self.image_inputs]
        indices, mask = (inputs.get(name) for name in PLACES)
        given = {name: x for name, x in inputs.items() if name not in (*self.image_inputs, *PLACES)}
        if any(x is None or x.shape[1] == 0 for x in images):
            return given
        token_ids = inputs["token_ids"]
        if mask is None:
            mask = self._mask(token_ids, indices)
        features = self.vision_encoder(*images, training=training)
        return {**given, "features": features, "vision_mask": mask}

    def _mask(self, token_ids: Tensor, indices: Tensor | None) -> Any:
        if indices is None:
            is_image = keras.ops.equal(token_ids, self.config.image_token_id)
            return keras.ops.cast(is_image, "int32")
        # The first token of a row is never one of an image, so that 0 stands for none.
        places = keras.ops.arange(token_ids.shape[1], dtype="int32")
        found = keras.ops.equal(keras.ops.expand_dims(indices, -1), places)
        return keras.ops.cast(keras.ops.logical_and(keras.ops.any(found, 1), places > 0), "int32")

    @classmethod
    def vision_settings(cls, encoder: object, image_size: object = None) -> dict[str, Any]:
        """Returns the settings of a vision encoder as plain values.

        Args:
            encoder: a layer, keras-hub's own model, what Keras serializes of either, or a mapping
                of settings, whose "dtype" alone counts.
            image_size: side of the images, as keras-hub's backbones are told it too, or None.

        Raises:
            InputError: for another side than that of the encoder, or what is no encoder.
        """
        if isinstance(encoder, Mapping):
            held = dict(encoder.get("config", encoder))
        elif hasattr(encoder, "get_config"):
            held = encoder.get_config()  # type: ignore[attr-defined]
        else:
            raise InputError(
                f"vision_encoder is {encoder!r}; give a vision encoder, or its arguments"
            )
        if not isinstance(encoder, Mapping) or "config" in encoder:
            held.pop("dtype", None)  # a layer always has one, which need not be meant for this
        if image_size not in (None, (side := held.get("image_size"))):
            raise InputError(
                f"image_size is {image_size} and that of the vision encoder {side}; leave it out"
            )
        return held
