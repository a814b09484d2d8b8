"""Reading and writing safetensors and npz, whole and damaged."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kmodels.core.schema import read_json
from kmodels.weights import LazyArray, constant, read_npz, read_safetensors, write_safetensors
from kmodels.weights.files import INDEX
from refusals import refused


def _arrays():
    rng = np.random.default_rng(0)
    return {
        "a": rng.normal(size=(3, 4)).astype("float32"),
        "b": rng.normal(size=(2, 5)).astype(ml_dtypes.bfloat16),
        "c": rng.normal(size=(7,)).astype("float16"),
        "d": np.float32(3.5).reshape(()),
        "e": np.arange(4),
    }


def _lazy(arrays):
    return {k: LazyArray(x.shape, x.dtype, lambda x=x: x) for k, x in arrays.items()}


@pytest.mark.parametrize("kind", [Path, str])
def test_written_files_are_read_back_bit_for_bit(tmp_path, kind):
    arrays = _arrays()
    file = kind(tmp_path / "x.safetensors")
    write_safetensors(file, _lazy(arrays), {"format": "pt"})
    found = read_safetensors(file)
    assert sorted(found) == sorted(arrays)
    for name, x in arrays.items():
        assert (found[name].shape, found[name].dtype) == (x.shape, x.dtype)
        assert found[name].read().tobytes() == x.tobytes()

    # The package itself reads what NumPy has a number for.
    del arrays["b"]
    write_safetensors(file, _lazy(arrays))
    theirs = load_file(file)
    assert all(np.array_equal(theirs[name], x) for name, x in arrays.items())
    wrong = LazyArray((2, 3), np.dtype("float32"), lambda: np.zeros((3, 2), "float32"))
    with pytest.raises(ValueError, match=r"w was announced as \(2, 3\) but is \(3, 2\)"):
        write_safetensors(file, {"w": wrong})
    np.savez(tmp_path / "x.npz", w=arrays["e"])
    assert np.array_equal(read_npz(kind(tmp_path / "x.npz"))["w"].read(), arrays["e"])


def test_values_are_read_when_asked_for_and_changed_on_the_way():
    x = constant(2.0, (2, 3)).map((3, 2), np.transpose)
    assert (x.shape, x.nbytes) == ((3, 2), 24)
    assert (x.read() == 2).all()


def test_files_that_are_removed_or_cut_or_hold_other_numbers(tmp_path):
    file = tmp_path / "x.safetensors"
    save_file({"a": np.arange(6.0)}, file)
    opened, whole = read_safetensors(file), file.read_bytes()
    file.unlink()
    np.testing.assert_array_equal(opened["a"].read(), np.arange(6.0))
    file.write_bytes(whole[:-7])
    refused(r"x\.safetensors is not a whole safetensors file", read_safetensors, file)
    save_file({"a": np.zeros(2, "complex64")}, file)
    refused("a is stored as C64; choose a file with BF16, BOOL", read_safetensors, file)


def test_shards_are_found_by_their_index(tmp_path):
    save_file({"a": np.zeros(2, "float32")}, tmp_path / "one.safetensors")
    save_file({"b": np.ones(3, "float32")}, tmp_path / "two.safetensors")
    weights = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weights}))
    found = read_safetensors(tmp_path)
    assert found["b"].read().tolist() == [1, 1, 1]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**weights, "z": "two.safetensors"}}))
    refused("names tensors that are not there: z in two", read_safetensors, tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**weights, "a": "two.safetensors"}}))
    refused("names tensors that are not there: a in two", read_safetensors, tmp_path)
    (tmp_path / INDEX).write_text(
        '{"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "a": "two.safetensors"}}'
    )
    refused("a is both 'one.safetensors' and 'two.safetensors'; keep", read_safetensors, tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weights}))
    save_file({"b": np.ones(3, "float32"), "c": np.ones(1)}, tmp_path / "two.safetensors")
    assert list(read_safetensors(tmp_path)) == ["a", "b", "c"]  # as in transformers
    save_file({"b": np.ones(3, "float32"), "a": np.ones(1)}, tmp_path / "two.safetensors")
    refused("a is in one.safetensors and in two.safetensors; c", read_safetensors, tmp_path)
    (tmp_path / "two.safetensors").unlink()
    refused(r"lacks two\.safetensors of its 2 files; copy them too", read_safetensors, tmp_path)
    (tmp_path / INDEX).write_text("{}")
    refused("weight_map is missing or null; give an object", read_safetensors, tmp_path)
    for shard in ("../x.safetensors", "/x.safetensors", "a/x", "", ".", "..", "x" * 256):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
        refused("which is not a file of the directory; copy the direct", read_safetensors, tmp_path)


ONE, LISTED, PICKLED = "model.safetensors", "part.safetensors", "pytorch_model.bin"
# Files of a directory, and the one that is read; transformers has the same order.
ORDER = {
    (ONE,): ONE,
    (ONE, INDEX, LISTED): ONE,
    (ONE, INDEX): ONE,  # of a list that an earlier save left over
    (INDEX, LISTED, "other.safetensors"): LISTED,
    ("other.safetensors", PICKLED): "other.safetensors",
    (PICKLED,): PICKLED,
    (f"{PICKLED}.index.json", "part.bin"): "part.bin",
    (PICKLED, f"{PICKLED}.index.json", "part.bin"): PICKLED,
}


@pytest.mark.needs("torch")
@pytest.mark.parametrize("files", ORDER, ids=" ".join)
def test_the_file_of_a_directory_that_counts(tmp_path, files):
    import torch

    for number, name in enumerate(files):
        value = {"a": np.full(2, number, "float32")}
        if name.endswith(".index.json"):
            part = "part.bin" if PICKLED in name else LISTED
            (tmp_path / name).write_text(json.dumps({"weight_map": {"a": part}}))
        elif name.endswith(".bin"):
            torch.save({"a": torch.from_numpy(value["a"])}, tmp_path / name)
        else:
            save_file(value, tmp_path / name)
    assert read_safetensors(tmp_path)["a"].read().tolist() == [files.index(ORDER[files])] * 2


@pytest.mark.parametrize("name", [ONE, INDEX])
def test_a_directory_without_a_tensor_is_not_a_model_of_random_weights(tmp_path, name):
    save_file({}, tmp_path / ONE)
    if name == INDEX:
        (tmp_path / ONE).rename(tmp_path / LISTED)
        (tmp_path / INDEX).write_text('{"weight_map": {}}')
    refused(f"{name} holds no tensors; copy it again", read_safetensors, tmp_path)


@pytest.mark.needs("torch")
def test_tensors_of_a_pickled_file(tmp_path):
    import torch

    a, b = torch.arange(6.0).reshape(2, 3), torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    torch.save({"a": a, "b": b}, tmp_path / "pytorch_model.bin")
    found = read_safetensors(tmp_path)
    np.testing.assert_array_equal(found["a"].read(), a.numpy())
    assert (found["b"].shape, found["b"].dtype.name) == ((2,), "bfloat16")
    np.testing.assert_array_equal(found["b"].read().astype("float32"), [1.5, -2.0])
    for wrong, said in (([a], "holds a list"), ({"a": "b"}, "'a' is not a tensor")):
        torch.save(wrong, tmp_path / "pytorch_model.bin")
        refused(said, read_safetensors, tmp_path)


def test_npz_arrays_are_lazy_and_checked_first(tmp_path):
    file = tmp_path / "x.npz"
    half = np.arange(6).astype(ml_dtypes.bfloat16)
    np.savez(file, **{"a/b": np.ones((2, 3), "float32"), "h": half.view("V2")})
    found = read_npz(file)
    assert (found["a/b"].shape, found["a/b"].dtype) == ((2, 3), np.dtype("float32"))
    assert found["h"].read().tolist() == [0, 1, 2, 3, 4, 5]
    content = bytearray(file.read_bytes())
    content[content.index(np.ones(3, "float32").tobytes())] ^= 1
    file.write_bytes(content)
    refused(r"x\.npz is damaged at a/b\.npy; copy it again", read_npz, file)
    file.write_bytes(b"PK nothing")
    refused(r"x\.npz is not a whole \.npz file", read_npz, file)
    np.savez(file, a=np.array([{}], dtype=object))
    refused(r"a\.npy holds Python objects; only arrays are read", read_npz, file)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("weights.h5", b"x", r"but weights\.h5; write it again as safetensors"),
        ("pytorch_model.bin", b"x", "(needs torch|is damaged or holds more than).*; write it"),
        ("x.json", b"[1]", r"x\.json is \[1\]; give an object"),
        ("x.json", b"{\xff", r"x\.json is not readable JSON"),
    ],
)
def test_other_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    if name == "x.json":
        refused(message, read_json, tmp_path / name)
    else:
        refused(message, read_safetensors, tmp_path)


def test_a_part_without_rows_is_empty(tmp_path):
    """As of a variable with fewer rows than there are processes, in the last of them."""
    save_file({"x": np.ones((1, 3), "float32")}, tmp_path / "model.safetensors")
    tensor = read_safetensors(tmp_path)["x"]
    assert tensor.part((slice(1, 1), slice(0, 3))).shape == (0, 3)
    assert tensor.part((slice(0, 1), slice(1, 3))).tolist() == [[1.0, 1.0]]
