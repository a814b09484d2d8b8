"""Packed rows of 1,024 tokens: as each text alone, and without a mask of that size."""

import keras
import numpy as np
import pytest

from arrays_made import shapes_made, squares
from gradients import to_numpy
from kmodels.models import GemmaBackbone

ROWS, LENGTH, TEXTS = 8, 1024, 2


@pytest.mark.each_backend
def test_packed_rows_equal_their_texts_and_need_no_mask() -> None:
    keras.utils.set_random_seed(0)
    backbone = GemmaBackbone.from_preset("gemma3_debug", sliding_window_size=200, num_layers=2)
    text = LENGTH // TEXTS
    rng = np.random.default_rng(0)
    token_ids = rng.integers(2, backbone.config.vocabulary_size, (ROWS, LENGTH)).astype("int32")
    segments = np.repeat([[1, 2]], ROWS, 0).repeat(text, axis=1).astype("int32")
    positions = np.tile(np.arange(text, dtype="int32"), (ROWS, TEXTS))
    packed = {"token_ids": token_ids, "segment_ids": segments, "positions": positions}
    found = to_numpy(backbone(packed))
    alone = to_numpy(backbone(token_ids.reshape(ROWS * TEXTS, text)))
    np.testing.assert_allclose(found, alone.reshape(found.shape), atol=1e-5, rtol=0)
    # What the segments hide would be seen.
    whole = to_numpy(backbone(token_ids[:1]))
    assert np.abs(whole[0, text:] - found[0, text:]).max() > 1e-2

    def run(*inputs):
        token_ids, segments, positions = inputs
        given = {"token_ids": token_ids, "segment_ids": segments, "positions": positions}
        return backbone(given)

    tensors = [keras.ops.convert_to_tensor(packed[name][:1]) for name in packed]
    assert not squares(shapes_made(run, *tensors, gradients=False), LENGTH)
