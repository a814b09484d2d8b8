"""Each family beside the package that it comes from: FAMILIES x CHECKS, see tests/family_table.py.

What every backend computes itself, its results, tokens and roundings, runs on each; files are the
same on all.
"""

import json

import keras
import numpy as np
import pytest

from arrays import assert_equal, read_npz, to_numpy
from family_table import FAMILIES, FORWARD_PASSES, rows, run
from kmodels.layers import remat
from kmodels.weights import read_safetensors
from tolerances import tolerance

# Folders that no row is about: files that other tests read.
OTHERS = {"clip/both", "vit/hf_model", "gemma4/flat", "gemma4/multimodal", "gemma4/unified"}

# What a row runs on each backend for beside its forward pass: one row of each mechanism.
RESIZED = ("vit/hf_token", "vit_recent/dinov3_gated")
GENERATED = ("gemma4/all", "gemma4_vision/unified", "qwen3/bias")
ROUNDED = ("gemma3_vision", "gemma4/all")
ADAPTED = ("gemma4/all", "qwen3/untied")
# One row of each family, for checks that make several models; the others wait for the night.
CHANGED = (
    *("embedding_gemma/gemma", "gemma/gemma3", "gemma3_vision", "gemma4/all_experts"),
    *("gemma4_vision/tower_small", "llama3/tied", "qwen3/untied"),
)


@pytest.fixture
def row(request, references):
    request.param.root = references
    return request.param


def compare(results):
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
    on_each = {*FORWARD_PASSES, *RESIZED, *GENERATED, *ROUNDED, *ADAPTED, *CHANGED}
    assert on_each <= {row.name for row in FAMILIES}


@pytest.mark.parametrize("row", rows("results", each_backend=FORWARD_PASSES), indirect=True)
def test_hidden_states_and_logits_are_those_of_the_original(row):
    compare(row.results())


@pytest.mark.parametrize("row", rows("another_size", each_backend=RESIZED), indirect=True)
def test_another_image_size_gives_what_the_original_gives(row):
    compare(row.results("resized_"))


@pytest.mark.parametrize("row", rows("bfloat16", each_backend=ROUNDED), indirect=True)
def test_bfloat16_is_as_close_to_float64_as_the_original(row):
    ours, theirs = row.errors_of_bfloat16()
    assert np.all(ours < 1.1 * theirs)


@pytest.mark.parametrize("row", rows("greedy_tokens", each_backend=GENERATED), indirect=True)
def test_greedy_tokens_are_those_of_the_original(row):
    row.check_greedy_tokens()


@pytest.mark.parametrize("row", rows("packed", each_backend=GENERATED), indirect=True)
def test_a_packed_row_gives_what_its_texts_give_alone(row):
    compare(row.packed())


@pytest.mark.parametrize("row", rows("places"), indirect=True)
def test_places_of_tokens_may_come_as_keras_hub_gives_them_or_not_at_all(row):
    compare(row.places())


@pytest.mark.each_time(*FORWARD_PASSES)
@pytest.mark.parametrize("row", rows("export"), indirect=True)
def test_export_is_what_was_read(row, tmp_path):
    row.export(row.model, tmp_path)
    read = {
        name.removeprefix(row.prefix): tensor
        for name, tensor in row.tensors(row.path).items()
        if not name.startswith(row.left)
    }
    written = row.tensors(tmp_path)
    zeros = set(written) - set(read)
    assert len(zeros) == row.zeros and set(read) <= set(written)
    assert all(name.endswith(".bias") and not written[name].read().any() for name in zeros)
    for name, tensor in read.items():
        np.testing.assert_array_equal(written[name].read(), tensor.read())
    again = row.task.from_preset(tmp_path, load_weights=False, **row.settings)
    assert again.backbone.config == row.model.backbone.config


@pytest.mark.each_time(*FORWARD_PASSES)
@pytest.mark.parametrize("row", rows("results"), indirect=True)
def test_random_weights_have_the_variables_of_the_file(row):
    random = row.read(load_weights=False)
    assert [(x.path, x.shape) for x in random.weights] == [
        (x.path, x.shape) for x in row.model.weights
    ]
    assert random.backbone.config == row.model.backbone.config


@pytest.mark.across
@pytest.mark.filterwarnings("default")  # of the other packages
@pytest.mark.parametrize("row", rows("peer_loads"), indirect=True)
def test_the_original_loads_the_export(row, tmp_path):
    row.export(row.model, tmp_path)
    compare(row.result_of_peer(tmp_path))


@pytest.mark.each_time(*FORWARD_PASSES)
@pytest.mark.parametrize("row", rows("presets"), indirect=True)
def test_own_directory_and_bare_backbone(row, tmp_path):
    row.model.save_to_preset(tmp_path / "own")
    row.model.backbone.export_to_transformers(tmp_path / "bare")
    for folder in ("own", "bare"):
        again = type(row.model.backbone).from_preset(tmp_path / folder)
        assert again.config == row.model.backbone.config
        weights = row.model.backbone.weights
        assert [v.path for v in again.weights] == [v.path for v in weights]
        assert_equal(again.weights, weights)


@pytest.mark.parametrize("row", rows("adapter", each_backend=ADAPTED), indirect=True)
def test_adapters_of_peft_both_ways(row, references, tmp_path):
    for number, folder in enumerate(references / name for name in row.adapter.split()):
        expected = read_npz(folder.with_suffix(".npz"))
        inputs, plain, adapted = row.case_of_adapter(expected)
        limit = tolerance("logits")
        assert np.abs(plain - adapted).max() > 100 * limit
        model = row.read()
        model.load_adapter(folder)
        outputs = run(model, inputs)
        found = outputs[:, -plain.shape[1] :]
        np.testing.assert_allclose(found, adapted, rtol=0, atol=limit)
        out = tmp_path / str(number)
        # PEFT writes the tables that have matrices too.
        read = read_safetensors(folder / "adapter_model.safetensors")
        model.save_adapter(out, any(x.endswith("base_layer.weight") for x in read) or "auto")
        written = read_safetensors(out / "adapter_model.safetensors")
        assert set(written) == {*read, *filter(None, [row.head])}
        for name, tensor in read.items():
            np.testing.assert_array_equal(written[name].read(), tensor.read())
        ours, theirs = (json.loads((x / "adapter_config.json").read_text()) for x in (out, folder))
        targets = [sorted(x.get("target_parameters") or ()) for x in (ours, theirs)]
        assert targets[0] == targets[1]
        again = row.read()
        again.load_adapter(out)
        np.testing.assert_array_equal(run(again, inputs), outputs)


def losses(model, row, optimizer=None, **settings):
    model.compile(optimizer or keras.optimizers.SGD(0.1), **settings)
    return [float(model.train_on_batch(**row.batch(), return_dict=True)["loss"]) for _ in range(2)]


@pytest.mark.each_time(*CHANGED)
@pytest.mark.parametrize("row", rows("training", each_backend=()), indirect=True)
def test_a_step_moves_every_part_and_remat_changes_nothing(row):
    model = row.read()
    before = {v.path: to_numpy(v).copy() for v in model.variables}
    first = model.get_weights()
    # With metrics the loss is that of logits, which the others do not compute.
    wanted = losses(model, row, metrics=["sparse_categorical_accuracy"])
    assert wanted[1] < wanted[0]
    moved = {v.path for v in model.variables if not np.array_equal(before[v.path], to_numpy(v))}
    trained = {v.path for v in model.trainable_variables}
    assert moved <= trained
    # Softmax does not see the bias of the keys.
    assert all(path.endswith("key/bias") for path in trained - moved)
    for mode in ("block", "attention", "mlp"):
        model.set_weights(first)
        remat.rematerialize(model, mode)
        assert losses(model, row) == pytest.approx(wanted, abs=tolerance("losses"))


@pytest.mark.each_time(*CHANGED)
@pytest.mark.parametrize("row", rows("files"), indirect=True)
def test_files_and_clones_give_the_same_bits(row, tmp_path):
    model, inputs = row.model, row.batch()["x"]
    wanted = run(model, inputs)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert loaded.backbone.config == model.backbone.config
    for again in (loaded, clone):
        np.testing.assert_array_equal(run(again, inputs), wanted)
    part = keras.Model(model.backbone.input, model.backbone.blocks[-2].output)
    part.save(tmp_path / "part.keras")
    read = keras.models.load_model(tmp_path / "part.keras")
    np.testing.assert_array_equal(run(read, inputs), run(part, inputs))


@pytest.mark.each_time(*CHANGED)
@pytest.mark.parametrize("row", rows("lora"), indirect=True)
def test_adapters_train_merge_and_come_back(row, tmp_path):
    model, inputs = row.read(), row.batch()["x"]
    logits = run(model, inputs)
    model.enable_lora(2, **row.lora)
    of_tokens = "trainable_token_indices" in row.lora
    if not of_tokens:
        np.testing.assert_array_equal(run(model, inputs), logits)
    names = [v.path.rsplit("/", 1)[-1] for v in model.trainable_variables]
    kinds = {name.removeprefix("reverse_") for name in names}
    assert kinds == {"lora_a", "lora_b", *(["lora_rows"] if of_tokens else [])}
    first, second = losses(model, row, keras.optimizers.Adam(0.03))
    assert second < first
    learned = run(model, inputs)
    limit = tolerance("logits") * max(1, np.abs(logits).max())
    assert np.abs(learned - logits).max() > 100 * limit
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(run(loaded, inputs), learned)
    model.save_lora_weights(tmp_path / "all.lora.h5")
    model.save_adapter(tmp_path / "adapter")
    before = model.get_weights()
    model.merge_lora()
    np.testing.assert_allclose(run(model, inputs), learned, rtol=0, atol=limit)
    for load, name in (("load_adapter", "adapter"), ("load_lora_weights", "all.lora.h5")):
        again = row.read()
        getattr(again, load)(tmp_path / name)
        again.merge_lora()
        assert_equal(again.weights, model.weights)
    model.unmerge_lora()
    assert_equal(model.weights, before)
    np.testing.assert_array_equal(run(model, inputs), learned)
