"""Settings of a tokenizer_config.json and the files with it."""

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from kmodels.core.errors import InputError, one_line
from kmodels.core.files import limited
from kmodels.core.schema import read_optional, warn_of_unknown

CONFIG = "tokenizer_config.json"
TEMPLATE, TEMPLATE_OF_PROCESSOR = "chat_template.jinja", "chat_template.json"
ADDED, NAMES = "added_tokens.json", "special_tokens_map.json"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
MORE_TEMPLATES = "additional_chat_templates"
# Both name the ids that end a generated text, and need not agree.
WITH_STOPS = ("config.json", "generation_config.json")
ROLES = {"start": "bos_token", "end": "eos_token", "pad": "pad_token"}
# In the order in which transformers gives ids to those that a vocabulary lacks.
NAMED = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
# What kmodels writes besides: ids of further tokens that end a text.
STOPS = "stop_tokens"
DEFAULT = "default"
# Every setting of a tokenizer in transformers 5.23. First those that are read, by kmodels or by the
# tokenizer.json that they stand beside, and the names of control tokens.
READ = {
    *("add_bos_token", "add_eos_token", "added_tokens_decoder", "additional_special_tokens"),
    *("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"),
    *("chat_template", "clean_up_tokenization_spaces", "extra_special_tokens"),
    *("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",),
    *("model_max_length", "model_specific_special_tokens", "split_special_tokens"),
}
# Notes, files, arguments of single calls, what only parses replies, and what transformers' classes
# for Gemma, Qwen, CLIP and SigLIP do not use. Rows are masked, so that it does not matter to a
# decoder on which side they are padded.
IDLE = {
    *("_commit_hash", "auto_map", "backend", "chat_control_tokens", "device_map", "do_lower_case"),
    *("errors", "files_loaded", "from_slow", "init_inputs", "is_local", "legacy"),
    *("local_files_only", "max_len", "max_length", "merges_file", "model_input_names"),
    *("name_or_path", "pad_to_multiple_of", "pad_token_type_id", "padding_side"),
    *("processor_class", "response_schema", "response_template", "spaces_between_special_tokens"),
    *("special_tokens_map_file", "special_tokens_pattern", "stride", "tokenizer_class"),
    *("tokenizer_file", "token_type_ids_include_special_tokens", "token_type_ids_pattern"),
    *("truncation_strategy", "trust_remote_code", "use_default_system_prompt", "use_fast"),
    *("verbose", "vocab_file"),
}
# What is followed at these values alone.
IDLE_AT: dict[str, tuple[object, ...]] = {
    "add_prefix_space": (False,),
    "fix_mistral_regex": (False,),
    "sp_model_kwargs": ({},),
    "truncation_side": ("right",),
}
# What transformers takes blanks away before, and what it leaves of it.
CLEAN = {
    **{" .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'", " n't": "n't", " 'm": "'m"},
    **{" 's": "'s", " 've": "'ve", " 're": "'re"},
}


def read(
    directory: Path, idle_at: Mapping[str, Collection[object]] = MappingProxyType({})
) -> dict[str, Any]:
    """Returns the settings of a directory, its chat templates among them as "chat_template".

    A template has the place that transformers gives it: chat_template.jinja counts before
    tokenizer_config.json, and that before a processor's chat_template.json. As there, the names of
    tokens in special_tokens_map.json count if tokenizer_config.json has no added_tokens_decoder. A
    setting that the tokenizer does not follow is logged as a warning; one of `idle_at` or `IDLE_AT`
    is followed at some values alone.

    Raises:
        InputError: for a file that is not JSON or not UTF-8.
    """
    settings = read_optional(directory / CONFIG)
    named = {} if "added_tokens_decoder" in settings else read_optional(directory / NAMES)
    for name, described in ((CONFIG, settings), (NAMES, named)):
        known = READ | IDLE | {STOPS} | set(_own_tokens(described))
        warn_of_unknown(directory / name, described, known, {**IDLE_AT, **idle_at})
    for key, value in named.items():
        before = settings.get(key)
        settings[key] = [*before, *value] if isinstance(before, list) else value
    files = {
        DEFAULT: directory / TEMPLATE,
        **{file.stem: file for file in sorted((directory / MORE_TEMPLATES).glob("*.jinja"))},
    }
    if templates := {name: _text(file) for name, file in files.items() if file.is_file()}:
        alone = list(templates) == [DEFAULT]
        settings["chat_template"] = templates[DEFAULT] if alone else templates
    elif settings.get("chat_template") is None:
        of_processor = read_optional(directory / TEMPLATE_OF_PROCESSOR).get("chat_template")
        if of_processor is not None:
            settings["chat_template"] = of_processor
    if isinstance(several := settings.get("chat_template"), list):
        settings["chat_template"] = {one["name"]: one["template"] for one in several}
    return settings


def read_stops(directory: Path) -> list[int]:
    """Returns the ids that config.json and generation_config.json say end a text, in order."""
    stops: dict[int, None] = {}
    for name in WITH_STOPS:
        description = read_optional(directory / name)
        for part in (description, description.get("text_config")):
            ids = (part or {}).get("eos_token_id")
            stops |= {i: None for i in (ids if isinstance(ids, list) else [ids]) if i is not None}
    return list(stops)


def added_tokens(directory: Path) -> dict[int, tokenizers.AddedToken]:
    """Returns the tokens that added_tokens.json and tokenizer_config.json name, by their ids."""
    tokens: dict[int, tokenizers.AddedToken] = {}
    try:
        for text, number in read_optional(directory / ADDED).items():
            tokens[int(number)] = tokenizers.AddedToken(text, normalized=False)
        decoder = read_optional(directory / CONFIG).get("added_tokens_decoder") or {}
        for number, token in decoder.items():
            flags = {name: bool(token.get(name, False)) for name in FLAGS}
            tokens[int(number)] = tokenizers.AddedToken(token["content"], **flags)
    except ValueError as error:
        raise InputError(f"{directory / CONFIG}: a key of added_tokens_decoder: {error}") from None
    return tokens


def control_tokens(settings: Mapping[str, Any]) -> list[tokenizers.AddedToken]:
    """Returns the tokens that settings name, all of which transformers cuts out of a text."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    entries = [settings.get(name) for name in NAMED]
    own = [settings[name] for name in _own_tokens(settings)]
    if isinstance(extra, Mapping):
        own, extra = [*own, *extra.values()], []
    # As in transformers, those that are named one by one count before those in an object.
    entries += own or (settings.get("model_specific_special_tokens") or {}).values()
    entries += extra
    tokens = {}
    for entry in entries:
        if (text := token_text(entry)) and text not in tokens:
            flags = entry if isinstance(entry, Mapping) else {}
            flags = {name: bool(flags.get(name, False)) for name in FLAGS}
            tokens[text] = tokenizers.AddedToken(text, **{**flags, "special": True})
    return list(tokens.values())


def _own_tokens(settings: Mapping[str, Any]) -> list[str]:
    """Returns the names of tokens that only some models have, such as "image_token"."""
    return [
        name
        for name, value in settings.items()
        if name.endswith("_token") and name not in NAMED and token_text(value)
    ]


def clean_up(text: str) -> str:
    """Returns a text as `clean_up_tokenization_spaces` leaves it."""
    for before, after in CLEAN.items():
        text = text.replace(before, after)
    return text


def names(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of the start, end and padding tokens that are named."""
    texts = {role: token_text(settings.get(key)) for role, key in ROLES.items()}
    return {role: text for role, text in texts.items() if text is not None}


def with_names(settings: Mapping[str, Any], roles: Mapping[str, str | None]) -> dict[str, Any]:
    """Returns the settings to write; unchanged tokens keep their attributes."""
    named = dict(settings)
    for role, text in roles.items():
        # A start token that is named and not used (add_bos_token is false) keeps its name.
        if text is not None and token_text(named.get(key := ROLES[role])) != text:
            named[key] = text
    templates = named.get("chat_template")
    if isinstance(templates, Mapping):
        pairs = templates.items()
        named["chat_template"] = [{"name": name, "template": text} for name, text in pairs]
    return named


def token_text(token: object) -> str | None:
    """Returns the text of a token, which may be written with its properties."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None


def _text(path: Path) -> str:
    try:
        return limited(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {one_line(error)}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 at byte {error.start + 1}") from error
