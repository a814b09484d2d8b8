"""GGUF files of Gemma 1, 2 and 3, as llama.cpp writes them; quantized tensors become floats."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kmodels.core.errors import InputError
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.gemma.presets import GEMMA_2, GEMMA_3
from kmodels.weights import Checkpoint, LazyArray, Rule, Transform, transpose
from kmodels.weights.gguf import open_gguf, setting

GENERATIONS = {"gemma": 1, "gemma2": 2, "gemma3": 3}
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
# The largest of each generation divides queries by the root of another number; files do not tell.
LARGEST = {2: 46, 3: 62}
BLOCK = "blk.{i}"

# llama.cpp stores norms with the 1 added that the model adds itself.
plus_one = Transform(lambda x: x - 1, lambda x: x + 1)


def rules(config: GemmaConfig) -> list[Rule]:
    """The table of one generation."""
    kernels = {
        "attn_q": "attention/query",
        "attn_k": "attention/key",
        "attn_v": "attention/value",
        "attn_output": "attention/output",
        "ffn_gate": "mlp/gate",
        "ffn_up": "mlp/up",
        "ffn_down": "mlp/down",
    }
    norms = {"attn_norm": "attention_norm", "ffn_norm": "mlp_norm"}
    if config.generation > 1:
        norms["post_attention_norm"] = "post_attention_norm"
        norms["post_ffw_norm"] = "post_mlp_norm"
    if config.generation == 3:
        norms["attn_q_norm"] = "attention/query_norm"
        norms["attn_k_norm"] = "attention/key_norm"
    table = [
        Rule("token_embd.weight", "token_embedding/embeddings"),
        Rule("output_norm.weight", "final_norm/scale", plus_one),
    ]
    for source, target in kernels.items():
        table.append(Rule(f"{BLOCK}.{source}.weight", f"block_{{i}}/{target}/kernel", transpose))
    for source, target in norms.items():
        table.append(Rule(f"{BLOCK}.{source}.weight", f"block_{{i}}/{target}/scale", plus_one))
    return table


def matches(path: Path, description: dict[str, Any]) -> bool:
    """Whether this is a GGUF file."""
    return path.suffix == ".gguf"


def open_checkpoint(
    path: Path, description: dict[str, Any], given: dict[str, Any], weights: bool
) -> Checkpoint:
    """Understands a file.

    Args:
        path: of the file.
        description: ignored; the file describes itself.
        given: unused; the file says it all.
        weights: False where only the architecture is wanted.

    Raises:
        InputError: for a file that is damaged or of another model, or without the gguf package.
    """
    reader = open_gguf(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def value(name: str, default: Any = None) -> Any:
        return setting(reader, name, default)

    architecture = value("general.architecture")
    if architecture not in GENERATIONS or "token_embd.weight" not in tensors:
        raise InputError(f"{path} holds {architecture!r}; the model reads {', '.join(GENERATIONS)}")
    try:
        vocabulary = int(tensors["token_embd.weight"].shape[1])
        backbone = _fields(architecture, vocabulary, value, path)
    except (IndexError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} has settings of the wrong kind: {error}; copy it again") from None
    found = {name: _lazy(path, tensor) for name, tensor in tensors.items()} if weights else {}
    has_tokenizer = value("tokenizer.ggml.tokens") is not None
    return Checkpoint(
        path=path,
        kind="GGUF",
        backbone=backbone,
        task={},
        preprocessor={"tokenizer": str(path)} if has_tokenizer else None,
        tensors=found,
        rules=rules(GemmaConfig(**backbone)),
    )


def _lazy(path: Path, tensor: Any) -> LazyArray:
    if tensor.tensor_type.name not in KINDS:
        raise InputError(
            f"{path}: {tensor.name} is stored as {tensor.tensor_type.name}; choose a file with "
            f"{', '.join(KINDS)}"
        )
    shape = tuple(int(size) for size in reversed(tensor.shape))

    def read() -> np.ndarray:
        import gguf

        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return np.asarray(values, "float32").reshape(shape)

    return LazyArray(shape, np.dtype("float32"), read)


def _fields(
    architecture: str, vocabulary: int, value: Callable[..., Any], path: Path
) -> dict[str, Any]:
    generation = GENERATIONS[architecture]

    def get(name: str, default: Any = None) -> Any:
        return value(f"{architecture}.{name}", default)

    wanted = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
    if missing := [name for name in wanted if get(name) is None]:
        raise InputError(f"{path} lacks {', '.join(f'{architecture}.{name}' for name in missing)}")
    layers, heads = int(get("block_count")), int(get("attention.head_count"))
    fields: dict[str, Any] = {
        "vocabulary_size": vocabulary,
        "num_layers": layers,
        "num_query_heads": heads,
        "num_key_value_heads": int(get("attention.head_count_kv", heads)),
        "hidden_dim": int(get("embedding_length")),
        "intermediate_dim": int(get("feed_forward_length")) * (1 if generation == 3 else 2),
        "head_dim": int(get("attention.key_length", 256)),
        "layer_norm_epsilon": round(float(get("attention.layer_norm_rms_epsilon", 1e-6)), 12),
    }
    scaling = 1.0
    if get("rope.scaling.type", "none") == "linear":
        scaling = float(get("rope.scaling.factor", 1.0))
    base = float(get("rope.freq_base", 1_000_000.0 if generation == 3 else 10_000.0))
    fields["global_rope_wavelength"], fields["global_rope_scaling_factor"] = base, scaling
    if generation < 3:
        fields["local_rope_wavelength"], fields["local_rope_scaling_factor"] = base, scaling
    if generation == 1:
        return fields
    fields = {**(GEMMA_2 if generation == 2 else GEMMA_3), **fields}
    if generation == 2:
        fields["attention_logit_soft_cap"] = float(get("attn_logit_softcapping", 50.0))
        fields["final_logit_soft_cap"] = float(get("final_logit_softcapping", 30.0))
    else:
        fields["local_rope_wavelength"] = float(get("rope.freq_base_swa", 10_000.0))
    fields["sliding_window_size"] = int(
        get("attention.sliding_window", fields["sliding_window_size"])
    )
    if isinstance(pattern := get("attention.sliding_window_pattern"), int):
        fields["sliding_window_pattern"] = pattern
    fields["query_head_dim_normalize"] = layers != LARGEST[generation]
    return fields
