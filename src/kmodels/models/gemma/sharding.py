"""How a Gemma's variables lie on a mesh with the axes "data" and "model".

Over "model" the vocabulary, the heads and the MLP are cut, so that each pair of matmuls needs one
all-reduce (Shoeybi et al. 2019, section 3); over "data" the other side of each matrix is, so that
no device holds a whole one (Rajbhandari et al. 2020). The two matrices of an adapter are cut as the
side of the kernel that they share. Patterns match variable paths by `re.fullmatch`, as
`keras.distribution.LayoutMap` does; what none matches, the norms, is on every device.
"""

import keras

_OUTWARD = r"(?:.*/)?(?:attention/(?:query|key|value)|mlp/(?:gate|up))"
_INWARD = r"(?:.*/)?(?:attention/output|mlp/down)"

LAYOUT: dict[str, tuple[str | None, ...]] = {
    r"(?:.*/)?token_embedding/embeddings": ("model", "data"),
    rf"{_OUTWARD}/kernel": ("data", "model"),
    rf"{_OUTWARD}/(?:.*/)?lora_a": ("data", None),
    rf"{_OUTWARD}/(?:.*/)?lora_b": (None, "model"),
    rf"{_INWARD}/kernel": ("model", "data"),
    rf"{_INWARD}/(?:.*/)?lora_a": ("model", None),
    rf"{_INWARD}/(?:.*/)?lora_b": (None, "data"),
}


def layout_map(
    device_mesh: keras.distribution.DeviceMesh, model: str, data: str
) -> keras.distribution.LayoutMap:
    """`LAYOUT` for a mesh whose axes have these names."""
    names = {"model": model, "data": data, None: None}
    made = keras.distribution.LayoutMap(device_mesh)
    for pattern, axes in LAYOUT.items():
        made[pattern] = tuple(names[axis] for axis in axes)
    return made
