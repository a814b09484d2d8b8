"""Each family beside the package that it comes from: FAMILIES x CHECKS, see tests/family_table.py.

What every backend computes itself, its results, tokens and roundings, runs on each; files are the
same on all.
"""

import numpy as np
import pytest

from arrays import assert_same_tensors, read_npz, to_numpy
from family_table import FAMILIES, rows
from kmodels.weights import read_safetensors
from tolerances import tolerance

# Folders that no row is about: files that other tests read.
OTHERS = {"vit/hf_model", "gemma4/flat", "gemma4/multimodal", "gemma4/unified"}


@pytest.fixture
def row(request, references):
    request.param.root = references
    return request.param


def assert_equal(results):
    for name, found, expected, what in results:
        if what == "bits":
            np.testing.assert_array_equal(found, expected, err_msg=name)
        else:
            np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance(what), err_msg=name)


def test_every_reference_has_a_row(references):
    named = {row.name for row in FAMILIES} | OTHERS
    folders = {name.partition("/")[0] for name in named}
    there = {
        f"{path.parent.parent.name}/{path.parent.name}"
        for folder in folders
        for path in (references / folder).glob("*/expected.npz")
    }
    assert there <= named


@pytest.mark.each_backend
@pytest.mark.parametrize("row", rows("results"), indirect=True)
def test_hidden_states_and_logits_are_those_of_the_original(row):
    assert_equal(row.results())


@pytest.mark.each_backend
@pytest.mark.parametrize("row", rows("another_size"), indirect=True)
def test_another_image_size_gives_what_the_original_gives(row):
    assert_equal(row.results("resized_"))


@pytest.mark.each_backend
@pytest.mark.parametrize("row", rows("bfloat16"), indirect=True)
def test_bfloat16_is_as_close_to_float64_as_the_original(row):
    ours, theirs = row.errors_of_bfloat16()
    assert ours < 1.1 * theirs


@pytest.mark.each_backend
@pytest.mark.parametrize("row", rows("greedy_tokens"), indirect=True)
def test_greedy_tokens_are_those_of_the_original(row):
    row.check_greedy_tokens()


@pytest.mark.parametrize("row", rows("export"), indirect=True)
def test_export_is_what_was_read(row, tmp_path):
    row.export(row.model, tmp_path)
    left, prefix = getattr(row, "left", ()), getattr(row, "prefix", "")
    if left:
        read = {n: t for n, t in read_safetensors(row.path).items() if not n.startswith(left)}
        read = {name.removeprefix(prefix): tensor for name, tensor in read.items()}
        written = read_safetensors(tmp_path)
        assert set(written) == set(read)
        for name, tensor in read.items():
            np.testing.assert_array_equal(written[name].read(), tensor.read())
    else:
        assert_same_tensors(tmp_path, row.path)
    again = row.task.from_preset(tmp_path, load_weights=False, **row.settings)
    # A width of layer scale says where its first values are; files hold the values.
    config, expected = (x.backbone.config.to_dict() for x in (again, row.model))
    assert config | {"layer_scale": None} == expected | {"layer_scale": None}


@pytest.mark.across
@pytest.mark.filterwarnings("default")  # of the other packages
@pytest.mark.parametrize("row", rows("peer_loads"), indirect=True)
def test_the_original_loads_the_export(row, tmp_path):
    row.export(row.model, tmp_path)
    assert_equal(row.result_of_peer(tmp_path))


@pytest.mark.parametrize("row", rows("presets"), indirect=True)
def test_own_directory_and_bare_backbone(row, tmp_path):
    row.model.save_to_preset(tmp_path / "own")
    row.model.backbone.export_to_transformers(tmp_path / "bare")
    for folder in ("own", "bare"):
        again = type(row.model.backbone).from_preset(tmp_path / folder)
        assert again.config == row.model.backbone.config
        for left, right in zip(row.model.backbone.weights, again.weights, strict=True):
            assert left.path == right.path
            np.testing.assert_array_equal(to_numpy(left), to_numpy(right))


@pytest.mark.each_backend
@pytest.mark.parametrize("row", rows("adapter"), indirect=True)
def test_adapters_of_peft_both_ways(row, references, tmp_path):
    expected = read_npz(references / f"{row.adapter}.npz")
    model, inputs = row.read(), expected["inputs"].astype("int32")
    limit = tolerance("logits") * max(1, np.abs(expected["logits"]).max())
    np.testing.assert_allclose(to_numpy(model(inputs)), expected["plain"], rtol=0, atol=limit)
    model.load_adapter(references / row.adapter)
    assert np.abs(expected["plain"] - expected["logits"]).max() > 100 * limit
    np.testing.assert_allclose(to_numpy(model(inputs)), expected["logits"], rtol=0, atol=limit)
    model.save_adapter(tmp_path)
    written, read = (
        read_safetensors(folder / "adapter_model.safetensors")
        for folder in (tmp_path, references / row.adapter)
    )
    assert set(written) == set(read)
    for name, tensor in read.items():
        np.testing.assert_array_equal(written[name].read(), tensor.read())
