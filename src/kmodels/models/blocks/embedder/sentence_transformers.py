"""Directories of sentence-transformers: modules after the transformer, read and written.

The transformer is in the directory itself, as transformers writes it; modules.json lists it and
the modules that work on its hidden states, each in a separate folder.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.core.files import is_inside
from kmodels.core.schema import SIZE, Needed, check_shape, read_json, read_optional, warn_of_unknown
from kmodels.models.blocks.huggingface import CONFIG, HuggingFaceFormat
from kmodels.weights import LazyArray, Rule, SourceCheckpoint, read_safetensors, transpose

# Modes of pooling.
MEAN, FIRST, LAST = "mean", "cls", "lasttoken"
MODES = (MEAN, FIRST, LAST)
MODULES, PROMPTS, SENTENCES = (
    *("modules.json", "config_sentence_transformers.json"),
    "sentence_bert_config.json",
)
OWN = "sentence_transformers."
TYPES = f"{OWN}models."
ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "linear",
    "torch.nn.modules.activation.Tanh": "tanh",
}
# What config.json of a pooling calls each mode before sentence-transformers 6, which reads it too.
LEGACY = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
# Settings by the class that reads them: the values at which the model computes the same, or None
# for a setting that is read here or changes no vector. Any other setting is warned of by name.
Known = Mapping[str, tuple[Any, ...] | None]
SAME_KEYS: Known = {
    "module_input_name": ("sentence_embedding",),
    "module_output_name": ("sentence_embedding", None),
}
KNOWN: dict[str, Known] = {
    "Transformer": {
        "transformer_task": ("feature-extraction",),
        "modality_config": None,
        "module_output_name": ("token_embeddings",),
        "processing_kwargs": None,
        "unpad_inputs": None,
        **dict.fromkeys(("query_length", "document_length", "query_expansion"), (None,)),
        "max_seq_length": None,
        "do_lower_case": (False,),
        "tokenizer_name_or_path": (None,),
        **dict.fromkeys(("model_kwargs", "model_args"), None),
        **dict.fromkeys(("processor_kwargs", "tokenizer_args"), ({}, None)),
        **dict.fromkeys(("config_kwargs", "config_args"), ({}, None)),
    },
    "Pooling": {
        **dict.fromkeys(("embedding_dimension", "word_embedding_dimension", "pooling_mode")),
        **dict.fromkeys(LEGACY.values()),
        "include_prompt": (True,),
    },
    "Dense": {
        **dict.fromkeys(("in_features", "out_features", "bias", "activation_function")),
        **SAME_KEYS,
        "use_residual": (False,),
    },
    "Normalize": SAME_KEYS,
    # config_sentence_transformers.json
    "SentenceTransformer": {
        "model_type": ("SentenceTransformer",),
        **dict.fromkeys(("__version__", "requirements", "prompts", "default_prompt_name")),
        **dict.fromkeys(("similarity_fn_name", "truncate_dim")),
    },
    # An entry of modules.json.
    "module": {**dict.fromkeys(("idx", "name", "path", "type")), "kwargs": ([], None)},
}
# How the transformer reads a text; that of images and sound, which the model has no encoder of,
# may be anything.
TEXT, AS_TEXT = "text", {"method": "forward", "method_output_name": "last_hidden_state"}
# Arguments of from_pretrained in transformers that change no number beyond its precision.
IDLE_ARGUMENTS = {
    *("add_pooling_layer", "attn_implementation", "device_map", "dtype", "low_cpu_mem_usage"),
    *("torch_dtype", "trust_remote_code", "use_safetensors"),
}
# transformers' default of `max_position_embeddings`.
POSITIONS = 131_072


class EmbedderFormat(HuggingFaceFormat):
    """`HuggingFaceFormat` of a family with an embedder, which reads modules.json too."""

    def open_checkpoint(
        self, path: Path, description: dict[str, Any], overrides: dict[str, Any], weights: bool
    ) -> SourceCheckpoint:
        """Understands a directory; see `HuggingFaceFormat.open_checkpoint`."""
        if not (path / MODULES).is_file():
            return super().open_checkpoint(path, description, overrides, weights)
        # An embedder needs no output layer: a missing one is not an error.
        description = {**description, "tie_word_embeddings": True}
        checkpoint = super().open_checkpoint(path, description, overrides, weights)
        task, tensors, rules = _modules(path, weights)
        preprocessor = checkpoint.preprocessor
        if preprocessor is not None:
            preprocessor = {**preprocessor, "sequence_length": _length(path, description)}
            # As the tokenizer's files say.
            preprocessor |= {"add_start_token": None, "add_end_token": None}
        return replace(
            checkpoint,
            kind="sentence-transformers",
            task={**task, **_prompts(path)},
            preprocessor=preprocessor,
            tensors={**checkpoint.tensors, **tensors},
            rules=[*checkpoint.rules, *rules],
        )


# === Reading ===


def _modules(path: Path, weights: bool) -> tuple[dict[str, Any], dict[str, LazyArray], list[Rule]]:
    """Returns the settings of the task, and the tensors of its dense layers with their rules."""
    listed = read_json(path / MODULES)
    for module in listed:
        _check(path / MODULES, module, KNOWN["module"])
        if not module["type"].startswith(OWN):
            raise InputError(
                f"{path / MODULES} has a module of type {module['type']}, whose code lies in the "
                "directory or another package; the model supports those of sentence-transformers"
            )
    kinds = [module["type"].rpartition(".")[2] for module in listed]
    dense: list[dict[str, Any]] = []
    wanted = ["Transformer", "Pooling", *["Dense"] * kinds.count("Dense")]
    if kinds not in (wanted, [*wanted, "Normalize"]):
        raise InputError(
            f"{path / MODULES} lists {', '.join(kinds)}; the model has a Transformer, a Pooling, "
            "Dense layers, and perhaps a Normalize, in this order"
        )
    if listed[0]["path"]:
        raise InputError(
            f"{path / MODULES} has the Transformer in {listed[0]['path']}; give a directory with "
            "it in the directory itself"
        )
    if outside := [module["path"] for module in listed[1:] if not is_inside(module["path"])]:
        raise InputError(
            f"{path / MODULES} names {outside[0]!r}, which is not a folder of the directory; copy "
            "the directory again"
        )
    tensors: dict[str, LazyArray] = {}
    rules: list[Rule] = []
    task: dict[str, Any] = {"pooling": MEAN, "dense": dense, "normalize": kinds[-1] == "Normalize"}
    for kind, module in zip(kinds[1:], listed[1:], strict=True):
        folder = path / module["path"]
        settings = read_optional(folder / CONFIG)
        _check(folder / CONFIG, settings, KNOWN[kind])
        if kind == "Pooling":
            task["pooling"] = _mode(folder, settings)
        elif kind == "Dense":
            rules += dense_rules(module["path"], len(dense))
            dense.append(_dense(folder, settings))
            if weights:
                weights_of_module = read_safetensors(folder)
                tensors |= {f"{module['path']}/{name}": x for name, x in weights_of_module.items()}
    return task, tensors, rules


def dense_rules(folder: str, number: int) -> list[Rule]:
    """Returns the table of a dense layer; names are those in its folder behind that."""
    return [
        Rule(f"{folder}/linear.weight", f"dense_{number}/kernel", transpose),
        Rule(f"{folder}/linear.bias", f"dense_{number}/bias"),
    ]


def _check(where: Path, settings: Mapping[str, Any], known: Known) -> None:
    """Raises `InputError` for a value that the model does not follow; warns of unknown settings."""
    for name, value in settings.items():
        values = known.get(name)
        if values is not None and value not in values:
            raise InputError(
                f"{where}: {name} is {value!r}; the model supports {values[0]!r} alone"
            )
    warn_of_unknown(where, settings, known)


def _check_reading(where: Path, settings: Mapping[str, Any]) -> None:
    """Raises `InputError` if sentence-transformers would read a text otherwise than the model."""
    modalities = settings.get("modality_config") or {TEXT: AS_TEXT}
    if "message" in modalities:
        raise InputError(
            f"{where}: modality_config has 'message', so that each text goes through the chat "
            "template of the tokenizer; the model encodes plain texts: remove 'message' there if "
            "that is how it was trained"
        )
    if modalities.get(TEXT) != AS_TEXT:
        raise InputError(
            f"{where}: modality_config has {TEXT}={modalities.get(TEXT)!r}; the model supports "
            f"{AS_TEXT!r} alone"
        )
    processing = settings.get("processing_kwargs") or {}
    changing = {"processing_kwargs": [key for key in (TEXT, "common") if processing.get(key)]}
    for name in ("model_kwargs", "model_args"):
        changing[name] = sorted((settings.get(name) or {}).keys() - IDLE_ARGUMENTS)
    if changes := [f"{name}={settings[name]!r}" for name, keys in changing.items() if keys]:
        raise InputError(
            f"{where} has {', '.join(changes)}, which the model does not follow; remove what "
            "changes nothing there"
        )


def _mode(folder: Path, settings: Mapping[str, Any]) -> str:
    active = settings.get("pooling_mode")
    active = active or [mode for mode, name in LEGACY.items() if settings.get(name)]
    modes = [active] if isinstance(active, str) else list(active) or [MEAN]
    if len(modes) != 1 or modes[0] not in MODES:
        raise InputError(
            f"{folder}: the pooling is {', '.join(modes)}; the model supports one of "
            f"{', '.join(MODES)}"
        )
    return modes[0]


def _dense(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    check_shape(settings, {"out_features": Needed(SIZE)}, folder / CONFIG)
    activation = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in ACTIVATIONS:
        raise InputError(
            f"{folder}: activation_function is {activation}; the model supports "
            f"{', '.join(ACTIVATIONS)}"
        )
    return {
        "units": settings["out_features"],
        "use_bias": settings.get("bias", True),
        "activation": ACTIVATIONS[activation],
    }


def _length(path: Path, description: Mapping[str, Any]) -> int:
    """Returns the tokens to which sentence-transformers cuts a text."""
    settings = read_optional(path / SENTENCES)
    _check(path / SENTENCES, settings, KNOWN["Transformer"])
    _check_reading(path / SENTENCES, settings)
    if settings.get("max_seq_length"):
        return int(settings["max_seq_length"])
    tokenizer = read_optional(path / "tokenizer_config.json")
    most = description.get("max_position_embeddings") or POSITIONS
    return int(min(tokenizer.get("model_max_length") or most, most))


def _prompts(path: Path) -> dict[str, Any]:
    settings = read_optional(path / PROMPTS)
    _check(path / PROMPTS, settings, KNOWN["SentenceTransformer"])
    prompts = settings.get("prompts") or {}
    return {
        "prompts": {name: text for name, text in prompts.items() if text is not None},
        "default_prompt_name": settings.get("default_prompt_name"),
        "similarity_fn_name": settings.get("similarity_fn_name") or "cosine",
        "truncate_dim": settings.get("truncate_dim"),
    }


# === Writing ===


def form_of(model: keras.Model) -> tuple[dict[str, Any], list[Rule]]:
    """Returns the JSON files beside the transformer's, and the rules of the dense layers."""
    settings, width = model.settings, model.backbone.config.hidden_dim
    kinds = ["Transformer", "Pooling", *["Dense"] * len(settings["dense"])]
    kinds += ["Normalize"] if settings["normalize"] else []
    folders = [f"{number}_{kind}" if number else "" for number, kind in enumerate(kinds)]
    modules = [
        {"idx": number, "name": str(number), "path": folder, "type": TYPES + kind}
        for number, (kind, folder) in enumerate(zip(kinds, folders, strict=True))
    ]
    files: dict[str, Any] = {
        MODULES: modules,
        f"{folders[1]}/{CONFIG}": {
            "word_embedding_dimension": width,
            **{name: mode == settings["pooling"] for mode, name in LEGACY.items()},
            "include_prompt": True,
        },
        PROMPTS: {
            "model_type": "SentenceTransformer",
            "prompts": settings["prompts"],
            "default_prompt_name": settings["default_prompt_name"],
            "similarity_fn_name": settings["similarity_fn_name"],
            **({"truncate_dim": settings["truncate_dim"]} if settings["truncate_dim"] else {}),
        },
    }
    if model.preprocessor is not None:
        length = model.preprocessor.sequence_length
        files[SENTENCES] = {"max_seq_length": length, "do_lower_case": False}
    rules: list[Rule] = []
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    for number, layer in enumerate(settings["dense"]):
        folder = folders[2 + number]
        rules += dense_rules(folder, number)
        files[f"{folder}/{CONFIG}"] = {
            "in_features": width,
            "out_features": layer["units"],
            "bias": layer["use_bias"],
            "activation_function": names[layer["activation"]],
        }
        width = layer["units"]
    if settings["normalize"]:
        files[f"{folders[-1]}/{CONFIG}"] = {}
    return files, rules
