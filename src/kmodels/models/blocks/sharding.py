"""The layout tables that families share: of blocks, of decoders and of text encoders.

Heads and MLP can be cut so that each pair of matmuls needs one all-reduce (Shoeybi et al. 2019,
section 3), a decoder's vocabulary too, and the side of each matrix that all blocks share so that
no device holds a whole one (Rajbhandari et al. 2020). The two matrices of an adapter are cut as the
side of the kernel that they share, a quantized kernel as the one that it stands for. Patterns
match whole paths.
"""

# Those of scales that are shared by several outputs are not cut.
KERNEL = r"kernel(?:_(?!nested_scale|offset)\w+)?"

Table = dict[str, tuple[str | None, ...]]


def _dense(path: str, inner: str, outer: str | None, has_bias: bool = False) -> Table:
    """Returns the patterns of a linear layer: its kernel, those of an adapter, and its bias."""
    layer = rf"(?:.*/)?{path}"
    return {
        rf"{layer}/{KERNEL}": (inner, outer),
        rf"{layer}/(?:.*/)?lora_a": (inner, None),
        rf"{layer}/(?:.*/)?lora_b": (None, outer),
        **({f"{layer}/bias": (outer,)} if has_bias else {}),
    }


BLOCKS: Table = {
    **_dense("attention/(?:query|key|value)", "embed", "heads", has_bias=True),
    **_dense("attention/output", "heads", "embed"),
    **_dense("mlp/(?:gate|up)", "embed", "mlp", has_bias=True),
    **_dense("mlp/down", "mlp", "embed"),
}
PER_LAYER: Table = {
    r"(?:.*/)?per_layer_embedding/table/embeddings": ("vocab", "embed"),
    **_dense("per_layer_embedding/model_projection", "embed", None),
    **_dense("per_layer/input_gate", "embed", "mlp"),
    **_dense("per_layer/projection", "mlp", "embed"),
}
# A device has some of the experts, and all of each.
EXPERTS: Table = {
    rf"(?:.*/)?experts/gate_up/(?:{KERNEL}|lora_a)": ("experts", "embed", None),
    r"(?:.*/)?experts/gate_up/lora_b": ("experts", None, None),
    rf"(?:.*/)?experts/down/(?:{KERNEL}|lora_b)": ("experts", None, "embed"),
    r"(?:.*/)?experts/down/lora_a": ("experts", None, None),
    **_dense("router/projection", "embed", None),
}
TABLES: Table = {
    r"(?:.*/)?token_embedding/(?:reverse_)?embeddings": ("vocab", "embed"),
    r"(?:.*/)?token_embedding/lora_rows": (None, "embed"),
    r"(?:.*/)?token_embedding/lora_a": ("vocab", None),
    r"(?:.*/)?token_embedding/lora_b": (None, "embed"),
    r"(?:.*/)?token_embedding/reverse_lora_a": ("embed", None),
    r"(?:.*/)?token_embedding/reverse_lora_b": (None, "vocab"),
}
# With the dense layers behind the pooling of an embedder.
DECODER: Table = TABLES | BLOCKS | PER_LAYER | EXPERTS | _dense(r"dense_\d+", "embed", None)
TEXT_ENCODER: Table = {
    **TABLES,
    **BLOCKS,
    r"(?:.*/)?position_embedding/embeddings": (None, "embed"),
    rf"(?:.*/)?text_projection/{KERNEL}": ("embed", None),
}
