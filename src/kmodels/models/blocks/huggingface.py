"""Hugging Face directories of decoders: names of tensors and settings, reading and writing."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.schema import read_json, warn_of_unknown
from kmodels.generation.generation_config import KNOWN, not_applied
from kmodels.models.blocks.config import GLOBAL, LOCAL, DecoderConfig
from kmodels.models.blocks.directories import IDLE_IN_CONFIGS, HuggingFaceDirectory
from kmodels.models.blocks.module_names import EXPERTS, LAYERS, MODEL_PROJECTION, PER_LAYER, ROUTER
from kmodels.models.blocks.rope import Llama3Scaling, Rope, Yarn
from kmodels.models.blocks.tokenizer import VOCABULARY
from kmodels.text import Tokenizer
from kmodels.weights import LazyArray, Rule, SourceCheckpoint, read_safetensors, transpose
from kmodels.weights.rules import transpose_each

log = logging.getLogger("kmodels")

BLOCK = "layers.{i}"
HEAD = "lm_head.weight"
# Names of the output layer: as transformers writes it, and in multimodal files before version 5.
OUTPUTS = (HEAD, f"language_model.{HEAD}")
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model")
# Fields of every `DecoderConfig`, and their names in config.json.
FIELDS = {
    "vocabulary_size": "vocab_size",
    "hidden_dim": "hidden_size",
    "intermediate_dim": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_query_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "layer_norm_epsilon": "rms_norm_eps",
    "dropout": "attention_dropout",
    "max_sequence_length": "max_position_embeddings",
}
# Those that no architecture has a default for.
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    "num_attention_heads",
)
# The same of Gemma 2 and 3, in whose classes it has one.
SCALE = "query_pre_attn_scalar"
# Names of the usual norms; a family with more, or with other names, gives its own.
NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
HEAD_NORMS = {
    "self_attn.q_norm": "attention/query_norm",
    "self_attn.k_norm": "attention/key_norm",
}
# What a block with experts has besides: norms, and tensors of all experts in one.
EXPERT_NORMS = {
    "post_feedforward_layernorm_1": "mlp_result_norm",
    "pre_feedforward_layernorm_2": "experts_norm",
    "post_feedforward_layernorm_2": "experts_result_norm",
}
# Every other setting of a decoder's config.json that is read, here, by a family or by a tokenizer.
READ = {
    *("attention_bias", "attention_k_eq_v", "attn_logit_softcapping", "boi_token_id"),
    *("boi_token_index", "bos_token_id", "enable_moe_block", "eoi_token_id", "eoi_token_index"),
    *("eos_token_id", "final_logit_softcapping", "global_head_dim", "hidden_act"),
    *("hidden_activation", "hidden_size_per_layer_input", "image_token_id", "image_token_index"),
    *("layer_types", "max_window_layers", "mlp_bias"),
    *("mm_tokens_per_image", "model_type", "moe_intermediate_size", "num_experts"),
    *("num_global_key_value_heads",),
    *("num_kv_shared_layers", "pad_token_id", "per_layer_config", "quantization_config"),
    *("query_pre_attn_scalar", "rope_local_base_freq", "rope_parameters", "rope_scaling"),
    *("rope_theta", "sliding_window", "sliding_window_pattern", "_sliding_window_pattern"),
    *("text_config", "tie_word_embeddings", "top_k_experts", "use_bidirectional_attention"),
    *("use_double_wide_mlp", "use_sliding_window", "vision_config", "vocab_size_per_layer_input"),
}
# Settings that change no output of the model: of training, of Python, of parts that are left out.
IDLE = IDLE_IN_CONFIGS | {
    *("audio_config", "audio_token_id", "boa_token_id", "cache_implementation", "eoa_token_id"),
    *("eoa_token_index", "initializer_range", "pretraining_tp", "unsloth_fixed", "unsloth_version"),
    *("use_cache", "video_token_id"),
}
# Settings that `per_layer_config` may hold, and the default width of global layers.
HEADS = ("head_dim", "num_key_value_heads")
GLOBAL_HEAD_DIM = 512
# config.json, preprocessor_config.json, the table, and tensors of zeros that the format asks for.
TransformersForm = tuple[dict[str, Any], dict[str, Any], list[Rule], dict[str, Any]]


def rules(config: DecoderConfig, norms: Mapping[str, str], prefix: str = "model.") -> list[Rule]:
    """Returns the table of a decoder.

    `norms` has the names of a block's norms in transformers to their paths here. The prefix is that
    of all but the output layer; it is empty for a bare model, which has none.
    """
    table = [Rule("embed_tokens.weight", "token_embedding/embeddings")]
    block = config.block(0)
    norms = {**norms, **(EXPERT_NORMS if block.num_experts else {})}
    for source, target in norms.items():
        table.append(Rule(f"{BLOCK}.{source}.weight", f"block_{{i}}/{target}/scale"))
    layers = LAYERS | (PER_LAYER if block.per_layer_dim else {})
    if block.num_experts:
        layers |= ROUTER
        table += [
            Rule(f"{BLOCK}.{source}", f"block_{{i}}/{target}/kernel", transpose_each)
            for target, source in EXPERTS.items()
        ]
        router = "block_{i}/experts/router"
        table += [
            Rule(f"{BLOCK}.router.scale", f"{router}/norm/scale"),
            Rule(f"{BLOCK}.router.per_expert_scale", f"{router}/expert_scale"),
        ]
    for target, source in layers.items():
        table.append(Rule(f"{BLOCK}.{source}.weight", f"block_{{i}}/{target}/kernel", transpose))
        if target in LAYERS and block.has_bias(target):
            table.append(Rule(f"{BLOCK}.{source}.bias", f"block_{{i}}/{target}/bias"))
    if block.per_layer_dim:
        within = "per_layer_embedding"
        table += [
            Rule(f"{BLOCK}.post_per_layer_input_norm.weight", "block_{i}/per_layer/norm/scale"),
            Rule("embed_tokens_per_layer.weight", f"{within}/table/embeddings"),
            Rule(f"{MODEL_PROJECTION}.weight", f"{within}/model_projection/kernel", transpose),
            Rule("per_layer_projection_norm.weight", f"{within}/norm/scale"),
        ]
    if block.use_layer_scalar:
        table.append(Rule(f"{BLOCK}.layer_scalar", "block_{i}/layer_scalar"))
    table.append(Rule("norm.weight", "final_norm/scale"))
    table = [replace(rule, source=prefix + rule.source) for rule in table]
    if not config.tie_word_embeddings:
        table.append(Rule(HEAD, "token_embedding/reverse_embeddings"))
    return table


def fields(text: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of every `DecoderConfig` for the settings of a config.json."""
    text = {"rms_norm_eps": 1e-6, **text, "attention_dropout": text.get("attention_dropout") or 0.0}
    if empty := [name for name in (*SIZES, SCALE) if text.get(name, name) is None]:
        raise InputError(f"{', '.join(empty)} of config.json are null; give numbers above 0")
    types, layers = text.get("layer_types"), text["num_hidden_layers"]
    if types is not None and len(types) != layers:
        raise InputError(
            f"layer_types of config.json names {len(types)} layers, and num_hidden_layers is "
            f"{layers}; give one kind for each layer"
        )
    return {ours: text[theirs] for ours, theirs in FIELDS.items()}


def refuse(path: Path, settings: Mapping[str, object]) -> None:
    """Raises `InputError` for settings that are True, which the model has no counterpart for."""
    if problems := [name for name, there in settings.items() if there]:
        raise InputError(f"{path}: the model has no counterpart for {', '.join(problems)}")


def rope(
    path: Path,
    scaling: Mapping[str, Any],
    theta: float | None,
    default: float,
    length: float | None = None,
    kinds: Sequence[str] = ("default", "linear", "yarn"),
) -> Rope:
    """Returns a rotary position embedding of one of `kinds`.

    `theta` is the base outside the settings of the kind, and `default` that without any. `length`
    is `max_position_embeddings`, for YaRN and "llama3" whose settings do not name the original
    length; None if they have to.
    """
    scaling = stated(scaling)
    kind = rope_kind(scaling)
    if kind not in kinds:
        raise InputError(
            f"{path}: rope_type is {kind!r}; the model supports {', '.join(kinds[:-1])} and "
            f"{kinds[-1]}"
        )
    base = float(scaling.get("rope_theta", default if theta is None else theta))
    if kind == "yarn":
        return Rope(base, 1.0, _yarn(path, scaling, length))
    if kind == "llama3":
        return Rope(base, 1.0, None, _llama3(path, scaling, length))
    if kind == "linear" and "factor" not in scaling:
        raise InputError(f"{path}: rope_type is 'linear' without a factor; give the factor")
    return Rope(base, float(scaling.get("factor", 1.0)) if kind == "linear" else 1.0, None)


def stated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that are not null."""
    return {name: value for name, value in settings.items() if value is not None}


def window(path: Path, size: object, pattern: Mapping[str, Any]) -> int:
    """Returns the size of the windows of a Gemma, if the fields of `pattern` give layers some."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    if pattern.get("use_sliding_window_attention", True):
        raise InputError(
            f"{path}: layers have a window and sliding_window is {size!r}; give its size"
        )
    return 4096


def rope_kind(scaling: Mapping[str, Any]) -> str:
    """Returns the kind of a rotary position embedding, by either of its names."""
    return scaling.get("rope_type", scaling.get("type", "default"))


def _yarn(path: Path, scaling: Mapping[str, Any], length: float | None) -> dict[str, Any]:
    """Returns arguments of `Yarn`; `length` is the original length if the settings name none."""
    arguments = stated(scaling)
    for name in ("rope_type", "type", "rope_theta"):
        arguments.pop(name, None)
    arguments.setdefault("original_max_position_embeddings", length)
    whole, part = arguments.pop("mscale", None), arguments.pop("mscale_all_dim", None)
    if "factor" not in arguments and length is not None:
        arguments["factor"] = length / arguments["original_max_position_embeddings"]
    try:
        settings = Yarn.of(arguments)
        if whole and part and settings.attention_factor is None and settings.factor > 1:
            grown = 0.1 * math.log(settings.factor)
            arguments["attention_factor"] = (whole * grown + 1) / (part * grown + 1)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return arguments


def _llama3(path: Path, scaling: Mapping[str, Any], length: float | None) -> Llama3Scaling:
    names = [field.name for field in fields_of(Llama3Scaling)]
    settings = {"original_max_position_embeddings": length, **scaling}
    unknown = sorted(set(scaling) - {*names, "rope_type", "type", "rope_theta"})
    problems = {
        f"{', '.join(unknown)} in rope_scaling": unknown,
        "rope_scaling without its factors": not settings.keys() >= set(names),
    }
    refuse(path, problems)
    return Llama3Scaling(**{name: settings[name] for name in names})


def heads_by_kind(
    path: Path, text: Mapping[str, Any], kinds: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """Returns width and number of the key/value heads of each kind of layer.

    Transformers 5.23 writes `per_layer_config`, the settings by which a layer differs from all.
    Before, and in keras-hub, other names say it of the layers without a window.
    """
    by_layer = text.get("per_layer_config")
    if by_layer is None:
        own = {"head_dim": text.get("global_head_dim") or GLOBAL_HEAD_DIM}
        if text.get("attention_k_eq_v") and (groups := text.get("num_global_key_value_heads")):
            own["num_key_value_heads"] = groups
        by_layer = {i: own for i, kind in enumerate(kinds) if kind == GLOBAL}
    by_layer = {int(i): own for i, own in by_layer.items()}
    names = {name for own in by_layer.values() for name in own}
    heads: dict[str, set[tuple[int, int]]] = {}
    for i, kind in enumerate(kinds):
        layer = {**text, **by_layer.get(i, {})}
        heads.setdefault(kind, set()).add((layer["head_dim"], layer["num_key_value_heads"]))
    wrong = {f"{name} in per_layer_config": True for name in sorted(names - set(HEADS))}
    wrong |= {f"different heads in {kind}": len(seen) > 1 for kind, seen in heads.items()}
    refuse(path, wrong)
    return {kind: next(iter(seen)) for kind, seen in heads.items()}


def unused(config: DecoderConfig) -> list[str]:
    """Returns ends of names that published files hold, and transformers leaves out as well.

    They are the keys and values of layers that use those of others.
    """
    blocks = [(i, config.block(i)) for i in range(config.num_layers)]
    shared = [i for i, block in blocks if block.key_value_source is not None]
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    return [f"layers.{i}.self_attn.{name}.weight" for i in shared for name in names]


def tokenizer_of(path: Path) -> dict[str, str] | None:
    """Returns the argument of a preprocessor whose tokenizer lies in a directory, or None."""
    whole = any((path / name).is_file() for name in TOKENIZERS)
    parts = all((path / name).is_file() for name in VOCABULARY)
    return {"tokenizer": str(path)} if whole or parts else None


@dataclass(frozen=True)
class HuggingFaceFormat(HuggingFaceDirectory):
    """Directories of a family of decoders, as `Family.formats` wants them.

    Args:
        kinds: `model_type` in the config.json of the family.
        config_class: config class of the family.
        fields: (path, description) to the fields of the config.
        table: (config, prefix) to the rules.
        prefixes: prefixes of names, empty for a bare model.
        other_parts: parts of multimodal models that the model here does not have.
        whole: `model_type` to the class that has them.
    """

    config_class: Callable[..., DecoderConfig]
    fields: Callable[[Path, dict[str, Any]], dict[str, Any]]
    table: Callable[[Any, str], Sequence[Rule]]
    prefixes: Sequence[str] = ("", "model.")
    other_parts: Sequence[str] = ()
    whole: Mapping[str, str] = field(default_factory=dict)

    def open_checkpoint(
        self, path: Path, description: dict[str, Any], overrides: dict[str, Any], weights: bool
    ) -> SourceCheckpoint:
        """Reads config, tokenizer and generation settings of a directory, and opens its tensors."""
        backbone, vision = self.fields(path, description), description.get("vision_config")
        if weights:
            warn_of_decoder(path, description)
        config = self.config_class(**backbone)
        ends = ("rotary_emb.inv_freq", *unused(config))
        stored = read_safetensors(path) if weights else {}
        tensors = {name: x for name, x in stored.items() if not name.endswith(ends)}
        backbone, tensors = with_output_layer(path, backbone, tensors)
        config = self.config_class(**backbone)
        prefix = next((p for p in self.prefixes if f"{p}embed_tokens.weight" in tensors), "model.")
        others = {name: part for name in tensors for part in self.other_parts if f"{part}." in name}
        return SourceCheckpoint(
            path=path,
            kind="Hugging Face",
            backbone=backbone,
            task={"generation_config": generation_config(path, warns=bool(tensors))},
            preprocessor=tokenizer_of(path),
            tensors={name: tensor for name, tensor in tensors.items() if name not in others},
            rules=self.table(config, prefix),
            left_out=[part for part in self.other_parts if part in others.values()],
            whole=self.whole.get(description.get("model_type", ""), "") if vision else "",
        )


def warn_of_decoder(path: Path, description: Mapping[str, Any]) -> None:
    """Logs a warning with the settings of a decoder's config.json that are not known."""
    settings = {**description, **(description.get("text_config") or {})}
    warn_of_unknown(path / CONFIG, settings, READ | IDLE | set(FIELDS.values()))


def with_output_layer(
    path: Path, backbone: Mapping[str, Any], tensors: Mapping[str, LazyArray]
) -> tuple[dict[str, Any], dict[str, LazyArray]]:
    """Returns fields and tensors that agree on the output layer, which is `HEAD` if untied.

    As in transformers, an output layer whose numbers differ from those of the embedding table takes
    precedence over `tie_word_embeddings`. One with the same numbers is left out if the two are
    tied, and an untied one that is missing, which transformers draws at random, is refused. Without
    tensors the architecture is as config.json says.
    """
    head = next((tensors[name] for name in OUTPUTS if name in tensors), None)
    tables = (tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    table = next(tables, None)
    tied = backbone["tie_word_embeddings"]
    if not tied and head is None and table is not None:
        raise InputError(
            f"{path} has no {HEAD} and config.json says tie_word_embeddings=false; write true "
            "there if the embedding table is the output layer"
        )
    if tied and head is not None and table is not None:
        tied = head.shape == table.shape and np.array_equal(head.read(), table.read())
    rest = {name: tensor for name, tensor in tensors.items() if name not in OUTPUTS}
    if head is not None and not tied:
        rest[HEAD] = head
    return {**backbone, "tie_word_embeddings": tied}, rest


def generation_config(path: Path, warns: bool) -> dict[str, Any] | None:
    """Returns a directory's generation_config.json, or None; `warns` as `warn_of_sampling` does."""
    generation = read_json(path / GENERATION) if (path / GENERATION).is_file() else None
    if warns and generation:
        warn_of_unknown(path / GENERATION, generation, KNOWN)
        warn_of_sampling(path / GENERATION, generation)
    return generation


def warn_of_sampling(file: Path, generation: Mapping[str, Any] | None) -> None:
    """Logs a warning with settings that `generate` does not follow by itself."""
    if generation and (asked := not_applied(generation)):
        log.warning(
            "%s asks for %s, which generate does not do by itself; "
            'compile(sampler="generation_config") draws so, and lengths go to generate',
            file,
            asked,
        )


# === Writing ===


def transformers_form(
    model: keras.Model,
    names: tuple[str, str, str],
    more: Mapping[str, Any],
    table: Callable[[Any, str], list[Rule]],
) -> TransformersForm:
    """Returns a decoder as transformers writes it.

    A backbone with an output table is written as a causal model. The names are `model_type` and the
    architectures with the output layer and without it; `more` has the settings that not every
    decoder has.
    """
    backbone, tokenizer = getattr(model, "backbone", model), tokenizer_in(model)
    config, (kind, causal, bare) = backbone.config, names
    # What an embedder has behind its backbone lies beside it.
    has_head = backbone is not model and not hasattr(model, "beside_transformer")
    is_bare = not has_head and config.tie_word_embeddings
    fields = {theirs: getattr(config, ours) for ours, theirs in FIELDS.items()}
    form = {
        "architectures": [bare if is_bare else causal],
        "model_type": kind,
        **{name: value for name, value in fields.items() if value is not None},
        "intermediate_size": config.mlp_dim,
        "attention_bias": config.block(0).use_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        **token_ids(model),
        **({} if tokenizer is None else {"eos_token_id": list(tokenizer.stop_token_ids)}),
        **more,
    }
    return form, {}, table(config, "" if is_bare else "model."), {}


def tokenizer_in(model: keras.Model) -> Tokenizer | None:
    """Returns the tokenizer of a model's preprocessor, or None."""
    return getattr(getattr(model, "preprocessor", None), "tokenizer", None)


def token_ids(model: keras.Model) -> dict[str, int | None]:
    """Returns the ids of tokens in every config.json; none without a tokenizer."""
    if (tokenizer := tokenizer_in(model)) is None:
        return {}
    return {"bos_token_id": tokenizer.start_token_id, "pad_token_id": tokenizer.pad_token_id}


def rope_form(
    base: float, scaling: float, yarn: Mapping[str, Any] | None, llama3: Llama3Scaling | None = None
) -> dict[str, Any]:
    """Returns the settings of config.json for the parts of a `Rope`."""
    form: dict[str, Any] = {"rope_theta": base}
    if yarn is not None:
        form["rope_scaling"] = {"rope_type": "yarn", **yarn}
        length = yarn["original_max_position_embeddings"]
        form["max_position_embeddings"] = int(length * yarn["factor"])
    elif llama3 is not None:
        form["rope_scaling"] = {"rope_type": "llama3", **asdict(llama3)}
    elif scaling != 1.0:
        form["rope_scaling"] = {"rope_type": "linear", "factor": scaling}
    return form


def layer_types(config: DecoderConfig) -> list[str]:
    """Returns `layer_types` of config.json: the kind of attention of each block."""
    windows = [config.block(i).window for i in range(config.num_layers)]
    return [GLOBAL if window is None else LOCAL for window in windows]
