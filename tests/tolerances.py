"""The one table of tolerances: how far a result may lie from its reference.

Absolute, on values of order one; gradients use the same figure times the largest gradient.
A test never loosens a figure of its own: where one does not hold, the code is wrong.
"""

from kmodels.tools.op_cases import HALF_AND_DOUBLE
from kmodels.tools.op_cases import TOLERANCES as OF_OPS

TOLERANCES: dict[str, dict[str, float]] = {
    **OF_OPS,
    # Four roundings to bfloat16, one after the other: input, product, gradient and its gradient.
    "second_derivatives": {"bfloat16": 5e-2},
    "transforms": {"float32": 1e-5, "bfloat16": 2e-2},
    "remat": {"float32": 1e-5, "bfloat16": 2e-2},
    "pictures": {"float32": 2e-5},
    "optimizer": {"float32": 2e-6, "bfloat16": 2e-2},
    "logits": {"float32": 1e-4, "bfloat16": 2e-2, **HALF_AND_DOUBLE},
    "logits_across": {"float32": 1e-5},
    # What keras-hub asserts of its own models, absolute and relative.
    "hub_case": {"float32": 1e-6},
    "hidden": {"float32": 1e-4},
    "first_loss": {"float32": 1e-4},
    # A step on kernels of a few bits, and the step on the floats that they stand for.
    "quantized_step": {"float32": 1e-5},
    "losses": {"float32": 1e-4},
    # Losses and their gradients of the same log-probabilities.
    "trl_losses": {"float32": 1e-6},
    "trl_runs": {"float32": 1e-4},
    "trl_gradients": {"float32": 1e-5},
    # llama.cpp takes GELU from a table in half precision: 2 ** -11 of values about 4. Built without
    # the table it keeps to "logits" (docs/convert.md), as transformers does on the same file.
    "llama_cpp": {"float32": 2e-3},
    "losses_of_ranks": {"float32": 5e-6, "bfloat16": 5e-3},
}


def tolerance(what: str, dtype: str = "float32") -> float:
    """The tolerance of one quantity in one dtype."""
    return TOLERANCES[what][dtype]
