"""SentencePiece .model files written without the sentencepiece package."""

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from kmodels.text import gguf_writer
from kmodels.text.pieces import NORMAL, USER_DEFINED
from kmodels.text.sentencepiece_proto import model_class

BPE = 2


def dump(core: Tokenizer, roles: Mapping[str, int | None], marks: Sequence[str] = ()) -> bytes:
    """Returns the content of a .model file.

    Args:
        core: merges pieces, with blanks as SPACE and bytes for what is unknown.
        roles: ids of "bos", "eos" and "pad", None for one that is not there.
        marks: control tokens that the file shall find in texts, as kmodels does.

    Returns:
        Bytes that give the same ids; the scores are the ranks of the merges.

    Raises:
        InputError: for what such a file has no place for.
    """
    instead = "save it as tokenizer.json, or give preprocessor=False"
    rows, file = core.get_vocab_size(), "a SentencePiece file"
    found = gguf_writer.describe(core, rows, file=file, instead=instead)
    ids = {**roles, "unk": found.unknown}
    model = model_class()()
    for text, score, kind in zip(found.texts, found.scores, found.kinds, strict=True):
        piece = model.pieces.add(piece=text.encode(), score=score)
        if (kind := USER_DEFINED if text in marks else kind) != NORMAL:
            piece.type = kind
    trainer = model.trainer_spec
    trainer.model_type, trainer.vocab_size, trainer.byte_fallback = BPE, len(found.texts), True
    for name in ("unk", "bos", "eos", "pad"):
        number = ids[name]
        setattr(trainer, f"{name}_id", -1 if number is None else number)
        if number is not None:
            setattr(trainer, f"{name}_piece", found.texts[number].encode())
    # Blanks at the ends and runs of them stay as they are; a character map there is none.
    rules = model.normalizer_spec
    rules.name, rules.add_dummy_prefix = b"identity", found.space_prefix
    rules.remove_extra_whitespaces, rules.escape_whitespaces = False, True
    return model.SerializeToString(deterministic=True)
