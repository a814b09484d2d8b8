"""Lets `import torchvision` (and so timm) work beside a CPU build of torch.

PyPI's torchvision for Linux is built for CUDA: its library does not load here, and then its Python
side fails on two operators that nobody has defined. timm needs only the Python side.
"""

from importlib.util import find_spec
from pathlib import Path

_defined = []  # the definitions last as long as the object


def define_torchvision_operators() -> None:
    """Define the two operators unless torchvision's own library loads; call before its import."""
    spec = find_spec("torchvision")
    if spec is None or _defined:
        return
    import torch

    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(library))
    except OSError:
        namespace = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            namespace.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _defined.append(namespace)
