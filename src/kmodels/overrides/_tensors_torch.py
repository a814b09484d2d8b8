"""Arguments of ops as torch's tensors."""

from typing import Any

import keras
import torch
from keras import Variable
from torch.compiler import is_compiling

from kmodels.core import internals_torch
from kmodels.core.keras_internals import no_autocast, value_of

# Other classes belong to a mode of torch, such as fake tensors.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

# Half precision dtypes without fast products. A constant, so that the compiler can trace it.
LACKING = frozenset(
    dtype for dtype in (torch.bfloat16, torch.float16) if not internals_torch.has_matmul(dtype)
)


def widens(x: torch.Tensor) -> bool:
    """Returns True if products with a tensor are made in float32."""
    return x.dtype in LACKING and x.device.type == "cpu"


def as_tensor(x: Any) -> torch.Tensor:
    """`keras.ops.convert_to_tensor` with a short path for tensors and variables.

    Keras first checks for symbolic tensors, devices and dtypes. When a model decodes one token,
    that takes as long as the arithmetic.
    """
    kind = type(x)
    if kind in PLAIN:  # a tenth of the time of isinstance
        return x
    if kind is Variable or isinstance(x, Variable):
        # The compiler cannot read flags of a thread; both cast as the layer's autocast demands.
        return x.value if is_compiling() else value_of(x)
    if isinstance(x, torch.Tensor):
        return x
    return keras.ops.convert_to_tensor(x)


def stored(x: Any) -> torch.Tensor:
    """Returns a tensor without autocast, for weights that the backward pass casts again."""
    if isinstance(x, Variable) and not is_compiling():
        return value_of(x, cast=False)
    with no_autocast():
        return as_tensor(x)
