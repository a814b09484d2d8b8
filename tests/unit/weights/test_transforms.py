"""Each change of layout against NumPy written out, and there and back bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmodels.weights import Transform, identity, patch_kernel, prepend_zeros, reshape, transpose
from kmodels.weights.transforms import source_shape, split_points

CASES: list[tuple[str, Transform, tuple[int, ...]]] = [
    ("identity", identity, (3, 4)),
    ("transpose", transpose, (3, 5)),
    ("reshape", reshape((6, 2, 3), (6, 6)), (6, 2, 3)),
    ("patch_kernel", patch_kernel(2, 3), (7, 3, 2, 2)),
]


@pytest.mark.parametrize(("name", "transform", "shape"), CASES, ids=[case[0] for case in CASES])
def test_there_and_back_is_bit_equal(name, transform, shape):
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    there = transform.forward(x)
    assert transform.inverse(there).tobytes() == x.tobytes()
    assert source_shape([there.shape], transform, 0) == shape


@given(patch=st.integers(1, 4), channels=st.integers(1, 3), width=st.integers(1, 5))
@settings(max_examples=15, deadline=None)
def test_patch_kernel_is_the_convolution(patch, channels, width):
    rng = np.random.default_rng(patch * 100 + channels * 10 + width)
    kernel = rng.normal(size=(width, channels, patch, patch))
    image = rng.normal(size=(patch, patch, channels))
    expected = [(kernel[d].transpose(1, 2, 0) * image).sum() for d in range(width)]
    got = image.reshape(-1) @ patch_kernel(patch, channels).forward(kernel)
    np.testing.assert_allclose(got, expected, atol=1e-12)


def test_prepended_zeros_are_left_out_and_put_back():
    x = np.ones((1, 5, 2), "float32")
    written = prepend_zeros(1).inverse(x)
    assert written.shape == (1, 6, 2)
    assert not written[:, 0].any()
    assert np.array_equal(prepend_zeros(1).forward(written), x)


def test_fused_tensors_are_cut_where_their_parts_end():
    shapes = [(4, 4), (4, 2), (4, 2)]
    assert source_shape(shapes, transpose, 0) == (8, 4)
    assert split_points(shapes, transpose, 0) == [4, 6]
