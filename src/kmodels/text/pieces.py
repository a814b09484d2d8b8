"""A tokenizer out of the pieces of a SentencePiece model, as .model and GGUF files hold them."""

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordLevel

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class Piece(NamedTuple):
    """One entry of the vocabulary; its id is its place.

    The text has SPACE for a blank; the score is a log-probability (unigram) or minus the rank of
    the merge (BPE); kinds are NORMAL to BYTE, as above.
    """

    text: str
    score: float
    kind: int


def merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Returns the pairs of pieces that BPE by score merges, the first to be merged first.

    SentencePiece merges the two neighbours whose union scores highest. Every way to split a piece
    into two others is such a merge, with the score of the union.
    """
    parts = {p.text: i for i, p in enumerate(pieces) if p.kind in (NORMAL, UNUSED)}
    ranked = []
    for piece in pieces:
        if piece.kind not in (NORMAL, UNUSED):
            continue
        text = piece.text
        for cut in range(1, len(text)):
            left, right = parts.get(text[:cut]), parts.get(text[cut:])
            if left is not None and right is not None:
                ranked.append((-piece.score, left, right))
    ranked.sort()
    return [(pieces[left].text, pieces[right].text) for _, left, right in ranked]


def normalizer(
    charsmap: bytes = b"", dummy_prefix: bool = False, remove_extra_whitespaces: bool = False
) -> normalizers.Normalizer:
    """Returns SentencePiece's normalization, which ends with SPACE for every blank.

    Args:
        charsmap: the compiled character map of the .model file; empty for none, as in Gemma.
        dummy_prefix: put a blank before the text.
        remove_extra_whitespaces: drop blanks at both ends and all but one in a run.
    """
    steps: list[normalizers.Normalizer] = []
    if charsmap:
        steps.append(normalizers.Precompiled(charsmap))
    if remove_extra_whitespaces:
        # Blanks alone; `Strip` would take line ends too.
        patterns = {r"\A +| +\z": "", " {2,}": " "}
        steps += [normalizers.Replace(Regex(text), to) for text, to in patterns.items()]
    if dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def build(
    pieces: Sequence[Piece],
    *,
    kind: str = "bpe",
    byte_fallback: bool = True,
    special: Sequence[str] = (),
    normalize: normalizers.Normalizer | None = None,
    dummy_prefix: bool = False,
    pairs: Sequence[tuple[str, str]] | None = None,
) -> Tokenizer:
    """Returns a tokenizer with the ids of SentencePiece, without start and end tokens.

    Args:
        pieces: the vocabulary in the order of ids.
        kind: "bpe", "unigram", or "word" if each word is one piece or unknown.
        byte_fallback: unknown characters become the pieces of their UTF-8 bytes.
        special: texts to treat as control tokens besides those of kind CONTROL.
        normalize: by default blanks become SPACE and nothing else is touched.
        dummy_prefix: `normalize` puts a blank in front, which decoding takes away.
        pairs: the merges, the first to be done first; by default those that scores make.
    """
    unknown = next((i for i, p in enumerate(pieces) if p.kind == UNKNOWN), None)
    if kind == "word":
        unknown_text = pieces[unknown or 0].text
        model = WordLevel({p.text: i for i, p in enumerate(pieces)}, unk_token=unknown_text)
    elif kind == "unigram":
        model = Unigram(
            [(p.text, p.score) for p in pieces], unk_id=unknown, byte_fallback=byte_fallback
        )
    else:
        model = BPE(
            vocab={p.text: i for i, p in enumerate(pieces)},
            merges=merges(pieces) if pairs is None else list(pairs),
            unk_token=None if unknown is None else pieces[unknown].text,
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    core = Tokenizer(model)
    if kind == "word":
        core.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    core.normalizer = normalize or normalizer()
    steps: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    core.decoder = decoders.Sequence(steps)
    core.add_tokens(
        [
            # One with a blank in it can match only after normalisation.
            AddedToken(p.text, normalized=SPACE in p.text, special=is_special)
            for p in pieces
            if (is_special := p.kind == CONTROL or p.text in special) or p.kind == USER_DEFINED
        ]
    )
    return core


# The opening of a turn to its end. Older vocabulary files do not declare them as control tokens.
ENDS_OF_TURNS = {"<start_of_turn>": "<end_of_turn>", "<|turn>": "<turn|>"}
TURNS = (*ENDS_OF_TURNS.keys(), *ENDS_OF_TURNS.values())
# What a reply of Gemma 4 is made of besides its words: reasoning, calls of functions, and what
# these gave. They are control tokens, yet a text without them could not be read any more.
MARKS = (
    *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>'),
)
