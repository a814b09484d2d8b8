"""The layout table of ViT: what each dimension of its variables is.

Query, key, value and the first MLP layer can be cut by output, the layers after them by input, so
that each pair of matmuls needs one all-reduce (Shoeybi et al. 2019, section 3), and the side that
all blocks share so that no device holds a whole matrix (Rajbhandari et al. 2020). The two matrices
of an adapter are cut as the side of the kernel that they share, a kernel in few bits as the one
that it stands for. Patterns match whole paths.
"""

_KERNEL = "kernel(?:_int8|_int4|_scale|_zero)?"

LAYOUT: dict[str, tuple[str | None, ...]] = {
    r"(?:.*/)?patch_embedding/kernel": (None, "embed"),
    r"(?:.*/)?tokens/.*": (None, None, "embed"),
    rf"(?:.*/)?attention/(?:query|key|value)/{_KERNEL}": ("embed", "heads"),
    r"(?:.*/)?attention/(?:query|key|value)/bias": ("heads",),
    r"(?:.*/)?attention/(?:query|key|value)/(?:.*/)?lora_a": ("embed", None),
    r"(?:.*/)?attention/(?:query|key|value)/(?:.*/)?lora_b": (None, "heads"),
    rf"(?:.*/)?attention/output/{_KERNEL}": ("heads", "embed"),
    r"(?:.*/)?attention/output/(?:.*/)?lora_a": ("heads", None),
    r"(?:.*/)?attention/output/(?:.*/)?lora_b": (None, "embed"),
    rf"(?:.*/)?mlp/(?:gate|up)/{_KERNEL}": ("embed", "mlp"),
    r"(?:.*/)?mlp/(?:gate|up)/bias": ("mlp",),
    r"(?:.*/)?mlp/(?:gate|up)/(?:.*/)?lora_a": ("embed", None),
    r"(?:.*/)?mlp/(?:gate|up)/(?:.*/)?lora_b": (None, "mlp"),
    rf"(?:.*/)?mlp/down/{_KERNEL}": ("mlp", "embed"),
    r"(?:.*/)?mlp/down/(?:.*/)?lora_a": ("mlp", None),
    r"(?:.*/)?mlp/down/(?:.*/)?lora_b": (None, "embed"),
    rf"(?:.*/)?(?:pre_logits|logits|distillation_logits)/{_KERNEL}": ("embed", None),
}
