"""A small tokenizer trained on a few texts, for demonstrations and tests."""

import json
from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from kmodels.text.pieces import SPACE
from kmodels.text.tokenizer import Tokenizer

__all__ = ["IMAGES", "train_tokenizer"]

# Gemma's order: ids 0 to 3, then the markers of turns, then the 256 bytes.
_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
SMALLEST = len(_SPECIAL) + len(_BYTES) + 128


# Special tokens of models with images; they come last.
IMAGES = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")


def train_tokenizer(
    texts: Iterable[str], vocabulary_size: int = 1024, special_tokens: Sequence[str] = ()
) -> Tokenizer:
    """Trains byte-pair merges on texts; the same texts give the same tokenizer.

    It is built like Gemma's: it keeps blanks, and encodes unknown characters as bytes.

    Args:
        texts: training texts.
        vocabulary_size: most ids, at least `SMALLEST`; fewer if the texts give no more.
        special_tokens: further ones behind all others, such as `IMAGES`.

    Returns:
        A tokenizer with Gemma's special tokens.
    """
    learner = tokenizers.Tokenizer(BPE())
    _split(learner)
    learner.train_from_iterator(
        texts,
        BpeTrainer(
            vocab_size=max(vocabulary_size, SMALLEST) - len(_SPECIAL) - len(_BYTES),
            show_progress=False,
        ),
    )
    learnt = json.loads(learner.to_str())["model"]
    pieces = sorted(learnt["vocab"], key=learnt["vocab"].get)
    core = tokenizers.Tokenizer(
        BPE(
            vocab={text: i for i, text in enumerate((*_SPECIAL, *_BYTES, *pieces))},
            merges=[tuple(pair) for pair in learnt["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    _split(core)
    core.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.add_special_tokens([*_SPECIAL, *special_tokens])
    stop = [_SPECIAL.index("<end_of_turn>")]
    return Tokenizer(core, start="<bos>", end="<eos>", pad="<pad>", stop=stop)


def _split(core: tokenizers.Tokenizer) -> None:
    """Words with the blank before them, single digits, single line ends."""
    core.normalizer = normalizers.Replace(" ", SPACE)
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(SPACE, "merged_with_next"),
            pre_tokenizers.Split(Regex(r"\n|\d"), "isolated"),
        ]
    )
