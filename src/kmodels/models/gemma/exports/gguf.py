"""A Gemma as llama.cpp reads it: one GGUF file with sizes, weights and vocabulary."""

import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from kmodels import lora
from kmodels.core.errors import InputError
from kmodels.core.remote import write_file
from kmodels.models.common.layer_kinds import GLOBAL, LOCAL
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.gemma.weights import gguf as weights_gguf
from kmodels.text import gguf as vocabulary
from kmodels.text.marks import ENDS_OF_TURNS
from kmodels.text.settings import with_names
from kmodels.weights import LazyArray, export

if TYPE_CHECKING:
    from types import ModuleType

    import gguf

# The types in which kernels and the embedding table are stored; norms are always F32.
KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "q8_0": "Q8_0"}
FILES = {"F32": "ALL_F32", "BF16": "MOSTLY_BF16", "F16": "MOSTLY_F16", "Q8_0": "MOSTLY_Q8_0"}
ARCHITECTURES = {number: name for name, number in weights_gguf.GENERATIONS.items()}
# Tokens that the published models were trained on; the config of a model does not say.
CONTEXT = {1: 8192, 2: 8192, 3: 32_768, 4: 131_072}
Q8_0_ROW = 32
# The template that Gemma's instruction models were trained on, between the markers of a generation;
# llama.cpp would take that of another family.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<START>' }}"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}{{ '\n' }}"
    "{{ message['content'] | trim }}{{ '<END>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<START>model\n' }}{% endif %}"
)


def export_to_gguf(model: keras.Model, path: str | Path, dtype: str = "float16") -> Path:
    """See `GemmaCausalLM.export_to_gguf`.

    Args:
        model: a causal model.
        path: path of the file to make or replace, local or an address.
        dtype: a key of `KINDS`.

    Raises:
        InputError: for another suffix or dtype, without the gguf package, for a model with
            adapters, or with all that llama.cpp's Gemma cannot express.
    """
    if Path(path).suffix != ".gguf":
        raise InputError(f"{path} must be a GGUF file; give a name that ends in .gguf")
    if dtype not in KINDS:
        raise InputError(f"dtype is {dtype!r}; GGUF files are written as {', '.join(KINDS)}")
    config = model.backbone.config
    if names := _without_place(config):
        raise InputError(
            f"a GGUF file of Gemma has no place for {', '.join(names)}; use export_to_transformers"
        )
    if importlib.util.find_spec("gguf") is None:
        raise InputError("writing GGUF needs the gguf package: pip install 'kmodels[gguf]'")
    if lora.describe(model):
        raise InputError("a GGUF file has no place for LoRA adapters; call merge_lora first")
    tensors = export(model, weights_gguf.rules(config))
    if config.generation == 4 and GLOBAL in config.kinds:
        factors = np.array(weights_gguf.rope_factors(config), "float32")
        tensors[weights_gguf.ROPE_FACTORS] = LazyArray(
            factors.shape, factors.dtype, lambda: factors
        )
    return write_file(path, lambda temporary: _write(temporary, model, tensors, KINDS[dtype]))


def _without_place(config: GemmaConfig) -> list[str]:
    """Returns settings that the file could not tell apart from others when it is read again."""
    everywhere = {"use_bidirectional_attention": config.use_bidirectional_attention}
    if config.generation < 4:
        everywhere |= dict.fromkeys(config.of_gemma_4, True)
        return [name for name, there in everywhere.items() if there]
    rows = config.per_layer_vocabulary if config.hidden_size_per_layer_input else None
    absent = {
        **everywhere,
        "enable_moe_block": config.enable_moe_block,
        f"vocab_size_per_layer_input={rows}, which is to be vocabulary_size": (
            rows not in (None, config.vocabulary_size)
        ),
        "keys and values of these layers for those that share": weights_gguf.shares_otherwise(
            config
        ),
    }
    return [name for name, there in absent.items() if there]


def _write(path: Path, model: keras.Model, tensors: dict[str, LazyArray], kind: str) -> None:
    import gguf

    config = model.backbone.config
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.generation])
    _add_sizes(writer, config)
    _add_vocabulary(writer, model, config)
    writer.add_file_type(gguf.LlamaFileType[FILES[kind]])
    kinds = {name: _kind(gguf, tensor, kind) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        # The writer wants the size in bytes before it gets the values.
        block, size = gguf.GGML_QUANT_SIZES[kinds[name]]
        count = int(np.prod(tensor.shape)) // block * size
        writer.add_tensor_info(
            name, tensor.shape, np.dtype("float32"), count, raw_dtype=kinds[name]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors.items():
        values = np.ascontiguousarray(tensor.read(), dtype="float32")
        writer.write_tensor_data(gguf.quants.quantize(values, kinds[name]))
    writer.close()
    _check(path, config)


def _kind(gguf: "ModuleType", tensor: LazyArray, kind: str) -> Any:
    """Vectors stay as they are, and so does what Q8_0 cannot divide, in half precision."""
    if len(tensor.shape) < 2:
        kind = "F32"
    elif kind == "Q8_0" and tensor.shape[-1] % Q8_0_ROW:
        kind = "F16"
    return gguf.GGMLQuantizationType[kind]


def _add_sizes(writer: "gguf.GGUFWriter", config: GemmaConfig) -> None:
    generation = config.generation
    blocks = [config.block(i) for i in range(config.num_layers)]
    width = config.global_head_dim or config.head_dim
    writer.add_context_length(CONTEXT[generation])
    writer.add_embedding_length(config.hidden_dim)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(_one_or_all([block.mlp_dim for block in blocks]))
    writer.add_head_count(config.num_query_heads)
    writer.add_head_count_kv(_one_or_all([block.num_key_value_heads for block in blocks]))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_rope_freq_base(config.global_rope_wavelength)
    writer.add_vocab_size(config.vocabulary_size)
    if config.global_rope_scaling_factor != 1.0 and generation < 4:
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.global_rope_scaling_factor)
    if generation > 1:
        writer.add_sliding_window(config.sliding_window_size)
    if generation == 4:
        writer.add_rope_freq_base_swa(config.local_rope_wavelength)
        writer.add_rope_dimension_count_swa(config.head_dim)
        writer.add_key_length_swa(config.head_dim)
        writer.add_value_length_swa(config.head_dim)
        writer.add_sliding_window_pattern([kind == LOCAL for kind in config.kinds])
        writer.add_shared_kv_layers(config.num_kv_shared_layers)
        writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
        writer.add_final_logit_softcapping(config.final_logit_soft_cap or 0.0)
    if generation == 2:
        if config.attention_logit_soft_cap is not None:
            writer.add_attn_logit_softcapping(config.attention_logit_soft_cap)
        if config.final_logit_soft_cap is not None:
            writer.add_final_logit_softcapping(config.final_logit_soft_cap)
    if generation == 3:
        writer.add_rope_freq_base_swa(config.local_rope_wavelength)
        writer.add_sliding_window_pattern(config.sliding_window_pattern)


def _one_or_all(values: list[int]) -> int | list[int]:
    """Returns a setting of all layers as one number where it is one."""
    return values[0] if len(set(values)) == 1 else values


def _add_vocabulary(writer: "gguf.GGUFWriter", model: keras.Model, config: GemmaConfig) -> None:
    tokenizer = getattr(model.preprocessor, "tokenizer", None)
    if tokenizer is None:
        writer.add_tokenizer_model("none")
        return
    # Of a Gemma 4 llama.cpp reads the merges themselves, with the scores beside them.
    merged = config.generation == 4
    found = vocabulary.describe(tokenizer.core, config.vocabulary_size, merged=merged)
    writer.add_tokenizer_model(vocabulary.MERGED if merged else "llama")
    if merged:
        writer.add_token_merges(found.merges)
    else:
        writer.add_tokenizer_pre("default")
    writer.add_token_list(found.texts)
    writer.add_token_scores(found.scores)
    writer.add_token_types(found.kinds)
    writer.add_add_space_prefix(found.space_prefix)
    writer.add_eos_token_id(tokenizer.end_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(tokenizer.start_token_id is not None)
    writer.add_add_eos_token(False)
    if tokenizer.start_token_id is not None:
        writer.add_bos_token_id(tokenizer.start_token_id)
    if found.unknown is not None:
        writer.add_unk_token_id(found.unknown)
    ids = {start: tokenizer.core.token_to_id(end) for start, end in ENDS_OF_TURNS.items()}
    start = next((text for text, i in ids.items() if i is not None), None)
    templates = with_names({"chat_template": tokenizer.chat_template}, {})["chat_template"]
    if start is not None:
        writer.add_eot_token_id(ids[start])
        usual = TEMPLATE.replace("<START>", start).replace("<END>", ENDS_OF_TURNS[start])
        templates = templates or usual
    if templates:
        writer.add_chat_template(templates)


def _check(path: Path, config: GemmaConfig) -> None:
    """Raises where the file, read again, describes another model.

    llama.cpp takes for granted what `weights_gguf` does where a file is silent.
    """
    found = GemmaConfig(**weights_gguf.FORMAT.open_checkpoint(path, {}, {}, weights=False).backbone)
    wanted, read = _meaning(config), _meaning(found)
    if lost := [f"{name}={wanted[name]!r}" for name in wanted if wanted[name] != read[name]]:
        raise InputError(
            f"llama.cpp's {ARCHITECTURES[config.generation]} has no place for {', '.join(lost)}"
        )


def _meaning(config: GemmaConfig) -> dict[str, Any]:
    """Returns what decides the results, however the config says it."""
    local = [config.is_local(i) for i in range(config.num_layers)]
    names = (
        *("vocabulary_size", "num_layers", "num_query_heads", "num_key_value_heads"),
        *("hidden_dim", "head_dim", "mlp_dim", "query_scale"),
        *("use_query_key_norm", "use_post_ffw_norm", "use_post_attention_norm"),
        *("attention_logit_soft_cap", "final_logit_soft_cap"),
    )
    found = {name: getattr(config, name) for name in names}
    if config.generation == 4:
        return found | _blocks(config)
    found["layer_norm_epsilon"] = float(np.float32(config.layer_norm_epsilon))
    found["layers with a window"] = [i for i, there in enumerate(local) if there]
    for what, kinds in (("local", any(local)), ("global", not all(local))):
        for part in ("wavelength", "scaling_factor") if kinds else ():
            name = f"{what}_rope_{part}"
            found[name] = float(np.float32(getattr(config, name)))
    if any(local):
        found["sliding_window_size"] = config.sliding_window_size
    return found


def _blocks(config: GemmaConfig) -> dict[str, Any]:
    """Returns what decides the results of a Gemma 4, block by block."""
    found: dict[str, Any] = {"per_layer_vocabulary": config.per_layer_vocabulary}
    for i in range(config.num_layers):
        block = asdict(config.block(i))
        block["turned channels"] = int(block.pop("rope_turned") * block["head_dim"] // 2)
        for name in ("epsilon", "rope_wavelength", "rope_scaling", "query_scale"):
            block[name] = float(np.float32(block[name]))
        found |= {f"{name} of layer {i}": value for name, value in block.items()}
    return found
