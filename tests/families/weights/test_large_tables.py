"""A large table is read into the memory where it stays, a part at a time, or stays in its file."""

from pathlib import Path

import keras
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from arrays import assert_equal
from kmodels.models import GemmaCausalLM
from kmodels.weights import gather, tensors
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
    fill_directly = gather.host.fill_directly

    def counted(variable: keras.Variable, source: LazyArray) -> bool:
        parts = len(list(source.rows()))
        calls.append((variable.path, parts, fill_directly(variable, source)))
        return calls[-1][-1]

    monkeypatch.setattr(gather.host, "fill_directly", counted)
    monkeypatch.setattr(tensors, "PART", 4096)
    again = GemmaCausalLM.from_preset(tmp_path / "model", dtype=dtype)
    (table,) = [call for call in calls if call[0].endswith("token_embedding/embeddings")]
    assert table[1] > 2
    # TensorFlow copies a variable that was assigned in parts at each read.
    assert table[2] == (keras.backend.backend() != "tensorflow")
    assert [v.dtype for v in again.weights] == [v.dtype for v in whole.weights]
    assert_equal(again.weights, whole.weights)


# === In the pages of the file, on torch ===

IDS = {"token_ids": [[5, 6, 7, 8]], "padding_mask": [[1, 1, 1, 0]]}


@pytest.fixture
def directory(tmp_path) -> Path:
    keras.utils.set_random_seed(0)
    GemmaCausalLM.from_preset("gemma4_debug", dtype="bfloat16").save_to_preset(tmp_path / "model")
    return tmp_path / "model"


def table_of(model: keras.Model) -> keras.Variable:
    return model.backbone.per_layer_embedding.table.embeddings


def is_mapped(variable: keras.Variable) -> bool:
    """Whether a value lies in the pages of a file of weights."""
    address = variable.value.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return line.endswith(".safetensors")
    return False


def test_the_table_lies_in_its_file_and_the_output_layer_does_not(directory):
    """Its values are those of a copy."""
    mapped = GemmaCausalLM.from_preset(directory, dtype="bfloat16")
    assert is_mapped(table_of(mapped))
    assert not is_mapped(mapped.backbone.token_embedding.embeddings)
    copied = GemmaCausalLM.from_preset(directory, dtype="bfloat16", load_weights=False)
    copied.set_weights(mapped.get_weights())
    assert not is_mapped(table_of(copied))
    inputs = {name: np.array(ids) for name, ids in IDS.items()}
    assert_array_equal(*(keras.ops.convert_to_numpy(model(inputs)) for model in (mapped, copied)))
    # Another dtype is copied.
    assert not is_mapped(table_of(GemmaCausalLM.from_preset(directory, dtype="float32")))


def test_training_the_table_leaves_the_file_as_it_is(directory):
    before = {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()}
    model = GemmaCausalLM.from_preset(directory, dtype="bfloat16", preprocessor=None)
    first = keras.ops.convert_to_numpy(keras.ops.cast(table_of(model).value, "float32"))
    model.compile(keras.optimizers.SGD(1.0))
    ids = np.array(IDS["token_ids"] * 2)
    model.fit({"token_ids": ids, "padding_mask": np.ones_like(ids)}, ids, batch_size=2, verbose=0)
    trained = keras.ops.convert_to_numpy(keras.ops.cast(table_of(model).value, "float32"))
    assert (trained[IDS["token_ids"][0]] != first[IDS["token_ids"][0]]).any()
    assert {file: file.read_bytes() for file in before} == before


def test_a_model_can_be_saved_over_the_file_that_it_lies_in(directory):
    model = GemmaCausalLM.from_preset(directory, dtype="bfloat16")
    wanted = model.backbone.count_params()
    model.save_to_preset(directory)
    again = GemmaCausalLM.from_preset(directory, dtype="bfloat16")
    assert again.backbone.count_params() == wanted
    assert_equal(again.weights, model.weights)
