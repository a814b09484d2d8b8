"""JSON files of any origin: reading them, checking the shapes of their values, unknown settings."""

import json
import logging
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kmodels.core.errors import InputError, one_line
from kmodels.core.files import MOST_BYTES, limited


@dataclass(frozen=True)
class Needed:
    """A shape of a value that may be neither absent nor null."""

    shape: "Shape"


# A type, a range of numbers, [shape] for a list, [shape, shape] for one of two, {"key": shape}
# for an object, {"*": shape} for any keys, {} for any object, or several of these as a tuple. An
# absent or null value has every shape, except in a list.
Shape = type | range | Needed | tuple[Any, ...] | list[Any] | dict[str, Any]

# The deepest published file has a dozen levels.
MOST_LEVELS = 64
log = logging.getLogger("kmodels")
_HALF = re.compile("[\ud800-\udfff]")
_WORDS: dict[type, str] = {
    **{str: "a text", int: "a whole number", float: "a number", bool: "true or false"},
    **{list: "a list", dict: "an object"},
}


def read_json(path: Path, shape: Shape | None = None, most: int | None = MOST_BYTES) -> Any:
    """Returns the object in a JSON file, or the list if the shape is a list.

    Args:
        path: path of the file, UTF-8.
        shape: the expected shape, see `check_shape`; by default the one in `FILES`.
        most: bytes that it may have; None for the user's own data, of any size and depth.

    Raises:
        InputError: for a file that is not JSON, too large or too deep, or a value of another shape.
    """
    try:
        text = limited(path, most).read_text(encoding="utf-8")
        content = json.loads(text, object_pairs_hook=_unambiguous)
        if most is not None and _is_deep(content):
            raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep")
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not readable JSON: {one_line(error)}") from None
    if "\\ud" in text.lower() and _HALF.search(json.dumps(content, ensure_ascii=False)):
        raise InputError(f"{path} has half of a character, which no text can hold; copy it again")
    check_shape(content, Needed(FILES.get(path.name, {}) if shape is None else shape), path)
    return content


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        for name, value in pairs:
            if repr(value) != repr(values[name]):
                raise ValueError(
                    f"{name} is both {_shown(value)} and {_shown(values[name])}; keep one of them"
                )
    return values


def _is_deep(value: Any) -> bool:
    level: list[Any] = [[value]]
    for _ in range(MOST_LEVELS + 1):
        parts = (x.values() if isinstance(x, dict) else x for x in level)
        level = [x for part in parts for x in part if isinstance(x, dict | list)]
    return bool(level)


def read_optional(path: Path, shape: Shape | None = None) -> dict[str, Any]:
    """Returns the object in a JSON file as `read_json` does, {} if there is no file."""
    return read_json(path, shape) if path.is_file() else {}


def warn_of_unknown(
    file: Path,
    settings: Mapping[str, object],
    known: Collection[str],
    idle_at: Mapping[str, Collection[object]] = MappingProxyType({}),
) -> None:
    """Logs a warning with the names of settings that kmodels does not follow; null is not logged.

    `known` are names of settings that are read or have no effect; `idle_at` has the values at which
    a setting has no effect, by its name.
    """
    stated = {name: value for name, value in settings.items() if value is not None}
    unknown = [name for name in stated if name not in known and name not in idle_at]
    if unknown:
        log.warning(
            "%s sets %s, which kmodels does not know and does not follow",
            file,
            ", ".join(sorted(unknown)),
        )
    others = [
        f"{name}={_shown(value)}"
        for name, value in sorted(stated.items())
        if name in idle_at and value not in idle_at[name]
    ]
    if others:
        log.warning("%s sets %s, which kmodels does not follow", file, ", ".join(others))


def check_shape(value: Any, shape: Shape, where: object) -> None:
    """Raises InputError for a value of another shape, with the path to the value."""
    if isinstance(shape, Needed):
        if value is None:
            raise InputError(f"{where} is missing or null; give {_words(shape.shape)}")
        shape = shape.shape
    if value is None:
        return
    if isinstance(shape, tuple):
        # The first alternative of the value's kind gives the best message.
        fits = [one for one in shape if _is_of_kind(value, one)]
        if not fits:
            raise InputError(f"{where} is {_shown(value)}; give {_words(shape)}")
        check_shape(value, fits[0], where)
    elif not _is_of_kind(value, shape):
        raise InputError(f"{where} is {_shown(value)}; give {_words(shape)}")
    elif isinstance(shape, dict):
        for key, part in shape.items():
            for name in value if key == "*" else [key]:
                check_shape(value.get(name), part, f"{where}: {name}")
    elif isinstance(shape, list):
        if len(shape) > 1 and len(value) != len(shape):
            raise InputError(f"{where} is {_shown(value)}; give a list of {len(shape)}")
        for i, one in enumerate(value):
            check_shape(one, Needed(shape[0]), f"{where}[{i}]")
    elif (
        (isinstance(shape, range) and value not in shape)
        or (shape is int and not -(2**63) <= value < 2**63)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        raise InputError(f"{where} is {_shown(value)}; give {_words(shape)}")


def _is_of_kind(value: Any, shape: Shape) -> bool:
    shape = shape.shape if isinstance(shape, Needed) else shape
    kind = int if isinstance(shape, range) else shape if isinstance(shape, type) else type(shape)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _words(shape: Shape) -> str:
    shape = shape.shape if isinstance(shape, Needed) else shape
    if isinstance(shape, range):
        return f"a whole number from {shape.start} to {shape.stop - 1}"
    if isinstance(shape, tuple):
        return " or ".join(dict.fromkeys(map(_words, shape)))
    return _WORDS[shape] if isinstance(shape, type) else _WORDS[type(shape)]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# === Shapes of the files of other packages. Keys that kmodels does not read may hold anything ===

NUMBER = (int, float)
# Sizes of a model; the largest in use is a vocabulary, of 2**18 tokens.
SIZE, COUNT = range(1, 2**24), range(2**24)
# The deepest published models have under 200 layers; many times more would use up memory and time.
LAYERS, HEADS = range(1001), range(1, 2**14)
PIXELS, TOKEN = range(1, 2**14), range(-1, 2**31)
SIZES: Any = (PIXELS, [PIXELS] * 2)
TEXTS: Any = (str, [str])
NUMBERS: Any = [NUMBER]


def _all(shape: Shape, names: str) -> dict[str, Shape]:
    return dict.fromkeys(names.split(), shape)


_ROPE: dict[str, Any] = {
    **_all(str, "type rope_type"),
    **_all(NUMBER, "rope_theta factor partial_rotary_factor attention_factor beta_fast beta_slow"),
    **_all(NUMBER, "mscale_all_dim mscale original_max_position_embeddings"),
    **_all(NUMBER, "low_freq_factor high_freq_factor"),
    "truncate": bool,
}
_ROPE |= _all(_ROPE, "full_attention sliding_attention")

# config.json of transformers, timm, keras-hub and the modules of sentence-transformers, whose names
# do not clash: what one says of a model, and of the models in it.
_BLOCK = range(1, 2**24)
_WEIGHTS: Shape = {"group_size": int, "block_structure": [_BLOCK, _BLOCK]}
CONFIG: dict[str, Any] = {
    **_all(LAYERS, "num_hidden_layers num_layers decoder_num_hidden_layers num_blocks"),
    **_all(LAYERS, "num_upscale_blocks num_kv_shared_layers"),
    **_all(HEADS, "num_attention_heads num_key_value_heads num_query_heads num_heads"),
    **_all(HEADS, "decoder_num_attention_heads num_global_key_value_heads attn_pool_num_heads"),
    **_all(SIZE, "vocab_size vocabulary_size hidden_size hidden_dim intermediate_size mlp_dim"),
    **_all(SIZE, "intermediate_dim head_dim global_head_dim projection_dim decoder_hidden_size"),
    **_all(SIZE, "decoder_intermediate_size moe_intermediate_size"),
    **_all(SIZE, "embedding_dimension word_embedding_dimension embed_dim num_features pooled_dim"),
    **_all(SIZE, "num_channels num_queries num_patches position_embedding_size"),
    **_all(SIZE, "mm_tokens_per_image pooling_kernel_size num_vision_tokens_per_image"),
    **_all(
        COUNT, "num_register_tokens reg_tokens num_experts top_k_experts num_classes num_labels"
    ),
    **_all(COUNT, "hidden_size_per_layer_input vocab_size_per_layer_input max_window_layers"),
    **_all(SIZES, "image_size patch_size img_size decoder_patch_size"),
    "pool_size": (SIZE, [SIZE] * 2),
    "input_size": [PIXELS] * 3,
    "ref_feat_shape": [PIXELS] * 2,
    # Where a window is no positive number its reader tells what is wrong.
    **_all(int, "sliding_window_size sliding_window"),
    **_all(int, "sliding_window_pattern _sliding_window_pattern"),
    **_all(TOKEN, "bos_token_id pad_token_id image_token_id image_token_index boi_token_id"),
    **_all(TOKEN, "boi_token_index eoi_token_id eoi_token_index max_position_embeddings"),
    "eos_token_id": (TOKEN, [TOKEN]),
    **_all(NUMBER, "rms_norm_eps layer_norm_eps layer_norm_epsilon dropout attention_dropout"),
    **_all(NUMBER, "hidden_dropout_prob attention_probs_dropout_prob drop_path_rate mlp_ratio"),
    **_all(NUMBER, "attn_logit_softcapping final_logit_softcapping attention_logit_soft_cap"),
    **_all(NUMBER, "final_logit_soft_cap query_pre_attn_scalar rope_theta rope_local_base_freq"),
    **_all(NUMBER, "layerscale_value logit_scale_init_value rope_temperature rope_grid_offset"),
    **_all(NUMBER, "mask_ratio crop_pct class_weight dice_weight mask_weight no_object_weight"),
    **_all(NUMBER, "oversample_ratio importance_sample_ratio"),
    **_all(NUMBER, "pos_embed_jitter pos_embed_rescale pos_embed_shift"),
    "train_num_points": SIZE,
    **_all(NUMBERS, "mean std"),
    **_all(_ROPE, "rope_parameters rope_scaling"),
    **_all(bool, "attention_bias attention_k_eq_v enable_moe_block tie_word_embeddings"),
    **_all(bool, "use_double_wide_mlp use_sliding_window qkv_bias query_bias key_bias value_bias"),
    **_all(bool, "proj_bias mlp_bias use_gated_mlp use_swiglu_ffn use_mask_token bias"),
    **_all(bool, "vision_use_head norm_pix_loss is_embedding_model use_class_token"),
    **_all(bool, "include_prompt use_mean_pooling"),
    "use_bidirectional_attention": (bool, str),
    **_all(str, "hidden_act activation hidden_activation pooler_act activation_function act_layer"),
    **_all(str, "model_type architecture global_pool pos_embed norm_layer crop_mode class_name"),
    "interpolation": str,
    **_all([str], "architectures layer_types"),
    "label_names": ([str], {"*": str}),
    "pooling_mode": TEXTS,
    "per_layer_config": {"*": Needed({"*": (*NUMBER, str, bool)})},
    **_all({}, "id2label text_config_dict vision_config_dict"),
    "quantization_config": {
        **_all(str, "quant_method checkpoint_format version pack_dtype"),
        "weight_block_size": [_BLOCK, _BLOCK],
        "config_groups": {"*": Needed({"weights": _WEIGHTS})},
        "sparsity_config": {},
    },
}
CONFIG |= _all(CONFIG, "config text_config vision_config model_args pretrained_cfg")
CONFIG |= _all((str, CONFIG), "backbone_config backbone")

PREPROCESSOR: dict[str, Any] = {
    **_all(bool, "do_resize do_rescale do_normalize do_center_crop do_pad do_split_image"),
    **_all(bool, "do_convert_rgb do_pan_and_scan"),
    **_all((*NUMBER, NUMBERS), "image_mean image_std"),
    **_all((*SIZES, {"*": PIXELS}), "size crop_size patch_size"),
    **_all(SIZE, "max_num_patches image_seq_length max_soft_tokens pooling_kernel_size"),
    **_all(SIZE, "pan_and_scan_min_crop_size pan_and_scan_max_num_crops"),
    **_all(NUMBER, "rescale_factor pan_and_scan_min_ratio_to_activate"),
    **_all(str, "image_processor_type feature_extractor_type"),
    "resample": int,
}
PROCESSOR = {**PREPROCESSOR, "image_processor": PREPROCESSOR}

_NAMED_TOKEN: Any = (str, {"content": Needed(str)})
TOKENIZER: dict[str, Any] = {
    **_all(_NAMED_TOKEN, "bos_token eos_token pad_token unk_token sep_token cls_token mask_token"),
    **_all(bool, "add_bos_token add_eos_token clean_up_tokenization_spaces do_lower_case"),
    **_all(bool, "split_special_tokens"),
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": bool,
    "added_tokens_decoder": {
        "*": Needed(
            {
                "content": Needed(str),
                **_all(bool, "single_word lstrip rstrip normalized special"),
            }
        )
    },
    "chat_template": (
        str,
        [{"name": Needed(str), "template": Needed(str)}],
        {"*": Needed(str)},
    ),
    "additional_special_tokens": [_NAMED_TOKEN],
    "extra_special_tokens": ({"*": _NAMED_TOKEN}, [_NAMED_TOKEN]),
    "model_specific_special_tokens": {"*": _NAMED_TOKEN},
    # transformers writes 10**30 for no limit.
    "model_max_length": (range(1, 2**100), float),
    "tokenizer_class": str,
}

GENERATION: dict[str, Any] = {
    **_all((TOKEN, [TOKEN]), "bos_token_id pad_token_id eos_token_id"),
    **_all(NUMBER, "temperature top_p min_p repetition_penalty"),
    **_all(NUMBER, "max_length max_new_tokens min_length min_new_tokens"),
    **{"top_k": int, "do_sample": bool, "stop_strings": TEXTS},
}

_RANK = range(1, 2**16)
ADAPTER: dict[str, Any] = {
    **{"r": _RANK, "lora_alpha": NUMBER, "lora_dropout": NUMBER},
    **{"rank_pattern": {"*": Needed(_RANK)}, "alpha_pattern": {"*": Needed(NUMBER)}},
    **_all(TEXTS, "target_modules exclude_modules target_parameters modules_to_save"),
    **_all(bool, "use_rslora use_dora ensure_weight_tying"),
    "layers_to_transform": (COUNT, [COUNT]),
    "trainable_token_indices": ([TOKEN], {"*": Needed([TOKEN])}),
    "init_lora_weights": (bool, str),
    **_all(str, "bias peft_type"),
}

# Settings of a GGUF file without their first word, "general" or an architecture. Lists of a whole
# vocabulary are checked where they are read.
GGUF: dict[str, Any] = {
    **_all(LAYERS, "block_count vision.block_count attention.shared_kv_layers"),
    **_all(SIZE, "embedding_length vision.embedding_length vision.feed_forward_length"),
    **_all(SIZE, "attention.key_length attention.key_length_swa attention.value_length"),
    **_all(SIZE, "attention.value_length_swa vision.projection_dim rope.dimension_count"),
    **_all(SIZE, "rope.dimension_count_swa"),
    **_all(HEADS, "attention.head_count vision.attention.head_count"),
    "attention.head_count_kv": (HEADS, [HEADS]),
    "feed_forward_length": (SIZE, [SIZE]),
    **_all(COUNT, "attention.sliding_window expert_count expert_used_count"),
    **_all(COUNT, "embedding_length_per_layer_input"),
    "attention.sliding_window_pattern": (int, [(bool, int)]),
    **_all(PIXELS, "vision.image_size vision.patch_size"),
    # An image is pooled to at least one token.
    "vision.projector.scale_factor": range(1, 1025),
    **_all(NUMBER, "attention.layer_norm_rms_epsilon vision.attention.layer_norm_epsilon"),
    **_all(NUMBER, "attn_logit_softcapping final_logit_softcapping context_length"),
    **_all(NUMBER, "rope.freq_base rope.freq_base_swa rope.scale_linear rope.scaling.factor"),
    **_all(NUMBER, "rope.scaling.original_context_length rope.scaling.attn_factor"),
    **_all(NUMBER, "rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow"),
    **_all(NUMBER, "sampling.temp sampling.top_k sampling.top_p sampling.min_p"),
    **_all(str, "architecture type rope.scaling.type projector_type chat_template"),
    **{"count": COUNT, "chat_templates": [str]},
    **_all(NUMBERS, "vision.image_mean vision.image_std"),
    **_all(bool, "use_gelu has_vision_encoder"),
}

# A file with one of these names has this shape, whoever reads it.
FILES: dict[str, Shape] = {
    "config.json": CONFIG,
    "preprocessor_config.json": PREPROCESSOR,
    "processor_config.json": PROCESSOR,
    "tokenizer_config.json": TOKENIZER,
    "added_tokens.json": {"*": Needed(TOKEN)},
    "special_tokens_map.json": TOKENIZER,
    "chat_template.json": {"chat_template": TOKENIZER["chat_template"]},
    "generation_config.json": GENERATION,
    "adapter_config.json": ADAPTER,
    "sentence_bert_config.json": {
        **{"max_seq_length": SIZE, "do_lower_case": bool},
        **_all({}, "modality_config processing_kwargs model_kwargs model_args"),
    },
    "modules.json": [{"type": Needed(str), "path": Needed(str)}],
    "config_sentence_transformers.json": {
        **{"prompts": {"*": str}, "default_prompt_name": str, "similarity_fn_name": str},
        "truncate_dim": SIZE,
    },
}
