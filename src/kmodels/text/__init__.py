"""Text for language models: records, templates, tokenizers, examples and batches of rows.

A record is read (`records`), written as text (`templates`, `chat`), tokenized (`tokenizer`), cut
and packed into rows (`packing`), and batched (`loader`). Each module is loaded on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors
    from kmodels.text.loader import RecordLoader, TextLoader
    from kmodels.text.packing import Cut, Example, encode, pack, pad
    from kmodels.text.preferences import (
        encode_labelled,
        encode_pairs,
        read_labelled,
        read_pairs,
        read_prompts,
    )
    from kmodels.text.records import Records, read_records
    from kmodels.text.templates import Template, Turns
    from kmodels.text.tokenizer import Tokenizer

_MODULES = {
    **dict.fromkeys(("Records", "read_records"), "records"),
    **dict.fromkeys(("Template", "Turns"), "templates"),
    "Tokenizer": "tokenizer",
    **dict.fromkeys(("Cut", "Example", "encode", "pack", "pad"), "packing"),
    **dict.fromkeys(("RecordLoader", "TextLoader"), "loader"),
    **dict.fromkeys(
        ("encode_labelled", "encode_pairs", "read_labelled", "read_pairs", "read_prompts"),
        "preferences",
    ),
}

__all__ = [
    "Cut",
    "Example",
    "RecordLoader",
    "Records",
    "Template",
    "TextLoader",
    "Tokenizer",
    "Turns",
    "encode",
    "encode_labelled",
    "encode_pairs",
    "pack",
    "pad",
    "read_labelled",
    "read_pairs",
    "read_prompts",
    "read_records",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(f"kmodels.text.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'kmodels.text' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
