"""Causal models that llama.cpp runs."""

from pathlib import Path
from typing import ClassVar

from kmodels import presets
from kmodels.core.errors import InputError
from kmodels.models.common.causal_lm import CausalLM
from kmodels.models.common.gguf.mmproj import Projector
from kmodels.models.common.gguf.writing import GGUFExport


class GGUFCausalLM(CausalLM):
    """A `CausalLM` that GGUF files hold; the base of those families that llama.cpp has as well.

    Attributes:
        gguf_export: the way of the family's models into such files.
        projector: the way of the model's vision encoder into a file of its own; None without one.
    """

    gguf_export: ClassVar[GGUFExport]
    projector: ClassVar[Projector | None] = None

    def export_to_gguf(
        self,
        path: str | Path,
        dtype: str = "float16",
        text_only: bool = False,
        mmproj: str | Path | None = None,
    ) -> Path:
        """Writes a GGUF file that llama.cpp runs, atomically, with the tokenizer if there is one.

        The file of a model with images is that of its text; its vision encoder is another file.

        Args:
            path: ends in .gguf.
            dtype: how kernels and embeddings are stored: "float32", "bfloat16", "float16", or
                "q8_0" for 8 bits with a scale for every 32.
            text_only: writes the text part of a checkpoint whose other parts were left out, or of a
                model with images.
            mmproj: path for the vision encoder, which llama.cpp takes as `--mmproj`. `from_preset`
                reads it where it lies beside the text and its name begins with mmproj.

        Raises:
            InputError: for a model with adapters, one that llama.cpp's model of this name cannot
                express, or without the gguf package; for a model with images without either of
                `text_only` and `mmproj`, and `mmproj` for another model.
        """
        presets.check_parts(self, text_only, "a GGUF file")
        self.check_mmproj(path, dtype, text_only, mmproj)
        written = self.gguf_export.write(self, path, dtype)
        if self.projector is not None and mmproj is not None:
            self.projector.write(self, mmproj, dtype)
        return written

    def check_mmproj(
        self, path: str | Path, dtype: str, text_only: bool, mmproj: str | Path | None
    ) -> None:
        """Raises `InputError` for a vision encoder that nobody wants, or that cannot be written.

        Args:
            path: see `export_to_gguf`, like all that follow.
            dtype: see there.
            text_only: see there.
            mmproj: see there.
        """
        if self.projector is None:
            if mmproj is not None:
                raise InputError(f"{type(self).__name__} has no vision encoder; leave mmproj out")
        elif (mmproj is None) != text_only:
            raise InputError(
                f"a GGUF file of {type(self).__name__} holds the text alone; give mmproj=FILE for "
                "the vision encoder, or text_only=True to leave it out"
            )
        elif mmproj is not None:
            if Path(mmproj) == Path(path):
                raise InputError(f"mmproj is {mmproj}, where the text goes; give another name")
            self.projector.check(self, mmproj, dtype)
