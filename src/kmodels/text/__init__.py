"""Text for language models: tokenizers, records, templates, examples and rows."""

from kmodels.text.loader import RecordLoader, TextLoader
from kmodels.text.packing import Cut, Example, encode, pack, pad
from kmodels.text.preferences import encode_pairs, read_pairs
from kmodels.text.record_files import read_records
from kmodels.text.records import Records
from kmodels.text.templates import Template, Turns
from kmodels.text.tokenizer import Tokenizer

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
    "encode_pairs",
    "pack",
    "pad",
    "read_pairs",
    "read_records",
]
