"""GGUF and `.npz` files that kmodels writes: read again, and what they have no place for."""

import numpy as np
import pytest

from arrays import to_numpy
from kmodels.core.errors import InputError
from kmodels.models import GemmaCausalLM, GemmaCausalLMPreprocessor, ViTBackbone, ViTImageClassifier
from kmodels.text import Tokenizer
from kmodels.text.training import train_tokenizer
from kmodels.weights.engine import variables
from tolerances import tolerance

# As llama.cpp takes them for granted.
SIZES = {
    "gemma_debug": {"global_rope_wavelength": 500.0, "local_rope_wavelength": 500.0},
    "gemma2_debug": {"query_head_dim_normalize": True, "attention_logit_soft_cap": 3.0},
    "gemma3_debug": {"global_rope_scaling_factor": 8.0},
}


def gemma(preset: str, **changes) -> GemmaCausalLM:
    """One with norms that are not trivial."""
    model = GemmaCausalLM.from_preset(preset, **{**SIZES[preset], **changes})
    for i, weight in enumerate(model.weights):
        if weight.path.endswith("scale"):
            weight.assign(np.random.default_rng(i).normal(size=weight.shape) / 4)
    return model


def logits(model):
    ids = np.random.default_rng(0).integers(0, 320, (2, 12)).astype("int32")
    return to_numpy(model({"token_ids": ids, "padding_mask": np.ones_like(ids)}))


@pytest.mark.needs("gguf")
@pytest.mark.parametrize("preset", SIZES)
def test_a_gemma_written_as_gguf_is_the_same_gemma(preset, tmp_path):
    model = gemma(preset)
    path = model.export_to_gguf(tmp_path / "model.gguf", "float32")
    again = GemmaCausalLM.from_preset(path)
    for name, variable in variables(again).items():
        held = to_numpy(variables(model)[name])
        # Norms are stored with the 1 that llama.cpp does not add.
        np.testing.assert_allclose(to_numpy(variable), held, rtol=0, atol=2.4e-7, err_msg=name)
    np.testing.assert_allclose(logits(again), logits(model), rtol=0, atol=tolerance("logits"))


@pytest.mark.needs("gguf")
def test_half_precision_and_eight_bits_are_as_near_as_they_can_be(tmp_path):
    import gguf

    model = gemma("gemma3_debug")
    # The scales of q8_0 are in half precision.
    steps = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "q8_0": 0.5 / 127 + 2.0**-11}
    for dtype, step in steps.items():
        path = model.export_to_gguf(tmp_path / f"{dtype}.gguf", dtype)
        again = GemmaCausalLM.from_preset(path)
        for name, variable in variables(again).items():
            held = to_numpy(variables(model)[name])
            near = 1.01 * step * np.abs(held).max() + 2.4e-7
            assert np.abs(to_numpy(variable) - held).max() < near, (dtype, name)
        kinds = {x.tensor_type.name for x in gguf.GGUFReader(path).tensors}
        assert kinds == {"F32", {"float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}[dtype]}
    sizes = [(tmp_path / f"{dtype}.gguf").stat().st_size for dtype in ("float16", "q8_0")]
    assert sizes[1] < 0.6 * sizes[0]


@pytest.mark.needs("gguf")
def test_the_vocabulary_goes_along(tmp_path):
    texts = ["the cat sat on the mat", "the dog sat on the log, and the cat ate the rat"] * 4
    tokenizer = train_tokenizer(texts, 400)
    size = tokenizer.vocabulary_size()
    model = gemma("gemma_debug", vocabulary_size=size + 3)
    model.preprocessor = GemmaCausalLMPreprocessor(tokenizer)
    model.export_to_gguf(tmp_path / "model.gguf")
    again = Tokenizer.from_file(tmp_path / "model.gguf")
    for text in (*texts[:2], "  The Ca t\n\n… ratatat <start_of_turn>user\nhät 貓<eos>"):
        assert again.tokenize(text) == tokenizer.tokenize(text)
        assert again.detokenize(again.tokenize(text)) == tokenizer.detokenize(
            tokenizer.tokenize(text)
        )
    assert again.start_token_id == tokenizer.start_token_id
    assert again.stop_token_ids == tokenizer.stop_token_ids
    assert again.vocabulary_size() == size + 3


@pytest.mark.needs("gguf")
@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"query_pre_attention_scalar": 5.0}, "gemma2 has no place for query_scale="),
        ({"sliding_window_pattern": 1}, "gemma2 has no place for window of layer 0=None"),
        ({"final_logit_soft_cap": None}, "final_logit_soft_cap=None"),
    ],
)
def test_what_llama_cpp_takes_for_granted_is_not_left_out(changes, lost, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"before")
    with pytest.raises(InputError, match=lost):
        gemma("gemma2_debug", **changes).export_to_gguf(tmp_path / "model.gguf")
    model = gemma("gemma2_debug")
    with pytest.raises(InputError, match=r"ends in \.gguf"):
        model.export_to_gguf(tmp_path / "model.bin")
    with pytest.raises(InputError, match="'int3'; GGUF files are written as float32, bfloat16, fl"):
        model.export_to_gguf(tmp_path / "model.gguf", "int3")
    model.backbone.enable_lora(2)
    with pytest.raises(InputError, match="no place for LoRA adapters; call merge_lora first"):
        model.export_to_gguf(tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


# === npz ===


@pytest.mark.parametrize("pooling", ["token", "gap", "map"])
def test_a_vit_written_as_npz_is_the_same_vit(pooling, tmp_path):
    backbone = ViTBackbone.from_preset(
        "vit_debug",
        use_class_token=pooling == "token",
        position_over_prefix=True,
        mlp_dim=128,
    )
    model = ViTImageClassifier(backbone, 7, pooling=pooling)
    path = model.export_to_npz(tmp_path / "model.npz")
    again = ViTImageClassifier.from_preset(path)
    for name, variable in variables(again).items():
        np.testing.assert_array_equal(to_numpy(variable), to_numpy(variables(model)[name]), name)
    images = np.random.default_rng(0).normal(size=(2, *backbone.config.image_shape))
    images = images.astype("float32")
    np.testing.assert_allclose(
        to_numpy(again(images)), to_numpy(model(images)), rtol=0, atol=tolerance("logits")
    )


@pytest.mark.parametrize(
    ("fields", "settings", "lost"),
    [
        ({"approximate_gelu": True}, {}, "no place for approximate_gelu=True; write hf or timm"),
        ({"layer_norm_epsilon": 1e-5}, {}, "layer_norm_epsilon=1e-05"),
        ({"layer_scale": 0.1}, {}, "no place for .*attention_scale"),
        ({"use_mha_bias": False}, {}, "cannot hold linear layers without biases"),
        ({"image_shape": (16, 32, 3)}, {}, "holds only square images, not 2 x 4 patches; write hf"),
        ({}, {"pooling": "gap"}, "pooling='gap'"),
        ({}, {"activation": "softmax"}, "activation='softmax'"),
    ],
)
def test_what_an_npz_file_has_no_place_for(fields, settings, lost, tmp_path):
    model = ViTImageClassifier(ViTBackbone.from_preset("vit_debug", **fields), 3, **settings)
    with pytest.raises(InputError, match=lost):
        model.export_to_npz(tmp_path / "model.npz")
    with pytest.raises(InputError, match=r"ends in \.npz"):
        model.export_to_npz(tmp_path / "model.bin")
    assert not list(tmp_path.iterdir())
