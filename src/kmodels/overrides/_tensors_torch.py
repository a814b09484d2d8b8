"""Arguments of ops as torch's tensors."""

from typing import Any

import keras
import torch
from keras import Variable
from torch.compiler import is_compiling

from kmodels.core import internals_torch
from kmodels.core.keras_internals import no_autocast, value_of

# Others belong to a mode of torch, as that of shapes without numbers.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

# A constant, so that the compiler can trace what asks for it.
LACKING = frozenset(
    dtype for dtype in (torch.bfloat16, torch.float16) if not internals_torch.has_matmul(dtype)
)


def widens(x: torch.Tensor) -> bool:
    """Returns whether products with a tensor are made in float32."""
    return x.dtype in LACKING and x.device.type == "cpu"


def as_tensor(x: Any) -> torch.Tensor:
    """`keras.ops.convert_to_tensor`, at once for what is a tensor or a variable.

    Keras looks for symbolic tensors, devices and dtypes first. The copy takes as long as the
    arithmetic where one token goes through a model.
    """
    kind = type(x)
    if kind in PLAIN:  # the nearest question takes a tenth of the time of the general one
        return x
    if kind is Variable or isinstance(x, Variable):
        # The compiler reads no flags of a thread; both are cast where a layer's autocast says so.
        return x.value if is_compiling() else value_of(x)
    if isinstance(x, torch.Tensor):
        return x
    return keras.ops.convert_to_tensor(x)


def stored(x: Any) -> torch.Tensor:
    """Returns the same without the cast, for what a backward pass casts again."""
    if isinstance(x, Variable) and not is_compiling():
        return value_of(x, cast=False)
    with no_autocast():
        return as_tensor(x)
