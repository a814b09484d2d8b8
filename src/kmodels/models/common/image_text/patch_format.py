"""Hugging Face directories of a decoder that reads patches of images, and may hear sounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmodels.models.common import huggingface as decoder
from kmodels.models.common.config import DecoderConfig
from kmodels.models.common.image_text import patch_files
from kmodels.models.common.image_text.huggingface import ImageTextFormat
from kmodels.weights import LazyArray, Rule

AUDIO = ("audio_tower", "embed_audio")
LANGUAGE = "language_model."


@dataclass(frozen=True)
class PatchFormat(ImageTextFormat):
    """`ImageTextFormat` of directories whose parts for sounds are left out, by their names."""

    def parts(
        self, tensors: Mapping[str, LazyArray], config: DecoderConfig
    ) -> tuple[dict[str, LazyArray], Sequence[Rule], list[str]]:
        """See `ImageTextFormat.parts`."""
        audio = {name: part for name in tensors for part in AUDIO if f"{part}." in name}
        # Of the text: a tower has layers with such names too.
        unused = tuple(decoder.unused(config))
        kept = {
            name: tensor
            for name, tensor in tensors.items()
            if name not in audio and not (LANGUAGE in name and name.endswith(unused))
        }
        left_out = [part for part in AUDIO if part in audio.values()]
        return kept, self.table(config, "", "", ""), left_out

    def settings(self, path: Path) -> dict[str, Any]:
        """See `ImageTextFormat.settings`."""
        return patch_files.read(path, self.converter)
