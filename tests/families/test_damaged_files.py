"""Files that announce more layers than they can have are refused before a model is built."""

import json

import numpy as np
import pytest

from kmodels.core.schema import CONFIG, check_shape
from kmodels.models.gemma import GemmaBackbone
from kmodels.models.vit.model import ViTBackbone
from kmodels.models.vit.weights import dinov3, eomt, huggingface
from refusals import refused


@pytest.mark.once
@pytest.mark.parametrize("count", [2**20, -1, 1.5, True, "many", [2], {}, float("nan")])
@pytest.mark.parametrize(
    ("backbone", "part", "description"),
    [
        (ViTBackbone, "", {"model_type": "vit"}),
        (GemmaBackbone, "", {"model_type": "gemma3_text"}),
        (GemmaBackbone, "text_config", {"model_type": "gemma3"}),
        (GemmaBackbone, "vision_config", {"model_type": "gemma3"}),
    ],
)
def test_a_config_with_an_impossible_number_of_layers(tmp_path, backbone, part, description, count):
    layers = {"num_hidden_layers": count}
    content = {**description, **({part: layers} if part else layers)}
    (tmp_path / "config.json").write_text(json.dumps(content))
    message = (
        rf"config\.json: {f'{part}: ' if part else ''}num_hidden_layers is .*; give a whole number"
    )
    for weights in (True, False):
        refused(message, backbone.from_preset, tmp_path, load_weights=weights)


@pytest.mark.once
def test_the_numbers_of_encoders_are_checked():
    names = {*eomt.SETTINGS, *huggingface.DECODER_SETTINGS, *dinov3.MOVES}
    assert names <= CONFIG.keys()
    for name in names:
        refused(name, check_shape, {name: {"x": 1}}, CONFIG, "config.json")


@pytest.mark.needs("gguf")
@pytest.mark.parametrize(
    ("count", "message"),
    [
        (2**20, r"gemma3\.block_count in a GGUF file is 1048576; give a whole number"),
        (900, r"gemma3\.block_count is 900 and has 1 tensors"),
    ],
)
def test_a_gguf_file_with_more_layers_than_tensors(tmp_path, count, message):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "it.gguf", "gemma3")
    writer.add_block_count(count)
    writer.add_embedding_length(4)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", np.zeros((2, 4), "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(message, GemmaBackbone.from_preset, tmp_path / "it.gguf")
