"""Causal text encoders that pool a text at its end token, as CLIP and its kin do."""

from dataclasses import dataclass
from typing import Any, ClassVar

import keras

from kmodels.core.errors import check_whole
from kmodels.core.types import Tensor
from kmodels.models.common.encoder.config import TextEncoderConfig
from kmodels.models.common.encoder.text_encoder import TextEncoderBackbone
from kmodels.models.common.inputs import Reordered


@dataclass(frozen=True)
class EndTokenConfig(TextEncoderConfig):
    """Sizes of such an encoder; a family adds its own defaults. Names are keras-hub's.

    Args:
        vocabulary_size: rows of the embedding table; like all that is not listed, as there.
        end_token_id: id of the token at whose first place a text is pooled; None for the highest id
            of the text, which in CLIP's own vocabulary is that token.

    Raises:
        InputError: for sizes that do not fit together.
    """

    causal: ClassVar[bool] = True
    end_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end_token_id is not None:
            check_whole("end_token_id", self.end_token_id, 0)


class EndTokenEncoder(TextEncoderBackbone):
    """A `TextEncoderBackbone` in which no token sees what stands behind it.

    So the hidden states of the end token are of the whole text, and stand for it.
    """

    config_class = EndTokenConfig

    def pool(self, hidden: Tensor, token_ids: Tensor) -> Any:
        """Returns the hidden states of the end tokens: (B, T, D), (B, T) -> (B, D)."""
        end = self.config.end_token_id
        if end is not None:
            token_ids = keras.ops.cast(keras.ops.equal(token_ids, end), "int32")
        # Of equal numbers the first counts, as padding may be the end token too.
        place = keras.ops.argmax(token_ids, axis=1)
        return Reordered()(hidden, keras.ops.expand_dims(place, 1))[:, 0]
