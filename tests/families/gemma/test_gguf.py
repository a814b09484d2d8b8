"""GGUF files, written by the gguf package as llama.cpp's converter writes them."""

import numpy as np
import pytest

from arrays import to_numpy
from kmodels.core.errors import InputError
from kmodels.models import GemmaBackbone
from kmodels.models.gemma.presets import PRESETS
from kmodels.models.gemma.weights import gguf as weights_gguf
from kmodels.weights import engine

pytestmark = pytest.mark.needs("gguf")

# Rows of 256, which is what K-quants take together.
WIDE = {"hidden_dim": 256, "num_layers": 1, "vocabulary_size": 24, "head_dim": 64}
RANDOM = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}


def _write(path, backbone, architecture, kinds, more=None):
    """Keys and tensors of a Gemma; `kinds`: how the kernels are stored, one after the other."""
    import gguf

    config = backbone.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_embedding_length(config.hidden_dim)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.num_query_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    if config.generation > 1:
        writer.add_sliding_window(config.sliding_window_size)
    if config.generation == 2:
        writer.add_attn_logit_softcapping(20.0)
        writer.add_final_logit_softcapping(10.0)
    if config.generation == 3:
        writer.add_rope_freq_base(config.global_rope_wavelength)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
    stored, random = {}, np.random.default_rng(0)
    for i, (name, tensor) in enumerate(engine.export(backbone, weights_gguf.rules(config)).items()):
        values = np.ascontiguousarray(tensor.read())
        kind = gguf.GGMLQuantizationType[kinds[i % len(kinds)] if values.ndim == 2 else "F32"]
        if kind.name in RANDOM:  # the package reads these kinds and does not write them
            size = RANDOM[kind.name]
            data = random.integers(0, 60, (values.shape[0], values.shape[1] // 256 * size))
            data = data.astype("uint8")
        else:
            data = gguf.quants.quantize(values, kind)
        stored[name] = gguf.quants.dequantize(data, kind).reshape(values.shape)
        writer.add_tensor(name, data, raw_dtype=kind)
    for name, array in (more or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.parametrize(
    ("architecture", "preset", "kinds"),
    [
        ("gemma", "gemma_debug", ("F32", "F16", "BF16")),
        ("gemma2", "gemma2_debug", ("Q8_0",)),
        ("gemma3", "gemma3_debug", ("Q4_K", "Q5_K", "Q6_K")),
    ],
)
def test_config_and_tensors_of_each_generation(tmp_path, architecture, preset, kinds):
    fields = {**PRESETS[preset], **WIDE, "intermediate_dim": 512}
    backbone = GemmaBackbone(**fields)
    for weight in backbone.weights:
        if weight.path.endswith("scale"):
            weight.assign(np.linspace(-0.5, 0.5, weight.shape[0]))
    stored = _write(tmp_path / "model.gguf", backbone, architecture, kinds)
    found = GemmaBackbone.from_preset(tmp_path / "model.gguf")
    expected = {**fields, "sliding_window_pattern": found.config.sliding_window_pattern}
    expected["query_head_dim_normalize"] = True
    if architecture == "gemma2":
        expected |= {"attention_logit_soft_cap": 20.0, "final_logit_soft_cap": 10.0}
    if architecture == "gemma3":
        expected["global_rope_scaling_factor"] = 8.0
    assert found.config == GemmaBackbone.make_config(**expected)
    for name, tensor in engine.export(found, weights_gguf.rules(found.config)).items():
        np.testing.assert_allclose(tensor.read(), stored[name], rtol=0, atol=1e-6, err_msg=name)
    norms = {w.path: to_numpy(w) for w in found.weights if w.path.endswith("scale")}
    np.testing.assert_allclose(norms["final_norm/scale"], np.linspace(-0.5, 0.5, 256), atol=1e-6)


def test_broken_files_are_named(tmp_path):
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(InputError, match=r"cut\.gguf is not a whole GGUF file"):
        GemmaBackbone.from_preset(tmp_path / "cut.gguf")
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "llama.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((2, 4), "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match="holds 'llama'; the model reads gemma, gemma2, gemma3"):
        GemmaBackbone.from_preset(tmp_path / "llama.gguf")


def test_biases_are_refused(tmp_path):
    biases = {"blk.0.attn_q.bias": np.zeros(8, "float32")}
    backbone = GemmaBackbone.from_preset("gemma_debug")
    _write(tmp_path / "model.gguf", backbone, "gemma", ("F32",), biases)
    message = r"has biases \(blk.0.attn_q.bias, ...\), and a GGUF file of Gemma has none; give"
    for weights in (True, False):
        with pytest.raises(InputError, match=message):
            GemmaBackbone.from_preset(tmp_path / "model.gguf", load_weights=weights)
