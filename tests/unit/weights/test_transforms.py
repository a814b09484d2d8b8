"""Changes of layout against NumPy, there and back; resized positions against Pillow and SciPy."""

import itertools
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage

from kmodels.weights import Transform, identity, patch_kernel, prepend_zeros, reshape, transpose
from kmodels.weights.positions import Method, resize_matrix, resize_positions, table_grid
from kmodels.weights.rules import source_shape, split_points
from refusals import refused

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


# === Position embeddings ===

SIZES = [(14, 16), (16, 14), (8, 5), (5, 11), (7, 7), (2, 9), (24, 3)]

RESAMPLING = {
    "bicubic_antialias": Image.Resampling.BICUBIC,
    "bilinear_antialias": Image.Resampling.BILINEAR,
}


@pytest.mark.parametrize("method", get_args(Method))
def test_constants_stay_and_the_same_size_changes_nothing(method):
    for old, new in SIZES:
        np.testing.assert_allclose(resize_matrix(old, new, method).sum(1), 1, atol=1e-12)
    np.testing.assert_allclose(resize_matrix(7, 7, method), np.eye(7), atol=1e-12)


@pytest.mark.parametrize("method", RESAMPLING)
@pytest.mark.parametrize(("old", "new"), SIZES)
def test_antialiased_resizing_is_pillows(old, new, method):
    x = np.random.default_rng(old + new).normal(size=(old, 3)).astype("float32")
    pillow = Image.fromarray(x).resize((3, new), RESAMPLING[method])
    got = resize_matrix(old, new, method) @ x
    np.testing.assert_allclose(got, np.asarray(pillow), atol=2e-6)


@pytest.mark.parametrize(("old", "new"), SIZES)
def test_bilinear_is_scipys_at_pixel_centres(old, new):
    x = np.random.default_rng(old + new).normal(size=old)
    scipy = ndimage.zoom(x, new / old, order=1, mode="nearest", grid_mode=True)
    np.testing.assert_allclose(resize_matrix(old, new, "bilinear") @ x, scipy, atol=1e-12)


def test_the_methods_differ_so_that_the_origin_matters():
    found = [resize_matrix(8, 5, method) for method in get_args(Method)]
    assert all(np.abs(a - b).max() > 0.05 for a, b in itertools.pairwise(found))


def test_prefix_rows_stay_and_axes_are_not_swapped():
    rows, columns = np.mgrid[0:4, 0:6]
    grid = np.stack([rows, columns], -1).reshape(1, 24, 2).astype("float32")
    table = np.concatenate([np.full((1, 1, 2), 9, "float32"), grid], axis=1)
    got = resize_positions(table, (4, 6), (8, 6), 1, "bilinear")
    assert got.dtype == np.float32
    assert (got[:, 0] == 9).all()
    resized = got[0, 1:].reshape(8, 6, 2)
    np.testing.assert_allclose(resized[:, :, 1], np.arange(6)[None].repeat(8, 0), atol=1e-6)
    np.testing.assert_allclose(resized[0:3, 0, 0], [0, 0.25, 0.75], atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "fronts", "grids", "expected"),
    [
        (49, (0,), [], (7, 7)),
        (50, (1,), [], (7, 7)),
        (51, (2, 0), [], (7, 7)),
        # 14 x 16 patches and a class token are as many rows as 15 x 15 patches.
        (225, (0,), [], (15, 15)),
        (225, (1, 0), [], "225 rows, which is no square and 1 in front; give image_shape="),
        (225, (1, 0), [], "of the file, or position_over_prefix=False if none are in front"),
        (225, (1, 0), [(14, 16)], (14, 16)),
        (225, (1, 0), [(15, 15)], (15, 15)),
        (225, (1,), [(15, 15)], "225 rows, which is no square and 1 in front"),
        (197, (1, 0), [(14, 16), (9, 9)], (14, 14)),
        (50, (0,), [], "pos has 50 rows, which is no square; give image_shape="),
        (1, (1,), [], "pos has 1 rows"),
    ],
)
def test_the_grid_of_a_table_is_one_that_fits_or_a_square(rows, fronts, grids, expected):
    if isinstance(expected, str):
        refused(expected, table_grid, "pos", rows, fronts, grids)
    else:
        assert table_grid("pos", rows, fronts, grids) == expected
