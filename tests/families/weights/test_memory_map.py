"""On torch, tables that are only looked up stay in the pages of their file."""

from pathlib import Path

import keras
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from kmodels.models import GemmaCausalLM

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
    for old, new in zip(model.weights, again.weights, strict=True):
        assert bool(keras.ops.all(old.value == new.value)), old.path
