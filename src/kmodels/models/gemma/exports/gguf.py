"""A Gemma as llama.cpp reads it: one GGUF file with sizes, weights and vocabulary."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from kmodels import lora
from kmodels.core.errors import InputError
from kmodels.core.remote import write_file
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.gemma.weights import gguf as weights_gguf
from kmodels.text import gguf as vocabulary
from kmodels.text.settings import with_names
from kmodels.text.tokenizer import TURNS
from kmodels.weights import LazyArray, export

if TYPE_CHECKING:
    from types import ModuleType

    import gguf

# The types in which kernels and the embedding table are stored; norms are always F32.
KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "q8_0": "Q8_0"}
FILES = {"F32": "ALL_F32", "BF16": "MOSTLY_BF16", "F16": "MOSTLY_F16", "Q8_0": "MOSTLY_Q8_0"}
ARCHITECTURES = {number: name for name, number in weights_gguf.GENERATIONS.items()}
# Tokens that the published models were trained on; the config of a model does not say.
CONTEXT = {1: 8192, 2: 8192, 3: 32_768}
Q8_0_ROW = 32
# The template that Gemma's instruction models were trained on; llama.cpp would take that of another
# family.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' }}"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}{{ '\n' }}"
    "{{ message['content'] | trim }}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
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
    names = [*config.of_gemma_4, *(() if config.is_causal else ("use_bidirectional_attention",))]
    if names:
        raise InputError(
            f"a GGUF file of Gemma has no place for {', '.join(names)}; use export_to_transformers"
        )
    if importlib.util.find_spec("gguf") is None:
        raise InputError("writing GGUF needs the gguf package: pip install 'kmodels[gguf]'")
    if lora.describe(model):
        raise InputError("a GGUF file has no place for LoRA adapters; call merge_lora first")
    tensors = export(model, weights_gguf.rules(model.backbone.config))
    return write_file(path, lambda temporary: _write(temporary, model, tensors, KINDS[dtype]))


def _write(path: Path, model: keras.Model, tensors: dict[str, LazyArray], kind: str) -> None:
    import gguf

    config = model.backbone.config
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.generation])
    _add_sizes(writer, config)
    _add_vocabulary(writer, model, config.vocabulary_size)
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
    writer.add_context_length(CONTEXT[generation])
    writer.add_embedding_length(config.hidden_dim)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.num_query_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_rope_freq_base(config.global_rope_wavelength)
    writer.add_vocab_size(config.vocabulary_size)
    if config.global_rope_scaling_factor != 1.0:
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.global_rope_scaling_factor)
    if generation > 1:
        writer.add_sliding_window(config.sliding_window_size)
    if generation == 2:
        if config.attention_logit_soft_cap is not None:
            writer.add_attn_logit_softcapping(config.attention_logit_soft_cap)
        if config.final_logit_soft_cap is not None:
            writer.add_final_logit_softcapping(config.final_logit_soft_cap)
    if generation == 3:
        writer.add_rope_freq_base_swa(config.local_rope_wavelength)
        writer.add_sliding_window_pattern(config.sliding_window_pattern)


def _add_vocabulary(writer: "gguf.GGUFWriter", model: keras.Model, rows: int) -> None:
    tokenizer = getattr(model.preprocessor, "tokenizer", None)
    if tokenizer is None:
        writer.add_tokenizer_model("none")
        return
    found = vocabulary.describe(tokenizer.core, rows)
    writer.add_tokenizer_model("llama")
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
    if (end_of_turn := tokenizer.core.token_to_id(TURNS[1])) is not None:
        writer.add_eot_token_id(end_of_turn)
    templates = with_names({"chat_template": tokenizer.chat_template}, {})["chat_template"]
    if templates or end_of_turn is not None:
        writer.add_chat_template(templates or TEMPLATE)


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
    found["layer_norm_epsilon"] = float(np.float32(config.layer_norm_epsilon))
    found["layers with a window"] = [i for i, there in enumerate(local) if there]
    for what, kinds in (("local", any(local)), ("global", not all(local))):
        for part in ("wavelength", "scaling_factor") if kinds else ():
            name = f"{what}_rope_{part}"
            found[name] = float(np.float32(getattr(config, name)))
    if any(local):
        found["sliding_window_size"] = config.sliding_window_size
    return found
