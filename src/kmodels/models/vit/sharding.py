"""How a ViT's variables lie on a mesh with a "model" axis.

Query, key, value and the first MLP layer are cut by output, the layers after them by input, so that
each pair of matmuls needs one all-reduce (Shoeybi et al. 2019, section 3). Patterns match variable
paths as `keras.distribution.LayoutMap` does, by `re.fullmatch`; what none matches lies on every
device.
"""

LAYOUT: dict[str, tuple[str | None, ...]] = {
    r"(?:.*/)?attention/(?:query|key|value)/kernel": (None, "model"),
    r"(?:.*/)?attention/(?:query|key|value)/bias": ("model",),
    r"(?:.*/)?attention/output/kernel": ("model", None),
    r"(?:.*/)?mlp/up/kernel": (None, "model"),
    r"(?:.*/)?mlp/up/bias": ("model",),
    r"(?:.*/)?mlp/down/kernel": ("model", None),
}
