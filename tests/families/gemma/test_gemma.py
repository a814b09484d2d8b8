"""Gemma itself: its numbers, training without logits, names of keras-hub, and its configs."""

import json
import re
import shutil

import keras
import numpy as np
import pytest

from arrays import to_numpy
from arrays_made import shapes_made, squares
from kmodels.models import Gemma3Backbone, Gemma3CausalLM, GemmaBackbone, GemmaCausalLM
from kmodels.models.blocks.sharding import DECODER
from refusals import refused
from tolerances import tolerance

# The sum of each debug model's logits of INPUTS after seed 1234, the same on each backend.
GOLDEN = {"gemma_debug": 63.98524, "gemma2_debug": -37.19574, "gemma3_debug": -38.95985}
IDS = np.random.default_rng(0).integers(3, 320, (2, 13)).astype("int32")
INPUTS = {"token_ids": IDS, "padding_mask": np.ones_like(IDS)}
LABELS = np.roll(IDS, -1, 1)
WEIGHTS = np.tile(np.arange(13) >= 3, (2, 1)).astype("float32")


@pytest.fixture(scope="module")
def models():
    made = {}
    for name in GOLDEN:
        keras.utils.set_random_seed(1234)
        made[name] = GemmaCausalLM(GemmaBackbone.from_preset(name))
    return made


# Random weights are the same on each backend, and so is what follows from them.
@pytest.mark.each_backend
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_logits(models, name):
    logits = to_numpy(models[name](INPUTS))
    assert abs(float(logits.sum()) - GOLDEN[name]) < 1e-2


def test_names_of_keras_hub():
    sizes = {"vocabulary_size": 16, "num_layers": 2, "num_query_heads": 2, "hidden_dim": 8}
    sizes |= {"num_key_value_heads": 1, "intermediate_dim": 12, "head_dim": 4}
    backbone = Gemma3Backbone(image_size=None, **sizes)
    assert backbone.config.mlp_dim == 12 and backbone.config.global_rope_wavelength == 1e6
    assert Gemma3CausalLM(backbone).backbone_class is Gemma3Backbone
    assert GemmaBackbone(**sizes).config.mlp_dim == 6
    refused("give a vision encoder", Gemma3Backbone, vision_encoder=1, **sizes)


def test_layout_cuts_every_matrix_in_two_axes(models):
    for variable in models["gemma3_debug"].backbone.variables:
        found = [axes for pattern, axes in DECODER.items() if re.fullmatch(pattern, variable.path)]
        assert len(found) == (1 if len(variable.shape) == 2 else 0), variable.path
        assert all("embed" in axes and None not in axes for axes in found)


# The loss without logits caps them on each backend by an op of its own.
@pytest.mark.each_backend
def test_training_without_logits_is_training_with_them():
    logs = []
    for fused in (True, False):
        keras.utils.set_random_seed(5)
        model = GemmaCausalLM(GemmaBackbone.from_preset("gemma2_debug", num_layers=1))
        # An unweighted metric needs the logits.
        metrics = None if fused else ["sparse_categorical_accuracy"]
        model.compile(optimizer=keras.optimizers.SGD(0.1), metrics=metrics)
        steps = [
            model.train_on_batch(INPUTS, LABELS, sample_weight=WEIGHTS, return_dict=True)
            for _ in range(2)
        ]
        logs.append([*steps, model.test_on_batch(INPUTS, LABELS, WEIGHTS, return_dict=True)])
    for one, other in zip(*logs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=tolerance("losses"))
        assert one["perplexity"] == pytest.approx(np.exp(one["loss"]), rel=1e-6)
        (name,) = other.keys() - {"loss", "perplexity", "sparse_categorical_accuracy"}
        assert one["sparse_categorical_accuracy"] == pytest.approx(other[name], abs=1e-6)


# Each backend makes arrays of its own.
@pytest.mark.each_backend
def test_packed_rows_need_no_mask_of_all_pairs():
    length = 1024
    backbone = GemmaBackbone.from_preset("gemma3_debug", sliding_window_size=200, num_layers=2)
    place = np.arange(length, dtype="int32")[None]
    rows = {"token_ids": 2 + place % 300, "segment_ids": place // 512, "positions": place % 512}

    def compute(*inputs):
        return backbone(dict(zip(rows, inputs, strict=True)))

    tensors = [keras.ops.convert_to_tensor(array) for array in rows.values()]
    assert not squares(shapes_made(compute, *tensors, gradients=False), length)


# === Directories of transformers ===


@pytest.fixture
def source(references):
    return references / "gemma" / "gemma3" / "model"


def test_layer_types_in_any_order_are_read_and_written(source, tmp_path):
    text = json.loads((source / "config.json").read_text())
    text["layer_types"] = ["full_attention"] + ["sliding_attention"] * 2
    (tmp_path / "config.json").write_text(json.dumps(text))
    backbone = GemmaBackbone.from_preset(tmp_path, load_weights=False)
    assert backbone.cache_windows == [None, 5, 5]
    folder = backbone.export_to_transformers(tmp_path / "out")
    written = json.loads((folder / "config.json").read_text())
    assert written["layer_types"] == text["layer_types"]
    again = GemmaBackbone.from_preset(folder, load_weights=False)
    assert again.config == backbone.config


def test_tensors_and_settings_that_do_not_fit_are_named(source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
    (folder / "config.json").write_text(json.dumps(config))
    message = r"13 tensors without a variable: model\.layers\.2"
    refused(message, GemmaBackbone.from_preset, folder)
    sizes = {"num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    sizes |= {"vocabulary_size": 8, "hidden_dim": 8, "intermediate_dim": 8}
    backbone = GemmaBackbone(final_logit_soft_cap=3.0, **sizes)
    refused("no counterpart for soft caps", backbone.export_to_transformers, tmp_path / "out")
