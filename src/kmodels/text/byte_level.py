"""Byte-level byte-pair encoding (Radford et al. 2019) of Qwen, Llama 3 and CLIP."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from kmodels.core.errors import InputError
from kmodels.core.files import limited
from kmodels.core.remote import local_copy
from kmodels.core.schema import read_json


class Kind(NamedTuple):
    """The steps before and around the merges of a tokenizer.

    Attributes:
        pattern: regular expression of the pieces of a text that merges stay within.
        normalizes: True for Unicode NFC before that.
        ignores_merges: True if a piece that is in the vocabulary is a token whatever the merges.
        adds_start: True if a text begins with the start token unless a file says otherwise.
    """

    pattern: str
    normalizes: bool
    ignores_merges: bool
    adds_start: bool


_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By llama.cpp's names: Qwen 2 and 3 (transformers' `Qwen2Tokenizer`), and Llama 3.
KINDS = {
    "qwen2": Kind(_PATTERN.replace("DIGITS", r"\p{N}"), True, False, False),
    "llama-bpe": Kind(_PATTERN.replace("DIGITS", r"\p{N}{1,3}"), False, True, True),
}
# How CLIP cuts a text, whose words end with a mark: transformers' `CLIPTokenizer`.
START, END = "<|startoftext|>", "<|endoftext|>"
WORDS = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)
WORD_END = "</w>"
# What stands for a blank among the letters that stand for bytes.
BLANK = "\u0120"
# Sixteen times the largest vocabulary of a published model.
MOST_IDS = 2**24


def build(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    special: Sequence[str] = (),
    added: Sequence[str] = (),
    kind: str = "qwen2",
) -> Tokenizer:
    """Makes a tokenizer of a kind of `KINDS`, with merges in their order.

    Control tokens, `special`, and other tokens, `added`, are cut out of a text first; those that
    the vocabulary lacks get the next ids.
    """
    way = KINDS[kind]
    core = Tokenizer(
        models.BPE(vocab=dict(vocabulary), merges=list(merges), ignore_merges=way.ignores_merges)
    )
    if way.normalizes:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(way.pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return core


def build_words(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], special: Sequence[str] = ()
) -> Tokenizer:
    """Makes a tokenizer of words in small letters, each of which ends with `WORD_END`, as CLIP's.

    The vocabulary has `START` and `END`, which stands for unknown text too; see `build`.
    """
    if missing := [text for text in (START, END) if text not in vocabulary]:
        raise InputError(f"the vocabulary lacks {' and '.join(missing)}; give that of a CLIP model")
    core = Tokenizer(
        models.BPE(
            vocab=dict(vocabulary),
            merges=list(merges),
            end_of_word_suffix=WORD_END,
            continuing_subword_prefix="",
            unk_token=END,
        )
    )
    one_blank = normalizers.Replace(Regex(r"\s+"), " ")
    core.normalizer = normalizers.Sequence([normalizers.NFC(), one_blank, normalizers.Lowercase()])
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = words_decoder()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    ids = [(text, vocabulary[text]) for text in (START, END)]
    core.post_processor = TemplateProcessing(
        single=f"{START} $A {END}", pair=f"{START} $A {END} {END} $B {END}", special_tokens=ids
    )
    return core


def words_decoder() -> decoders.Decoder:
    """Returns the decoder of tokens that end words with `WORD_END`."""
    ends = [decoders.Replace(Regex(f"{WORD_END}$"), BLANK), decoders.ByteLevel()]
    return decoders.Sequence([*ends, decoders.Replace(Regex(" $"), "")])


def read(
    vocabulary: Mapping[str, int] | str | Path,
    merges: Sequence[str] | str | Path | None,
    special: Sequence[str] = (),
    build: Callable[..., Tokenizer] = build,
) -> Tokenizer:
    """Makes a tokenizer from the arguments of keras-hub's classes.

    Args:
        vocabulary: token to id, or the path of a vocab.json.
        merges: pairs of tokens with a blank between them, or the path of a merges.txt.
        special: see `build`.
        build: makes it of token to id, pairs and special tokens.
    """
    if merges is None:
        raise InputError("a vocabulary of byte-level merges needs merges; give the merges.txt too")
    if isinstance(vocabulary, str | Path):
        vocabulary = read_json(local_copy(vocabulary))
    if isinstance(merges, str | Path):
        lines = _text(merges).splitlines()
        merges = [line for line in lines if line and not line.startswith("#version")]
    if not isinstance(vocabulary, Mapping):
        raise InputError(
            f"vocabulary is a {type(vocabulary).__name__}; give token to id, or the path of a "
            "vocab.json"
        )
    check_ids(vocabulary, "vocabulary")
    return build(vocabulary, pairs(merges), special)


def check_ids(vocabulary: Mapping[str, int], origin: object) -> None:
    """Raises `InputError` for an id that no vocabulary has.

    Everything that writes or lists a vocabulary counts up to its largest id.
    """
    for text, number in vocabulary.items():
        if type(number) is not int or not 0 <= number < MOST_IDS:
            raise InputError(
                f"{origin}: the id of {text!r} is {number!r}; give a whole number from 0 to "
                f"{MOST_IDS - 1}"
            )


def pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Returns merges that are written with a blank between the two tokens."""
    parts = []
    for line in merges:
        left, blank, right = line.partition(" ")
        if not (left and blank and right):
            raise InputError(f"{line!r} is not a merge; give two tokens with a blank between them")
        parts.append((left, right))
    return parts


def _text(path: str | Path) -> str:
    try:
        return limited(local_copy(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
