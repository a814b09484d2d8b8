"""Files by the names that transformers 5 has inside, and that published MAEs have."""

import json
import shutil
from importlib import import_module

import numpy as np
import pytest

from kmodels.models import DINOV2Backbone, ViTBackbone, ViTImageClassifier, ViTMAEForPreTraining
from kmodels.weights import read_safetensors, write_safetensors

CASES = {
    "vit/hf_token": ViTImageClassifier,
    "vit_kinds/deit": ViTImageClassifier,
    "vit_kinds/dinov2": ViTImageClassifier,
    "vit_kinds/dinov2_giant": DINOV2Backbone,
    "vit_recent/ijepa": ViTBackbone,
    "vit_recent/mae_pretraining": ViTMAEForPreTraining,
}


def same(one, other):
    assert [w.path for w in one.weights] == [w.path for w in other.weights]
    for ours, theirs in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("case", CASES)
def test_newer_names_are_read_as_the_older_ones(references, tmp_path, case):
    transformers, source = import_module("transformers"), references / case / "model"
    (kind,) = json.loads((source / "config.json").read_text())["architectures"]
    model = getattr(transformers, kind).from_pretrained(source)
    model.save_pretrained(tmp_path / "newer", save_original_format=False)
    shutil.copy(source / "preprocessor_config.json", tmp_path / "newer")
    newer, older = (set(read_safetensors(path)) for path in (tmp_path / "newer", source))
    assert any(".q_proj." in name for name in newer - older)
    assert not any(".q_proj." in name for name in older)
    if "giant" in case:
        assert any(".mlp.gate_proj." in name for name in newer)
    same(CASES[case].from_preset(tmp_path / "newer"), CASES[case].from_preset(source))


def test_the_decoder_of_published_maes(references, tmp_path):
    source = references / "vit_recent" / "mae_pretraining" / "model"
    shutil.copytree(source, tmp_path / "model")
    tensors = {
        name.replace("decoder_encoder.layer.", "decoder_layers."): x
        for name, x in read_safetensors(source).items()
    }
    assert "decoder.decoder_layers.0.attention.attention.query.weight" in tensors
    write_safetensors(tmp_path / "model" / "model.safetensors", tensors, {"format": "pt"})
    found = ViTMAEForPreTraining.from_preset(tmp_path / "model")
    same(found, ViTMAEForPreTraining.from_preset(source))
