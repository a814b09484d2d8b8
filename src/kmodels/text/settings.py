"""The settings that Hugging Face keeps beside a vocabulary."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from kmodels.core.errors import InputError
from kmodels.core.schema import read_json

CONFIG = "tokenizer_config.json"
TEMPLATE, TEMPLATE_OF_PROCESSOR = "chat_template.jinja", "chat_template.json"
ADDED = "added_tokens.json"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
MORE_TEMPLATES = "additional_chat_templates"
# Both name the ids that end a generated text, and need not agree.
WITH_STOPS = ("config.json", "generation_config.json")
ROLES = {"start": "bos_token", "end": "eos_token", "pad": "pad_token"}
DEFAULT = "default"


def read(directory: Path) -> dict[str, Any]:
    """Returns the settings of a directory, its chat templates among them as "chat_template".

    A template has the place that transformers gives it: chat_template.jinja counts before
    tokenizer_config.json, and that before a processor's chat_template.json.

    Args:
        directory: which may hold none of these files.

    Raises:
        InputError: for a file that is not JSON or not UTF-8.
    """
    settings = _json(directory / CONFIG)
    files = {
        DEFAULT: directory / TEMPLATE,
        **{file.stem: file for file in sorted((directory / MORE_TEMPLATES).glob("*.jinja"))},
    }
    if found := {name: _text(file) for name, file in files.items() if file.is_file()}:
        settings["chat_template"] = found[DEFAULT] if list(found) == [DEFAULT] else found
    elif settings.get("chat_template") is None:
        of_processor = _json(directory / TEMPLATE_OF_PROCESSOR).get("chat_template")
        if of_processor is not None:
            settings["chat_template"] = of_processor
    if isinstance(several := settings.get("chat_template"), list):
        settings["chat_template"] = {one["name"]: one["template"] for one in several}
    return settings


def read_stops(directory: Path) -> list[int]:
    """Returns the ids that config.json and generation_config.json say end a text, in order."""
    found: dict[int, None] = {}
    for name in WITH_STOPS:
        description = _json(directory / name)
        for part in (description, description.get("text_config")):
            ids = (part or {}).get("eos_token_id")
            found |= {i: None for i in (ids if isinstance(ids, list) else [ids]) if i is not None}
    return list(found)


def added_tokens(directory: Path) -> dict[int, tokenizers.AddedToken]:
    """Returns the tokens that added_tokens.json and tokenizer_config.json name, by their ids.

    Raises:
        InputError: for entries of another form.
    """
    tokens: dict[int, tokenizers.AddedToken] = {}
    try:
        for text, number in _json(directory / ADDED).items():
            tokens[int(number)] = tokenizers.AddedToken(text, normalized=False)
        for number, token in (_json(directory / CONFIG).get("added_tokens_decoder") or {}).items():
            flags = {name: bool(token.get(name, False)) for name in FLAGS}
            tokens[int(number)] = tokenizers.AddedToken(token["content"], **flags)
    except ValueError as error:
        raise InputError(f"{directory / CONFIG}: a key of added_tokens_decoder: {error}") from None
    return tokens


def names(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of the start, end and padding tokens that are named."""
    texts = {role: token_text(settings.get(key)) for role, key in ROLES.items()}
    return {role: text for role, text in texts.items() if text is not None}


def with_names(settings: Mapping[str, Any], roles: Mapping[str, str | None]) -> dict[str, Any]:
    """Returns the settings to write; unchanged tokens keep all that was said of them."""
    found = dict(settings)
    for role, text in roles.items():
        # A start token that is named and not used (add_bos_token is false) keeps its name.
        if text is not None and token_text(found.get(key := ROLES[role])) != text:
            found[key] = text
    templates = found.get("chat_template")
    if isinstance(templates, Mapping):
        pairs = templates.items()
        found["chat_template"] = [{"name": name, "template": text} for name, text in pairs]
    return found


def token_text(token: object) -> str | None:
    """Returns the text of a token, which may be written with its properties."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 at byte {error.start + 1}") from error
