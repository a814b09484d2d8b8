"""The layout tables that families share: of blocks, of decoders and of text encoders.

Heads and MLP can be cut so that each pair of matmuls needs one all-reduce (Shoeybi et al. 2019,
section 3), a decoder's vocabulary too, and the side of each matrix that all blocks share so that
no device holds a whole one (Rajbhandari et al. 2020). The two matrices of an adapter are cut as the
side of the kernel that they share, a quantized kernel as the one that it stands for. Patterns
match whole paths.
"""

# Those of scales that are shared by several outputs are not cut.
KERNEL = r"kernel(?:_(?!nested_scale|offset)\w+)?"

BLOCKS: dict[str, tuple[str | None, ...]] = {
    rf"(?:.*/)?attention/(?:query|key|value)/{KERNEL}": ("embed", "heads"),
    r"(?:.*/)?attention/(?:query|key|value)/bias": ("heads",),
    r"(?:.*/)?attention/(?:query|key|value)/(?:.*/)?lora_a": ("embed", None),
    r"(?:.*/)?attention/(?:query|key|value)/(?:.*/)?lora_b": (None, "heads"),
    rf"(?:.*/)?attention/output/{KERNEL}": ("heads", "embed"),
    r"(?:.*/)?attention/output/(?:.*/)?lora_a": ("heads", None),
    r"(?:.*/)?attention/output/(?:.*/)?lora_b": (None, "embed"),
    rf"(?:.*/)?mlp/(?:gate|up)/{KERNEL}": ("embed", "mlp"),
    r"(?:.*/)?mlp/(?:gate|up)/bias": ("mlp",),
    r"(?:.*/)?mlp/(?:gate|up)/(?:.*/)?lora_a": ("embed", None),
    r"(?:.*/)?mlp/(?:gate|up)/(?:.*/)?lora_b": (None, "mlp"),
    rf"(?:.*/)?mlp/down/{KERNEL}": ("mlp", "embed"),
    r"(?:.*/)?mlp/down/(?:.*/)?lora_a": ("mlp", None),
    r"(?:.*/)?mlp/down/(?:.*/)?lora_b": (None, "embed"),
}
PER_LAYER: dict[str, tuple[str | None, ...]] = {
    r"(?:.*/)?per_layer_embedding/table/embeddings": ("vocab", "embed"),
    rf"(?:.*/)?per_layer_embedding/model_projection/{KERNEL}": ("embed", None),
    r"(?:.*/)?per_layer_embedding/model_projection/(?:.*/)?lora_a": ("embed", None),
    r"(?:.*/)?per_layer_embedding/model_projection/(?:.*/)?lora_b": (None, None),
    rf"(?:.*/)?per_layer/input_gate/{KERNEL}": ("embed", "mlp"),
    r"(?:.*/)?per_layer/input_gate/(?:.*/)?lora_a": ("embed", None),
    r"(?:.*/)?per_layer/input_gate/(?:.*/)?lora_b": (None, "mlp"),
    rf"(?:.*/)?per_layer/projection/{KERNEL}": ("mlp", "embed"),
    r"(?:.*/)?per_layer/projection/(?:.*/)?lora_a": ("mlp", None),
    r"(?:.*/)?per_layer/projection/(?:.*/)?lora_b": (None, "embed"),
}
# A device has some of the experts, and all of each.
EXPERTS: dict[str, tuple[str | None, ...]] = {
    rf"(?:.*/)?experts/gate_up/(?:{KERNEL}|lora_a)": ("experts", "embed", None),
    r"(?:.*/)?experts/gate_up/lora_b": ("experts", None, None),
    rf"(?:.*/)?experts/down/(?:{KERNEL}|lora_b)": ("experts", None, "embed"),
    r"(?:.*/)?experts/down/lora_a": ("experts", None, None),
    rf"(?:.*/)?router/projection/{KERNEL}": ("embed", None),
    r"(?:.*/)?router/projection/(?:.*/)?lora_a": ("embed", None),
    r"(?:.*/)?router/projection/(?:.*/)?lora_b": (None, None),
}
TABLES: dict[str, tuple[str | None, ...]] = {
    r"(?:.*/)?token_embedding/(?:reverse_)?embeddings": ("vocab", "embed"),
    r"(?:.*/)?token_embedding/lora_rows": (None, "embed"),
    r"(?:.*/)?token_embedding/lora_a": ("vocab", None),
    r"(?:.*/)?token_embedding/lora_b": (None, "embed"),
    r"(?:.*/)?token_embedding/reverse_lora_a": ("embed", None),
    r"(?:.*/)?token_embedding/reverse_lora_b": (None, "vocab"),
}
# Behind the pooling of an embedder.
DENSE: dict[str, tuple[str | None, ...]] = {
    rf"(?:.*/)?dense_\d+/{KERNEL}": ("embed", None),
    r"(?:.*/)?dense_\d+/(?:.*/)?lora_a": ("embed", None),
    r"(?:.*/)?dense_\d+/(?:.*/)?lora_b": (None, None),
}
DECODER = TABLES | BLOCKS | PER_LAYER | EXPERTS | DENSE
TEXT_ENCODER: dict[str, tuple[str | None, ...]] = {
    **TABLES,
    **BLOCKS,
    r"(?:.*/)?position_embedding/embeddings": (None, "embed"),
    rf"(?:.*/)?text_projection/{KERNEL}": ("embed", None),
}
