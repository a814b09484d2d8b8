"""Gemma 3 with its vision encoder: what the checks of tests/families/test_families.py leave."""

import keras
import numpy as np

from arrays import to_numpy
from family_table import row_of, run
from kmodels.models.blocks import decoder
from kmodels.weights import read_safetensors
from tolerances import tolerance


def test_each_rule_of_who_sees_whom_counts(references, monkeypatch):
    row = row_of("gemma3_vision", references)
    inputs = row.inputs("two")
    right = run(row.model, inputs)
    there = inputs["padding_mask"][0].astype(bool)

    def far(other):
        return np.abs(to_numpy(other) - right)[0, there].max() > 100 * tolerance("logits")

    assert far(run(row.model, {**inputs, "images": inputs["images"][:, ::-1].copy()}))
    assert far(run(row.model, {**inputs, "images": 0 * inputs["images"]}))
    with monkeypatch.context() as patched:  # both images are one block
        patched.setattr(decoder, "block_ids", lambda mask: keras.ops.cast(mask, "int32") - 1)
        assert far(row.model(inputs))
    with monkeypatch.context() as patched:  # no image sees ahead
        patched.setattr(decoder, "block_ids", lambda mask: 0 * mask - 1)
        assert far(row.model(inputs))


def test_the_adapter_of_the_reference_adapts_the_tower(references):
    adapter = references / "gemma3_vision" / "adapter" / "adapter_model.safetensors"
    assert any("vision_tower" in name for name in read_safetensors(adapter))
