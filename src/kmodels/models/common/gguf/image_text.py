"""Text and vision encoder of a causal model with images, read from two GGUF files."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.models.common.gguf.mmproj import ENCODER, Projector
from kmodels.models.common.gguf.reading import GGUFFormat
from kmodels.weights import SourceCheckpoint
from kmodels.weights.gguf import open_gguf, setting

BESIDE = "mmproj*.gguf"


@dataclass(frozen=True)
class GGUFImageTextFormat:
    """Two GGUF files of a family, as `Family.formats` wants them; the path is that of the text.

    Args:
        text: format of the text.
        projector: of the vision encoder.
        config_class: config class of the family, which has `encoder()`.
        image_token: text of the token that an image fills.
    """

    text: GGUFFormat
    projector: Projector
    config_class: Callable[..., Any]
    image_token: str = "<image_soft_token>"

    def matches(self, path: Path, description: dict[str, Any]) -> bool:
        """Returns whether this is a GGUF file."""
        return self.text.matches(path, description)

    def open_checkpoint(
        self, path: Path, description: dict[str, Any], given: dict[str, Any], weights: bool
    ) -> SourceCheckpoint:
        """Understands the file of a text, and that of the vision encoder beside it.

        Args:
            path: path of the text's file.
            description: ignored; the files describe themselves.
            given: unused; the files say it all.
            weights: False where only the architecture is wanted.

        Raises:
            InputError: as of the format of the text, or where not one projector lies beside it.
        """
        text = self.text.open_checkpoint(path, description, given, weights)
        found = sorted(path.parent.glob(BESIDE))
        if len(found) != 1:
            names = ", ".join(file.name for file in found) or "nothing"
            raise InputError(
                f"{path} holds the text alone, and {names} called {BESIDE} lies beside it; put the "
                "one projector of its checkpoint there"
            )
        opened = self.projector.open(found[0], text.backbone["hidden_dim"], weights)
        backbone = {**text.backbone, ENCODER: opened.fields}
        tokens = setting(open_gguf(path), "tokenizer.ggml.tokens", [])
        if self.image_token in tokens:
            backbone["image_token_id"] = tokens.index(self.image_token)
        config = self.config_class(**backbone)
        preprocessor = text.preprocessor and {
            **text.preprocessor,
            "num_vision_tokens_per_image": config.num_vision_tokens_per_image,
            "image_converter": {
                "image_size": list(config.image_shape[:2]),
                "scale": [1 / (255 * x) for x in opened.std],
                "offset": [-m / x for m, x in zip(opened.mean, opened.std, strict=True)],
            },
        }
        return replace(
            text,
            backbone=backbone,
            preprocessor=preprocessor,
            tensors={**text.tensors, **opened.tensors},
            rules=[*text.rules, *self.projector.rules(config.encoder(name=ENCODER))],
        )
