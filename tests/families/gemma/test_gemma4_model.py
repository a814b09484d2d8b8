"""A Gemma 4 in use: training, adapters, packing, beams, files, and what its config refuses."""

import json

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels import transforms
from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.generation.protocol import call_with_cache, empty_cache
from kmodels.layers import remat
from kmodels.models import GemmaBackbone, GemmaCausalLM, GemmaConfig
from kmodels.models.common.per_layer import PerLayerEmbedding
from kmodels.models.gemma.presets import PRESETS
from tolerances import tolerance

LOCAL, GLOBAL = "sliding_attention", "full_attention"
IDS = np.random.default_rng(0).integers(3, 320, (2, 19)).astype("int32")
LIMIT = tolerance("logits")


def fresh(**settings):
    """The debug model, with norms and scalars at which every part counts."""
    keras.utils.set_random_seed(3)
    model = GemmaCausalLM(GemmaBackbone(**{**PRESETS["gemma4_debug"], **settings}))
    draw = np.random.default_rng(4)
    for weight in model.weights:
        if "norm" in weight.path or "scalar" in weight.path:
            weight.assign(draw.normal(1.0, 0.4, weight.shape))
    return model


def predicted(model, *inputs, **named):
    """Logits in one compiled call: as it is, a call is on JAX a program for each op."""
    return model.predict(*inputs, verbose=0, **named)


@pytest.fixture(scope="module")
def model():
    return fresh()


@pytest.fixture(scope="module")
def logits(model):
    return predicted(model, IDS)


def test_blocks_that_share_have_no_keys_values_or_cache(model):
    backbone = model.backbone
    assert backbone.count_params() < 100_000 and backbone.config.generation == 4
    for index, block in enumerate(backbone.blocks):
        held = {path.split("/")[2] for path in (w.path for w in block.attention.weights)}
        own = {"key", "key_norm"} | ({"value"} if index == 0 else set())
        assert held == {"query", "output", "query_norm"} | (own if index < 2 else set())
    assert backbone.cache_shapes == [(2, 8), (1, 16)] and backbone.cache_windows == [8, None]
    assert backbone.cache_numbers == [0, 1, 0, 1]


def test_packed_texts_are_as_if_alone(model, logits):
    cut = 10
    packed = {
        "token_ids": np.concatenate([IDS[:1, :cut], IDS[1:, cut:]], 1),
        "segment_ids": np.array([[0] * cut + [1] * 9], "int32"),
        "positions": np.array([[*range(cut), *range(9)]], "int32"),
    }
    found = predicted(model, packed)
    limit = LIMIT * max(1, np.abs(logits).max())
    np.testing.assert_allclose(found[0, :cut], logits[0, :cut], rtol=0, atol=limit)
    alone = predicted(model, IDS[1:, cut:])
    np.testing.assert_allclose(found[0, cut:], alone[0], rtol=0, atol=limit)


def test_beams_are_those_of_the_whole_model(model):
    model.use_sampler("beam")
    found = model.generate(IDS[:, :11], max_length=24, stop_token_ids=None)["token_ids"]
    model.use_sampler("greedy")
    greedy = model.generate(IDS[:, :11], max_length=24, stop_token_ids=None)["token_ids"]

    def likely(ids):
        values = predicted(model, ids)[:, 10:-1].astype("float64")
        values -= np.log(np.exp(values).sum(-1, keepdims=True))
        return np.take_along_axis(values, ids[:, 11:, None], -1).sum((1, 2))

    assert (found != greedy).any()
    assert (likely(found) >= likely(greedy) - LIMIT).all()


def test_one_array_holds_the_caches_that_are_there(model, logits):
    backbone = model.backbone
    cache = empty_cache(backbone, 2, 20)
    assert tuple(cache.shape) == (2, 2, 2, 20, 2, 16)

    def extend(*args):
        return call_with_cache(backbone, *args)

    extend = transforms.jit(extend) if keras.backend.backend() == "jax" else extend
    parts = []
    for start, end in ((0, 12), (12, 13), (13, 19)):
        new, index = map(keras.ops.convert_to_tensor, (IDS[:, start:end], np.int32(start)))
        found, _, cache = extend(new, cache, index)
        parts.append(to_numpy(found))
    np.testing.assert_allclose(np.concatenate(parts, 1), logits, rtol=0, atol=LIMIT)


def test_intermediates_and_what_is_put_between_blocks(model, logits):
    found = model.backbone.intermediates(IDS)
    assert list(found) == ["token_embedding", *(f"block_{i}" for i in range(4)), "final_norm"]
    seen = {}
    score = model.score(IDS, layer_intercept_fn=lambda x, i: seen.setdefault(i, x))
    np.testing.assert_allclose(to_numpy(score), logits, rtol=0, atol=LIMIT)
    for number, name in enumerate(found, -1):
        if number in seen:
            np.testing.assert_allclose(
                to_numpy(seen[number]), to_numpy(found[name]), rtol=0, atol=LIMIT
            )
    moved = model.score(IDS, layer_intercept_fn=lambda x, i: x * (2.0 if i == 0 else 1.0))
    assert np.abs(to_numpy(moved) - logits).max() > 100 * LIMIT


def losses(model, **compiled):
    model.compile(keras.optimizers.SGD(0.1), **compiled)
    steps = [model.train_on_batch(IDS[:, :-1], IDS[:, 1:], return_dict=True) for _ in range(2)]
    return [float(step["loss"]) for step in steps]


def test_the_loss_is_that_of_logits_and_remat_changes_nothing():
    model = fresh()
    before = {v.path: to_numpy(v).copy() for v in model.variables}
    wanted = losses(model, metrics=["sparse_categorical_accuracy"])
    assert wanted[1] < wanted[0]
    still = {v.path for v in model.variables if np.array_equal(before[v.path], to_numpy(v))}
    assert still == {f"block_{i}/layer_scalar" for i in range(4)}
    for mode in ("block", "attention"):
        model = fresh()
        remat.rematerialize(model, mode)
        assert losses(model) == pytest.approx(wanted, abs=tolerance("losses"))


def test_adapters_train_merge_and_come_back(logits, tmp_path):
    model = fresh()
    model.enable_lora(2, targets="all-linear", trainable_token_indices=[5])
    trained = {v.path.rsplit("/", 1)[-1] for v in model.trainable_variables}
    assert trained == {"lora_a", "lora_b", "lora_rows"}
    losses(model)
    learned = predicted(model, IDS)
    limit = LIMIT * max(1, np.abs(logits).max())
    assert np.abs(learned - logits).max() > 100 * limit
    model.save_adapter(tmp_path / "adapter")
    model.merge_lora()
    np.testing.assert_allclose(predicted(model, IDS), learned, rtol=0, atol=limit)
    again = fresh()
    again.load_adapter(tmp_path / "adapter")
    again.merge_lora()
    for left, right in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(to_numpy(left), to_numpy(right), err_msg=left.path)


def test_a_quantized_base_trains_its_adapters():
    model = fresh()
    model.quantize("int8")
    kernels = [v.path for v in model.variables if v.path.endswith("kernel_int8")]
    assert len(kernels) == 4 * 7 - 5 + 4 * 2 + 1  # five keys and values are not there
    model.enable_lora(2)
    first, second = losses(model)
    assert second < first


def test_files_and_clones_give_the_same_bits(model, logits, tmp_path):
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.backbone.config == model.backbone.config
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    given = {"token_ids": IDS, "padding_mask": np.ones_like(IDS)}
    for again in (loaded, clone):
        np.testing.assert_array_equal(predicted(again, given), logits)
    part = keras.Model(model.backbone.input, model.backbone.get_layer("block_2").output)
    part.save(tmp_path / "part.keras")
    read = keras.models.load_model(tmp_path / "part.keras")
    np.testing.assert_array_equal(predicted(read, given), predicted(part, given))


def test_the_config_of_the_layer_of_per_layer_embeddings():
    layer = PerLayerEmbedding(11, 3, 4, epsilon=1e-5, offset=1.0, name="mine")
    config = json.loads(json.dumps(layer.get_config()))
    assert PerLayerEmbedding.from_config(config).get_config() == layer.get_config() == config
    found = layer(keras.Input((None,), dtype="int32"), keras.Input((None, 8)))
    assert [part.shape for part in found] == [(None, None, 4)] * 3


def test_both_tables_are_resized():
    model = fresh(vocab_size_per_layer_input=340)
    before = predicted(model, IDS)
    model.resize_token_embeddings(331)
    config = model.backbone.config
    assert (config.vocabulary_size, config.per_layer_vocabulary) == (331, 331)
    assert model.backbone.per_layer_embedding.table.embeddings.shape == (331, 32)
    after = predicted(model, IDS)
    np.testing.assert_allclose(after[..., :320], before, rtol=0, atol=LIMIT)
    again = GemmaCausalLM.from_config(model.get_config())
    assert [w.shape for w in again.weights] == [w.shape for w in model.weights]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["global"] * 4}, "layer_types has 'global'; give 'sliding_attention'"),
        ({"layer_types": [LOCAL, GLOBAL]}, "layer_types names 2 layers of 4; give one for each"),
        ({"global_head_dim": 7}, "global_head_dim is 7; rotary"),
        ({"num_global_key_value_heads": 3}, "3 global key/value heads do not divide 4 query heads"),
        ({"num_kv_shared_layers": 3}, "no layer before them has full_attention to share"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4, and no layer before them"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1; give at least 0"),
        ({"vocab_size_per_layer_input": 0}, "vocab_size_per_layer_input is 0; give at least 320"),
        (
            {"vocab_size_per_layer_input": 319},
            "vocab_size_per_layer_input is 319; give at least 320",
        ),
        ({"global_rope_partial_rotary_factor": 1.5}, "is 1.5; give a share in"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    with pytest.raises(InputError, match=message):
        GemmaConfig(**{**PRESETS["gemma4_debug"], **change})


def test_formats_without_a_place_for_it_say_so(model, tmp_path):
    assert model.get_quantization_layer_structure("gptq") is None  # blocks take more than x
    for change, message in (
        ({"use_value_norm": False}, "has no counterpart for use_value_norm=False"),
        ({"layer_types": [GLOBAL, LOCAL] * 2}, "for a last layer with sliding_attention"),
        ({"norm_offset": 1.0}, "for global_head_dim, num_global_key_value_heads, attention_k"),
    ):
        other = GemmaBackbone(**{**PRESETS["gemma4_debug"], **change})
        with pytest.raises(InputError, match=message):
            other.export_to_transformers(tmp_path / "out")


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # As transformers counts them, its numbers of layers included, which are buffers there.
        ("gemma4_e2b", 4_628_569_344 + 35),
        ("gemma4_e4b", 7_463_013_376 + 42),
        ("gemma4_12b", 11_907_350_272 + 48),
        ("gemma4_31b", 30_697_345_280 + 60),
    ],
)
def test_presets_have_the_number_of_parameters_of_transformers(name, parameters):
    with keras_internals.without_values():
        assert GemmaBackbone.from_preset(name).count_params() == parameters
