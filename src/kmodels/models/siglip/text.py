"""Text to what a SigLIP text tower takes, and back."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import keras
import tokenizers
from tokenizers import Regex, normalizers

from kmodels.core.errors import InputError
from kmodels.core.remote import local_copy
from kmodels.data.formats import protobuf
from kmodels.models.common.image_text.image_converter import ImageConverter
from kmodels.models.common.image_text.prompts import PromptsAndImages
from kmodels.models.common.tokenizer import LayerTokenizer
from kmodels.text import Tokenizer, sentencepiece
from kmodels.text import settings as described
from kmodels.text.pieces import SPACE
from kmodels.text.sentencepiece import model_class

log = logging.getLogger("kmodels")
PIECES = "spiece.model"
# The end token of SigLIP's own vocabulary, which pads too; SigLIP 2 has Gemma's.
END = "</s>"
PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]\^_`{|}~]"""


@keras.saving.register_keras_serializable(package="kmodels")
class SigLIPTokenizer(LayerTokenizer):
    """A `kmodels.text.Tokenizer` of words in small letters, as SigLIP and SigLIP 2 read them.

    SigLIP's own vocabulary ("spiece.model") reads no punctuation: it is taken out as in the
    training, and runs of blanks become one; with `do_lower_case` false in the settings, capital
    letters stay. SigLIP 2 reads punctuation, with Gemma's vocabulary.

    Args:
        proto: the path of a SentencePiece model, its content, or that in base64; also a
            `tokenizers.Tokenizer`.
        **kwargs: of `LayerTokenizer`.

    Raises:
        InputError: for a file that is not a SentencePiece model.
    """

    unknown_token = "<unk>"
    # Rows have no mask.
    idle_at = {"padding_side": ("right",)}  # noqa: RUF012

    def __init__(self, proto: tokenizers.Tokenizer | str | Path | bytes, **kwargs: Any):
        if isinstance(proto, tokenizers.Tokenizer):
            core = proto
        else:
            content, origin = sentencepiece.content_of(proto)
            core, named = sentencepiece.parse(content, origin)
            if core.token_to_id(END) is not None:
                core.normalizer = _plain_words(content)
                named = {**named, "pad": END}
            kwargs = {**named, **kwargs}
        own, settings = core.normalizer, kwargs.get("settings") or {}
        keeps_case = core.token_to_id(END) is not None and settings.get("do_lower_case") is False
        # In a text of a file the first step stands first.
        if not keeps_case and (own is None or '"type":"Lowercase"' not in core.to_str()):
            steps = [normalizers.Lowercase(), *([] if own is None else [own])]
            core.normalizer = normalizers.Sequence(steps)
        super().__init__(core, **{**kwargs, "stop": ()})

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text; of one without words it is a blank, as in transformers."""
        rows, blank = super().encode_batch(texts), self.core.token_to_id(SPACE)
        if blank is None or self.core.token_to_id(END) is None:
            return rows
        return [row or [blank] for row in rows]

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """As `Tokenizer.from_file`; a directory may hold spiece.model as well."""
        folder = local_copy(path)
        file = folder / PIECES if folder.is_dir() else folder
        if file.suffix not in (".model", ".spm") or not file.is_file():
            return super().from_file(folder)
        idle_at = {**cls.idle_at, "split_special_tokens": (False,)}
        settings = described.read(file.parent, idle_at)
        tokenizer = cls(file, settings=settings, **described.names(settings))
        added = described.added_tokens(file.parent).values()
        texts = {token.content for token in (*added, *described.control_tokens(settings))}
        usual = {*tokenizer.special_tokens, cls.unknown_token} - {tokenizer.pad_token}
        if more := texts - usual - {END}:
            log.warning(
                "%s names the tokens %s, which are not cut out of a text with SigLIP's own "
                "vocabulary; give the tokenizer.json of the model",
                file.parent / described.CONFIG,
                ", ".join(sorted(more)),
            )
        return tokenizer


@keras.saving.register_keras_serializable(package="kmodels")
class SigLIPPreprocessor(PromptsAndImages):
    """`PromptsAndImages` of SigLIP, by default for rows of 64 tokens without a start token.

    Args:
        tokenizer: as of `PromptsAndImages`.
        image_converter: a `SigLIPImageConverter`, or None for texts alone.
        sequence_length: see there.
        add_start_token: see there.
        add_end_token: see there.
        canonicalize_text: True, as by default in keras-hub: the tokenizer lowercases all texts, and
            SigLIP's own takes out punctuation.
        **kwargs: see there.

    Raises:
        InputError: as there, or for `canonicalize_text=False`.
    """

    family = "siglip"
    tokenizer_class = SigLIPTokenizer
    reader = "SigLIP"

    def __init__(
        self,
        tokenizer: Tokenizer | Mapping[str, Any] | str | Path,
        image_converter: ImageConverter | Mapping[str, Any] | None = None,
        sequence_length: int = 64,
        add_start_token: bool = False,
        add_end_token: bool = True,
        canonicalize_text: bool = True,
        **kwargs: Any,
    ):
        if not canonicalize_text:
            raise InputError(
                f"canonicalize_text is {canonicalize_text}, but SigLIP's tokenizer does it with "
                "all texts; leave it out"
            )
        ends = (add_start_token, add_end_token)
        super().__init__(tokenizer, image_converter, sequence_length, *ends, **kwargs)


def _plain_words(content: bytes) -> normalizers.Normalizer:
    """Returns what leaves words, each behind a blank, for a model's content."""
    rules = protobuf.parse(model_class(), content).normalizer_spec
    steps: list[normalizers.Normalizer] = [
        normalizers.Replace(Regex(PUNCTUATION), ""),
        normalizers.Replace(Regex(r"\s+"), " "),
        normalizers.Strip(left=False),
        normalizers.Prepend(SPACE),
    ]
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
