"""A large table is read into the memory where it stays, a part at a time."""

import keras
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from kmodels.models import GemmaCausalLM
from kmodels.weights import engine, gather, tensors
from kmodels.weights.tensors import LazyArray

ROWS, WIDTH = 23, 6
VALUES = np.arange(ROWS * WIDTH, dtype="float32").reshape(ROWS, WIDTH)


def parts_of(rows: int, monkeypatch) -> list[tuple[int, np.ndarray]]:
    monkeypatch.setattr(tensors, "PART", rows * WIDTH * 4)
    source = LazyArray(
        VALUES.shape, VALUES.dtype, lambda: VALUES, lambda index: VALUES[index].copy()
    )
    return list(source.rows())


@pytest.mark.parametrize("rows", [1, 5, 22])
def test_parts_have_one_shape_and_hold_every_row(rows, monkeypatch):
    found = np.full_like(VALUES, -1)
    parts = parts_of(rows, monkeypatch)
    assert {part.shape for _, part in parts} == {(rows, WIDTH)}
    for start, part in parts:
        found[start : start + rows] = part
    assert_array_equal(found, VALUES)


@pytest.mark.parametrize("rows", [0, 23, 50])
def test_what_fits_or_has_no_parts_is_read_at_once(rows, monkeypatch):
    ((start, part),) = parts_of(rows, monkeypatch)
    assert start == 0
    assert part is VALUES


@pytest.mark.each_backend
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_read_in_parts_is_the_same(dtype, tmp_path, monkeypatch):
    keras.utils.set_random_seed(0)
    GemmaCausalLM.from_preset("gemma3_debug", dtype="bfloat16").save_to_preset(tmp_path / "model")
    whole = GemmaCausalLM.from_preset(tmp_path / "model", dtype=dtype)
    calls = []
    fill_large = gather.host.fill_large

    def counted(variable: keras.Variable, source: LazyArray) -> bool:
        parts = len(list(source.rows()))
        calls.append((variable.path, parts, fill_large(variable, source)))
        return calls[-1][-1]

    monkeypatch.setattr(gather.host, "fill_large", counted)
    monkeypatch.setattr(engine, "PART", 4096)
    monkeypatch.setattr(tensors, "PART", 4096)
    again = GemmaCausalLM.from_preset(tmp_path / "model", dtype=dtype)
    (table,) = [call for call in calls if call[0].endswith("token_embedding/embeddings")]
    assert table[1] > 2
    # TensorFlow copies a variable that was assigned in parts at each read.
    assert table[2] == (keras.backend.backend() != "tensorflow")
    for old, new in zip(whole.weights, again.weights, strict=True):
        assert new.dtype == old.dtype
        assert bool(keras.ops.all(old.value == new.value)), old.path
