"""Second derivatives through every override, against those of its op's generic body."""

import functools

import keras
import ml_dtypes
import numpy as np
import pytest

from gradients import assert_near, first, second_derivative
from kmodels import ops
from op_cases import few_cases
from tolerances import tolerance

MODES = {
    "torch": ["reverse"],
    "jax": ["reverse", "forward"],
    "tensorflow": ["reverse", "forward", "graph"],
}[keras.backend.backend()]
# TensorFlow traces a function for each operation in it.
TONIGHT = pytest.mark.nightly("tensorflow")


CASES = few_cases()
# Without an override a call of the op is one of its generic body.
OVERRIDDEN = [i for i, (name, *_) in enumerate(CASES) if getattr(ops, name).override is not None]


def cases(numbers):
    """A test of cases by their numbers."""
    return pytest.mark.parametrize("number", numbers, ids=lambda i: "-".join(CASES[i][:2]))


@functools.cache
def derivatives(number, body, mode):
    """Returns the second derivatives of an op, of its generic body, or of the op in bfloat16.

    All at values that bfloat16 holds, so that those of the generic body serve both tests.
    """
    name, _, arrays, keywords = CASES[number]
    op = getattr(ops, name)
    arrays = [x.astype(ml_dtypes.bfloat16).astype("float32") for x in arrays]

    def run(*values):
        if body == "bfloat16":
            values = [keras.ops.cast(x, "bfloat16") for x in values]
        found = (op.generic if body == "generic" else op)(*values, **keywords)
        return keras.ops.cast(first(found), "float32")

    return second_derivative(run, arrays, mode)


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=TONIGHT if mode == "forward" else ()) for mode in MODES]
)
@cases(OVERRIDDEN)
def test_second_derivatives(number, mode) -> None:
    """As a gradient penalty has them: the gradients of the squared gradients' sum."""
    name = CASES[number][0]
    # A graph computes what an eager call computes, and reverse mode also what forward mode does.
    cheaper = {"graph": "reverse", "forward": "along"}
    expected = derivatives(number, "generic", cheaper.get(mode, mode))
    found = derivatives(number, "op", mode)
    assert_near(found, expected, 10 * tolerance(name))


@pytest.mark.nightly("jax", "tensorflow")
@cases(range(len(CASES)))
def test_second_derivatives_in_bfloat16(number) -> None:
    """Against those of the generic body in float32, at the same values."""
    found, expected = (derivatives(number, body, "reverse") for body in ("bfloat16", "generic"))
    limit = tolerance("second_derivatives", "bfloat16")
    for ours, right in zip(found, expected, strict=True):
        assert np.abs(ours - right).max() <= limit * np.abs(right).max()
