"""Second derivatives through every override, against those of its op's generic body."""

import keras
import ml_dtypes
import numpy as np
import pytest

from gradients import second_derivative
from kmodels import ops
from op_cases import few_cases
from tolerances import tolerance

MODES = {
    "torch": ["reverse"],
    "jax": ["reverse", "forward"],
    "tensorflow": ["reverse", "forward", "graph"],
}[keras.backend.backend()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "label", "arrays", "keywords"),
    few_cases(),
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_second_derivatives(name, label, arrays, keywords, mode) -> None:
    """As a gradient penalty has them: the gradients of the squared gradients' sum."""
    op = getattr(ops, name)

    def first(found):
        return found[0] if isinstance(found, tuple) else found

    expected = second_derivative(lambda *x: first(op.generic(*x, **keywords)), arrays, mode)
    # Without an override a call of the op is one of its generic body.
    found = expected
    if op.override is not None:
        found = second_derivative(lambda *x: first(op(*x, **keywords)), arrays, mode)
    for ours, right in zip(found, expected, strict=True):
        assert np.abs(right).max() > 0
        assert np.abs(ours - right).max() <= 10 * tolerance(name) * max(1.0, np.abs(right).max())


@pytest.mark.parametrize(
    ("name", "label", "arrays", "keywords"),
    few_cases(),
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_second_derivatives_in_bfloat16(name, label, arrays, keywords) -> None:
    """Against those of the generic body in float32, at the same values."""
    op = getattr(ops, name)
    arrays = [x.astype(ml_dtypes.bfloat16).astype("float32") for x in arrays]

    def rounded(*values):
        found = op(*[keras.ops.cast(x, "bfloat16") for x in values], **keywords)
        return keras.ops.cast(found[0] if isinstance(found, tuple) else found, "float32")

    def exact(*values):
        found = op.generic(*values, **keywords)
        return found[0] if isinstance(found, tuple) else found

    found, expected = (second_derivative(f, arrays, "reverse") for f in (rounded, exact))
    limit = tolerance("second_derivatives", "bfloat16")
    for ours, right in zip(found, expected, strict=True):
        assert np.abs(ours - right).max() <= limit * np.abs(right).max()
