"""The tokenizer of a model goes into its GGUF file."""

from typing import TYPE_CHECKING

import keras

from kmodels.models.common.huggingface import tokenizer_in
from kmodels.text.gguf import BYTES, describe
from kmodels.text.pieces import ENDS_OF_TURNS
from kmodels.text.settings import with_names

if TYPE_CHECKING:
    import gguf

    from kmodels.text import Tokenizer


def add_vocabulary(
    writer: "gguf.GGUFWriter", model: keras.Model, kind: str, template: str | None
) -> None:
    """Adds tokens, the roles of some, and the chat template; says so where there is no tokenizer.

    Args:
        writer: writes the file.
        model: a causal model.
        kind: how the file holds the vocabulary, see `kmodels.text.gguf.describe`.
        template: see `GGUFForm`.

    Raises:
        InputError: for a tokenizer that a vocabulary of this kind cannot describe.
    """
    tokenizer = tokenizer_in(model)
    if tokenizer is None:
        writer.add_tokenizer_model("none")
        return
    found = describe(tokenizer.core, model.backbone.config.vocabulary_size, kind)
    writer.add_tokenizer_model(found.model)
    if found.pre is not None:
        writer.add_tokenizer_pre(found.pre)
    if found.merges:
        writer.add_token_merges(found.merges)
    writer.add_token_list(found.texts)
    if found.scores:
        writer.add_token_scores(found.scores)
    writer.add_token_types(found.kinds)
    if found.space_prefix is not None:
        writer.add_add_space_prefix(found.space_prefix)
    _add_roles(writer, tokenizer, kind)
    if found.unknown is not None:
        writer.add_unk_token_id(found.unknown)
    _add_chat(writer, tokenizer, template)


def _add_roles(writer: "gguf.GGUFWriter", tokenizer: "Tokenizer", kind: str) -> None:
    start = tokenizer.start_token_id
    writer.add_eos_token_id(tokenizer.end_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(start is not None)
    writer.add_add_eos_token(False)
    if start is None and kind == BYTES:
        # Where a file is silent, llama.cpp calls token 11 the start; published ones name this.
        start = tokenizer.pad_token_id
    if start is not None:
        writer.add_bos_token_id(start)


def _add_chat(writer: "gguf.GGUFWriter", tokenizer: "Tokenizer", template: str | None) -> None:
    templates = with_names({"chat_template": tokenizer.chat_template}, {})["chat_template"]
    for start, end in ENDS_OF_TURNS.items():
        if (number := tokenizer.core.token_to_id(end)) is not None:
            writer.add_eot_token_id(number)
            if template is not None and not templates:
                templates = template.replace("<START>", start).replace("<END>", end)
            break
    if templates:
        writer.add_chat_template(templates)
