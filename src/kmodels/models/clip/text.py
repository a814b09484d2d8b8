"""Text to what a CLIP text tower takes, and back."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tokenizers

from kmodels.core.errors import InputError
from kmodels.models.common.image_text.image_converter import ImageConverter
from kmodels.models.common.image_text.prompts import PromptsAndImages
from kmodels.models.common.tokenizer import BytePairTokenizer
from kmodels.text import Tokenizer
from kmodels.text import settings as described
from kmodels.text.byte_level import END, START, build_words, read, words_decoder


@keras.saving.register_keras_serializable(package="kmodels")
class CLIPTokenizer(BytePairTokenizer):
    """`BytePairTokenizer` of words in small letters, between <|startoftext|> and <|endoftext|>.

    Args:
        vocabulary: as of `BytePairTokenizer`.
        merges: see there.
        pad_with_end_token: fills rows with the end token, and not with the token of id 0; what a
            checkpoint's own files say counts before it, and there the end token is the default.
        **kwargs: of `LayerTokenizer`.
    """

    roles = {"start": START, "end": END}  # noqa: RUF012
    control_tokens = (START, END)
    build_core = staticmethod(build_words)
    unknown_token = END
    # A row's text begins at the first position.
    idle_at = {"padding_side": ("right",)}  # noqa: RUF012

    def __init__(
        self,
        vocabulary: tokenizers.Tokenizer | Mapping[str, int] | str | Path,
        merges: Sequence[str] | str | Path | None = None,
        pad_with_end_token: bool = False,
        **kwargs: Any,
    ):
        pad = described.names(kwargs.get("settings") or {}).get("pad", END)
        if not isinstance(vocabulary, tokenizers.Tokenizer):
            vocabulary = read(vocabulary, merges, self.control_tokens, self.build_core)
            pad = END if pad_with_end_token else vocabulary.id_to_token(0)
        vocabulary.decoder = words_decoder()
        # Ids that config.json names as the end of a text are about pooling; nothing is generated.
        super().__init__(vocabulary, **{"pad": pad, **kwargs, "stop": ()})


@keras.saving.register_keras_serializable(package="kmodels")
class CLIPPreprocessor(PromptsAndImages):
    """`PromptsAndImages` of CLIP, by default for rows of 77 tokens.

    Args:
        tokenizer: as of `PromptsAndImages`.
        image_converter: a `CLIPImageConverter`, or None for texts alone.
        sequence_length: see there.
        add_start_token: see there.
        add_end_token: see there.
        to_lower: True, as by default in keras-hub: the tokenizer lowercases all texts.
        **kwargs: see there.

    Raises:
        InputError: as there, or for `to_lower=False`.
    """

    family = "clip"
    tokenizer_class = CLIPTokenizer
    reader = "CLIP's text tower"

    def __init__(
        self,
        tokenizer: Tokenizer | Mapping[str, Any] | str | Path,
        image_converter: ImageConverter | Mapping[str, Any] | None = None,
        sequence_length: int = 77,
        add_start_token: bool = True,
        add_end_token: bool = True,
        to_lower: bool = True,
        **kwargs: Any,
    ):
        if not to_lower:
            raise InputError(
                f"to_lower is {to_lower}, but CLIP's tokenizer lowercases all texts; leave it out"
            )
        ends = (add_start_token, add_end_token)
        super().__init__(tokenizer, image_converter, sequence_length, *ends, **kwargs)
