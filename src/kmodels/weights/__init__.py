"""Tables between the names of a file and the variables of a model, and what reads and writes them.

A format is a list of `Rule`. `load` is strict in both directions and changes nothing unless all
fits; `export` walks the same table backwards.
"""

from kmodels.weights.engine import export, load
from kmodels.weights.files import read_npz, read_safetensors, write_safetensors
from kmodels.weights.rules import (
    Rule,
    SourceCheckpoint,
    Transform,
    identity,
    leading_axes,
    patch_kernel,
    prepend_zeros,
    reshape,
    transpose,
)
from kmodels.weights.tensors import LazyArray, constant

__all__ = [
    "LazyArray",
    "Rule",
    "SourceCheckpoint",
    "Transform",
    "constant",
    "export",
    "identity",
    "leading_axes",
    "load",
    "patch_kernel",
    "prepend_zeros",
    "read_npz",
    "read_safetensors",
    "reshape",
    "transpose",
    "write_safetensors",
]
