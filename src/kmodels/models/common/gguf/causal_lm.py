"""Causal models that llama.cpp runs."""

from pathlib import Path
from typing import ClassVar

from kmodels import presets
from kmodels.models.common.causal_lm import CausalLM
from kmodels.models.common.gguf.writing import GGUFExport


class GGUFCausalLM(CausalLM):
    """A `CausalLM` that GGUF files hold; the base of those families that llama.cpp has as well.

    Attributes:
        gguf_export: the way of the family's models into such files.
    """

    gguf_export: ClassVar[GGUFExport]

    def export_to_gguf(
        self, path: str | Path, dtype: str = "float16", text_only: bool = False
    ) -> Path:
        """Writes a GGUF file that llama.cpp runs, atomically, with the tokenizer if there is one.

        Args:
            path: ends in .gguf.
            dtype: how kernels and embeddings are stored: "float32", "bfloat16", "float16", or
                "q8_0" for 8 bits with a scale for every 32.
            text_only: writes the text part of a checkpoint whose other parts were left out.

        Raises:
            InputError: for a model with adapters, one that llama.cpp's model of this name cannot
                express, or without the gguf package.
        """
        presets.check_parts(self, text_only, "a GGUF file")
        return self.gguf_export.write(self, path, dtype)
