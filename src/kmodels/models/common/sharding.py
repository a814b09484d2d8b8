"""The layout table of decoders, which a family takes as its own.

The vocabulary, the heads and the MLP can be cut so that each pair of matmuls needs one all-reduce
(Shoeybi et al. 2019, section 3), and the other side of each matrix so that no device holds a whole
one (Rajbhandari et al. 2020). The two matrices of an adapter are cut as the side of the kernel that
they share, a kernel in few bits as the one that it stands for. Patterns match whole paths.
"""

_KERNEL = "kernel(?:_int8|_int4|_scale|_zero)?"

DECODER: dict[str, tuple[str | None, ...]] = {
    r"(?:.*/)?token_embedding/(?:reverse_)?embeddings": ("vocab", "embed"),
    r"(?:.*/)?token_embedding/lora_rows": (None, "embed"),
    rf"(?:.*/)?attention/(?:query|key|value)/{_KERNEL}": ("embed", "heads"),
    r"(?:.*/)?attention/(?:query|key|value)/(?:.*/)?lora_a": ("embed", None),
    r"(?:.*/)?attention/(?:query|key|value)/(?:.*/)?lora_b": (None, "heads"),
    rf"(?:.*/)?attention/output/{_KERNEL}": ("heads", "embed"),
    r"(?:.*/)?attention/output/(?:.*/)?lora_a": ("heads", None),
    r"(?:.*/)?attention/output/(?:.*/)?lora_b": (None, "embed"),
    rf"(?:.*/)?mlp/(?:gate|up)/{_KERNEL}": ("embed", "mlp"),
    r"(?:.*/)?mlp/(?:gate|up)/(?:.*/)?lora_a": ("embed", None),
    r"(?:.*/)?mlp/(?:gate|up)/(?:.*/)?lora_b": (None, "mlp"),
    rf"(?:.*/)?mlp/down/{_KERNEL}": ("mlp", "embed"),
    r"(?:.*/)?mlp/down/(?:.*/)?lora_a": ("mlp", None),
    r"(?:.*/)?mlp/down/(?:.*/)?lora_b": (None, "embed"),
}
