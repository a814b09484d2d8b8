"""What decoders have in common: sizes, settings, masks, names of inputs, tables of other sizes."""

import copy
import json
from itertools import pairwise

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels.core import keras_internals
from kmodels.models import (
    GemmaBackbone,
    GemmaCausalLM,
    GemmaCausalLMPreprocessor,
    GemmaConfig,
    Llama3Backbone,
    Llama3Config,
    Qwen3Backbone,
    Qwen3Config,
)
from kmodels.models.blocks.decoder_block import DecoderInfo
from kmodels.models.gemma import presets as gemma_presets
from kmodels.models.gemma.model import GemmaBlock
from kmodels.models.llama3 import PRESETS as LLAMA3_PRESETS
from kmodels.models.qwen3 import PRESETS as QWEN3_PRESETS
from kmodels.text import demo
from kmodels.text.training import train_tokenizer
from refusals import refused
from tolerances import tolerance

FAMILIES = {
    "gemma": (GemmaBackbone, GemmaConfig, gemma_presets.PRESETS),
    "llama3": (Llama3Backbone, Llama3Config, LLAMA3_PRESETS),
    "qwen3": (Qwen3Backbone, Qwen3Config, QWEN3_PRESETS),
}


def family(name):
    """Backbone, config and presets of a family, by the name of a preset or a reference."""
    return next((x for key, x in FAMILIES.items() if name.startswith(key)), FAMILIES["gemma"])


# === Sizes and settings ===


def parameters(c):
    """Number of parameters by the formula of the papers."""
    width, heads = c.hidden_dim, c.num_query_heads + c.num_key_value_heads
    norms = 2 + 2 * getattr(c, "use_post_ffw_norm", False)
    head_norms = 2 * c.block(0).use_query_key_norm
    block = 2 * width * c.head_dim * heads + 3 * width * c.mlp_dim
    block += norms * width + head_norms * c.head_dim
    tables = 1 + (not c.tie_word_embeddings)
    return tables * c.vocabulary_size * width + c.num_layers * block + width


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gemma_2b_en", 2_506_172_416),
        ("gemma_7b_en", 8_537_680_896),
        ("gemma2_2b_en", 2_614_341_888),
        ("gemma2_9b_en", 9_241_705_984),
        ("gemma2_27b_en", 27_227_128_320),
        ("gemma3_270m", 268_098_176),
        ("gemma3_1b", 999_885_952),
        ("embedding_gemma_300m", 307_581_696),
        ("llama3_8b_en", 8_030_261_248),
        ("llama3.1_8b", 8_030_261_248),
        ("llama3.2_1b", 1_235_814_400),
        ("llama3.2_3b", 3_212_749_824),
        ("qwen3_0.6b", 596_049_920),
        ("qwen3_1.7b", 1_720_574_976),
        ("qwen3_4b", 4_022_468_096),
        ("qwen3_8b", 8_190_735_360),
        ("qwen3_14b", 14_768_307_200),
        ("qwen3_32b", 32_762_123_264),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, published):
    backbone_class, config_class, presets = family(name)
    fields = {key: x for key, x in presets[name].items() if not key.startswith("task_")}
    config = config_class(**fields)
    # An embedder has layers behind the backbone.
    widths = [config.hidden_dim, *(layer["units"] for layer in presets[name].get("task_dense", ()))]
    assert parameters(config) + sum(a * b for a, b in pairwise(widths)) == published
    # The formula is the model's own at a size that can be built.
    sizes = {"num_layers": 1, "vocabulary_size": 8, "hidden_dim": 8, "intermediate_dim": 8}
    with keras_internals.without_values():
        small = backbone_class(**{**fields, **sizes, "head_dim": 2})
    assert small.count_params() == parameters(small.config)


def test_debug_presets_are_small_and_share_keys_among_queries():
    generations = {"gemma_debug": 1, "gemma2_debug": 2, "gemma3_debug": 3}
    generations |= {"llama3_debug": None, "qwen3_debug": None}
    for name, generation in generations.items():
        _, config_class, presets = family(name)
        config = config_class(**presets[name])
        assert parameters(config) < 100_000
        assert config.num_key_value_heads < config.num_query_heads
        assert getattr(config, "generation", None) == generation


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gemma_debug", {"num_key_value_heads": 3}, "3 key/value heads do not divide 4 query"),
        ("gemma_debug", {"head_dim": 7}, "head_dim is 7"),
        ("gemma_debug", {"intermediate_dim": 9}, "intermediate_dim is 9"),
        ("gemma_debug", {"final_logit_soft_cap": -1.0}, "final_logit_soft_cap is -1"),
        ("gemma_debug", {"dropout": 1.0}, "dropout is 1.0"),
        ("gemma_debug", {"num_layers": 0}, "num_layers is 0"),
        ("gemma_debug", {"sliding_windw_size": 3}, "takes no sliding_windw_size"),
        ("qwen3_debug", {"rope_max_wavelength": 0}, "length is 0; give a positive number"),
        ("qwen3_debug", {"sliding_window_size": 0}, "sliding_window_size is 0; give at least 1"),
        ("qwen3_debug", {"num_key_value_heads": 3}, "3 key/value heads do not divide 4 query"),
        ("qwen3_debug", {"rope_theta": 1e6}, "takes no rope_theta"),
        ("llama3_debug", {"rope_low_freq_factor": None}, "give all of rope_frequency_adjust"),
        ("llama3_debug", {"rope_low_freq_factor": 5.0}, "the second must be larger"),
        ("llama3_debug", {"rope_position_scaling_factor": 2.0}, "exclude each other; leave one"),
        ("llama3_debug", {"rope_high_freq_factor": -1.0}, "or None for no adjustment"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(name, change, message):
    backbone_class, _, presets = family(name)
    refused(message, backbone_class, **{**presets[name], **change})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gemma/gemma3", {"hidden_activation": "relu"}, "counterpart for an activation 'relu'"),
        (
            "gemma/gemma3",
            {"attention_bias": True, "hidden_activation": "relu"},
            "an activation 'relu', attention_bias",
        ),
        (
            "gemma/gemma3",
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            "rope_type is 'dynamic'",
        ),
        ("llama3/tied", {"hidden_act": "relu"}, "no counterpart for an activation 'relu'"),
        ("llama3/tied", {"mlp_bias": True}, "no counterpart for mlp_bias"),
        (
            "llama3/tied",
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope_type is 'yarn'; the model supports default, linear and llama3",
        ),
        ("llama3/tied", {"rope_parameters": {"rope_type": "llama3"}}, "without its factors"),
        (
            "llama3/tied",
            {"rope_scaling": {"rope_type": "llama3", "beta_slow": 1}},
            "beta_slow in rope_scaling",
        ),
        ("qwen3/tied", {"hidden_act": "relu"}, "no counterpart for an activation 'relu'"),
        ("qwen3/tied", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type is 'dynamic'"),
    ],
)
def test_settings_without_counterpart_are_named(references, tmp_path, name, change, message):
    text = json.loads((references / name / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**text, **change}))
    refused(message, family(name)[0].from_preset, tmp_path, load_weights=False)


# === Masks and inputs ===

DEBUG = {
    **{"gemma_debug": "float32", "gemma2_debug": "mixed_bfloat16", "gemma3_debug": "float32"},
    "gemma4_debug": "float32",
}
LENGTH = 13
TOKEN_IDS = np.random.default_rng(0).integers(3, 320, (3, LENGTH)).astype("int32")
# Padding on the left, holes, and padding on the right: 8 tokens in each row.
MASK = np.ones((3, LENGTH), "int32")
MASK[0, :5] = MASK[1, [0, 2, 7, 8, 12]] = MASK[2, 8:] = 0
MASKED = {"token_ids": TOKEN_IDS, "padding_mask": MASK}


@pytest.fixture(scope="module")
def models():
    keras.utils.set_random_seed(1234)
    made = {
        name: GemmaCausalLM.from_preset(name, preprocessor=None, dtype=dtype)
        for name, dtype in DEBUG.items()
    }
    sight = {"use_bidirectional_attention": True}
    made["both sides"] = GemmaCausalLM.from_preset("gemma3_debug", preprocessor=None, **sight)
    return made


def there(values):
    """Values of the tokens that are not masked: (3, LENGTH, ...) -> (3, 8, ...)."""
    return values[MASK == 1].reshape(3, 8, *values.shape[2:])


ALONE = there(TOKEN_IDS)


def assert_near(model, values, expected):
    limit = tolerance("logits", model.backbone.compute_dtype) * max(1, np.abs(expected).max())
    np.testing.assert_allclose(values, expected, rtol=0, atol=limit)


@pytest.mark.each_backend("nightly")
def test_masked_tokens_are_as_if_they_were_not_there(models):
    dtypes = ("bool", "int32", "float32", "bool", "int32")
    for model, dtype in zip(models.values(), dtypes, strict=True):
        inputs = {"token_ids": TOKEN_IDS, "padding_mask": MASK.astype(dtype)}
        assert_near(model, there(to_numpy(model(inputs))), to_numpy(model(ALONE)))
    # In training it counts as it does in a call.
    model = models["gemma3_debug"]
    model.compile(optimizer=keras.optimizers.SGD(0.0))
    wanted = model.test_on_batch(ALONE, np.roll(ALONE, 1, 1), return_dict=True)["loss"]
    labels = np.zeros_like(TOKEN_IDS)
    labels[MASK == 1] = np.roll(ALONE, 1, 1).reshape(-1)
    logs = model.train_on_batch(MASKED, labels, MASK.astype("float32"), return_dict=True)
    assert logs["loss"] == pytest.approx(wanted, abs=tolerance("losses"))


def test_tokens_see_neither_padding_on_the_right_nor_what_follows(models):
    mask = np.repeat(MASK[2:], 3, 0)
    changed = np.where(np.arange(LENGTH) < 11, TOKEN_IDS, 5)
    for name, model in models.items():
        logits, other = to_numpy(model(TOKEN_IDS)), to_numpy(model(changed))
        if name == "both sides":
            assert np.abs(other[:, :11] - logits[:, :11]).max() > 1e-3
            continue
        with_mask = to_numpy(model({"token_ids": TOKEN_IDS, "padding_mask": mask}))
        np.testing.assert_array_equal(with_mask, logits)
        np.testing.assert_array_equal(other[:, :11], logits[:, :11])


def test_segments_and_positions_go_with_their_tokens(models):
    # Padding has the number of a segment of tokens.
    cut, inputs = 4, dict(MASKED)
    for name, values in (
        ("segment_ids", [0] * cut + [1] * (8 - cut)),
        ("positions", [*range(cut), *range(8 - cut)]),
    ):
        inputs[name] = np.zeros_like(TOKEN_IDS)
        inputs[name][MASK == 1] = values * 3
    for model in (models["gemma2_debug"], models["both sides"]):
        found = there(to_numpy(model(inputs)))
        for part in (slice(0, cut), slice(cut, 8)):
            assert_near(model, found[:, part], to_numpy(model(ALONE[:, part])))


def test_positions_may_be_called_position_ids(models):
    model = models["gemma_debug"]
    positions = np.tile(np.array([0, 2, *range(5, 3 + LENGTH)]), (3, 1))
    wanted = to_numpy(model({"token_ids": TOKEN_IDS, "positions": positions}))
    found = to_numpy(model({"token_ids": TOKEN_IDS, "position_ids": positions}))
    np.testing.assert_array_equal(found, wanted)
    assert np.abs(wanted - to_numpy(model(TOKEN_IDS))).max() > tolerance("logits")
    both = {"token_ids": TOKEN_IDS, "positions": positions, "position_ids": positions}
    refused("got both position_ids and positions", model, both)


def test_intermediates_stand_where_their_tokens_stand(models):
    backbone = models["gemma3_debug"].backbone
    found, alone = backbone.intermediates(MASKED), backbone.intermediates(ALONE)
    assert list(found) == ["token_embedding", "block_0", "block_1", "final_norm"]
    for name, value in found.items():
        expected, limit = to_numpy(alone[name]), tolerance("hidden")
        np.testing.assert_allclose(there(to_numpy(value)), expected, rtol=0, atol=limit)
    # A model of the user's over the graph has the two usual inputs.
    assert list(backbone.input) == ["token_ids", "padding_mask"]
    pooled = keras.layers.GlobalAveragePooling1D()(backbone.get_layer("final_norm").output)
    predicted = keras.Model(backbone.input, pooled).predict(MASKED, verbose=0)
    expected, limit = to_numpy(found["final_norm"]).mean(1), tolerance("logits")
    np.testing.assert_allclose(predicted, expected, rtol=0, atol=limit)
    # So has one around the model.
    ids, mask = (keras.Input((None,), dtype="int32") for _ in range(2))
    outer = keras.Model([ids, mask], backbone({"token_ids": ids, "padding_mask": mask}))
    outside, expected = to_numpy(outer([*MASKED.values()])), to_numpy(backbone(MASKED))
    np.testing.assert_allclose(outside, expected, atol=1e-6)


def test_token_ids_are_enough_and_unknown_names_are_left_out_with_a_warning(models):
    model = models["gemma_debug"]
    wanted = to_numpy(model({"token_ids": TOKEN_IDS, "padding_mask": np.ones_like(TOKEN_IDS)}))
    none = {"token_ids": TOKEN_IDS, "padding_mask": None, "positions": None}
    for inputs in (TOKEN_IDS, {"token_ids": TOKEN_IDS}, {"token_ids": TOKEN_IDS[..., None]}, none):
        np.testing.assert_array_equal(to_numpy(model(inputs)), wanted)
    limit = tolerance("logits")
    np.testing.assert_allclose(model.predict(TOKEN_IDS, verbose=0), wanted, atol=limit)
    # Of names before and behind those of the graph.
    for name in ("attention_mask", "zebra"):
        with pytest.warns(UserWarning, match="The structure of `inputs` doesn't match"):
            found = model({"token_ids": TOKEN_IDS, name: TOKEN_IDS})
        np.testing.assert_array_equal(to_numpy(found), wanted)
    for inputs, message in (
        ({"padding_mask": 1, "ids": 2}, "got ids, padding_mask; it needs token_ids"),
        ({}, "got nothing; it needs token_ids"),
        ([1, 2], "a list of inputs; give token ids as an array"),
    ):
        refused(message, model, inputs)


def test_inputs_of_tokens_have_their_sizes(models):
    model, rows = models["gemma3_debug"], np.ones_like(TOKEN_IDS)
    wanted = to_numpy(model(TOKEN_IDS))
    one = {"token_ids": TOKEN_IDS, "segment_ids": rows[:1]}
    np.testing.assert_allclose(to_numpy(model(one)), wanted, atol=tolerance("logits"))
    of_ids = rf"beside token_ids of shape \({rows.shape[0]}, {rows.shape[1]}\); give one for each"
    for change, message in (
        ({"padding_mask": rows[:, :-1]}, f"padding_mask has shape .* {of_ids}"),
        ({"padding_mask": rows[:1]}, f"padding_mask has shape .* {of_ids}"),
        ({"positions": rows[:, 1:]}, f"positions has shape .* {of_ids}"),
        ({"segment_ids": rows[0]}, f"segment_ids has shape .* {of_ids}"),
        ({"token_ids": rows[0]}, "token_ids has shape .*; give rows of tokens"),
        ({"token_ids": rows[:, :0]}, "token_ids has shape .*, 0.; give rows of tokens"),
    ):
        inputs = {"token_ids": TOKEN_IDS, **change}
        refused(message, model, inputs)
        if len({len(x) for x in inputs.values()}) == 1:
            refused(message, model.predict, inputs, verbose=0)
    refused("token_ids has 0.5; give whole numbers", model.predict, rows - 0.5, verbose=0)


def test_generate_takes_rows_that_are_padded_anywhere(models):
    model = models["gemma3_debug"]
    found, alone = (
        model.generate(inputs, max_length=20, stop_token_ids=None)["token_ids"]
        for inputs in (MASKED, ALONE)
    )
    np.testing.assert_array_equal(found, alone)


def test_a_keras_mask_is_heeded_and_handed_on():
    block = GemmaBlock(GemmaConfig(31, 1, 2, 1, 8, 24, 4), 0)
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")
    kept = np.array([[False, False, True, True, True]] * 2)
    masked = keras.layers.Masking(9.0)(np.where(kept[..., None], x, 9.0))
    alone = to_numpy(block(x[:, 2:]))  # rotary positions are relative
    segments = keras.ops.zeros((2, 5), "int32")
    for more in ({}, {"info": DecoderInfo(segment_ids=segments)}):
        found = block(masked, **more)
        np.testing.assert_array_equal(to_numpy(found._keras_mask), kept)
        limit = tolerance("attention")
        np.testing.assert_allclose(to_numpy(found)[:, 2:], alone, rtol=0, atol=limit)


# === Embedding tables with more or fewer rows ===

OLD, NEW = 320, 331
IDS = np.random.default_rng(0).integers(3, OLD, (4, 9)).astype("int32")
WITH_NEW = np.where(IDS % 5, IDS, NEW - 1)


def task(**settings):
    return GemmaCausalLM.from_preset("gemma2_debug", preprocessor=None, **settings)


def table(model):
    return to_numpy(model.backbone.token_embedding.embeddings).astype("float32")


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "bfloat16"])
def test_new_rows_are_the_mean_of_the_old_ones_and_the_rest_stays(dtype):
    model = task(dtype=dtype)
    before, logits = table(model), model.predict(IDS, verbose=0)
    assert model.resize_token_embeddings(NEW) is model.backbone.token_embedding
    after, found = table(model), model.predict(IDS, verbose=0)
    np.testing.assert_array_equal(after[:OLD], before)
    mean = before.astype("float64").mean(0)
    np.testing.assert_allclose(after[OLD:], np.tile(mean, (11, 1)), rtol=2**-8, atol=1e-7)
    assert found.shape == (4, 9, NEW) and model.output_shape == (None, None, NEW)
    near = tolerance("dense", dtype.removeprefix("mixed_"))
    np.testing.assert_allclose(found[..., :OLD], logits, rtol=0, atol=near)
    assert model.backbone.config.vocabulary_size == model.backbone.blocks[0].config.vocabulary_size
    assert str(model.backbone.token_embedding.embeddings.dtype) == model.variables[0].dtype


def test_fewer_rows_are_the_first_ones():
    model = task()
    before = table(model)
    model.resize_token_embeddings(300)
    np.testing.assert_array_equal(table(model), before[:300])
    model.resize_token_embeddings(301, pad_to_multiple_of=16)
    for given in ((0,), (3.5,), (330, 0)):
        refused(r"new_num_tokens|pad_to_multiple_of", model.resize_token_embeddings, *given)
    assert model.backbone.config.vocabulary_size == len(table(model)) == 304


def test_compiled_functions_the_optimizer_and_generation_follow():
    model, fresh = task(), task(vocabulary_size=NEW)
    x, y = IDS[:, :-1], IDS[:, 1:]
    for one in (model, fresh):
        one.compile(keras.optimizers.SGD(0.1))
    # Everything is compiled for the old table.
    model.fit(x, y, verbose=0)
    model.evaluate(x, y, verbose=0)
    model.generate({"token_ids": IDS[:, :3]}, max_new_tokens=2, stop_token_ids=None)
    # As PyTorch's loops see it.
    variables = getattr(model, "parameters", list)
    count = len(list(variables()))
    model.resize_token_embeddings(NEW)
    assert len(list(variables())) == count
    fresh.set_weights(model.get_weights())
    x, y = WITH_NEW[:, :-1], WITH_NEW[:, 1:]

    def assert_same_losses():
        found, wanted = (m.evaluate(x, y, verbose=0) for m in (model, fresh))
        np.testing.assert_allclose(found, wanted, rtol=1e-5)

    assert_same_losses()
    with pytest.warns(UserWarning, match="start over"):
        model.fit(x, y, verbose=0)
    fresh.fit(x, y, verbose=0)
    assert_same_losses()
    found, wanted = (
        m.generate({"token_ids": x[:, :3]}, max_new_tokens=4, stop_token_ids=None)["token_ids"]
        for m in (model, fresh)
    )
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_allclose(table(model), table(fresh), rtol=0, atol=1e-6)
    assert np.ptp(table(model)[OLD:], axis=0).max() > 0, "the new rows are trained"


def test_files_and_copies_have_the_new_table(tmp_path):
    model = task()
    model.backbone.enable_lora(2)
    model.resize_token_embeddings(NEW)
    assert not model.backbone.token_embedding.embeddings.trainable
    wanted = model.predict(WITH_NEW, verbose=0)
    model.save(tmp_path / "task.keras")
    model.save_to_preset(tmp_path / "preset")
    read = keras.saving.load_model(tmp_path / "task.keras")
    assert len(read.trainable_variables) == len(model.trainable_variables)
    others = [read, GemmaCausalLM.from_preset(tmp_path / "preset"), copy.deepcopy(model)]
    model.merge_lora()
    others.append(GemmaCausalLM.from_preset(model.export_to_transformers(tmp_path / "export")))
    for other in others:
        found = other.predict(WITH_NEW, verbose=0)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance("logits"))


def test_a_larger_tokenizer_fits_afterwards():
    tokenizer = train_tokenizer(demo.texts(), 400)
    preprocessor = GemmaCausalLMPreprocessor(tokenizer, sequence_length=12)
    backbone = GemmaBackbone.from_preset("gemma_debug")
    message = "or the backbone as many rows by resize_token_embeddings"
    refused(message, GemmaCausalLM, backbone, preprocessor)
    backbone.resize_token_embeddings(tokenizer.vocabulary_size())
    model = GemmaCausalLM(backbone, preprocessor)
    model.fit(["the cat", "a dog"], verbose=0)
    refused("tokens and the embedding table 320 rows", model.resize_token_embeddings, OLD)
    assert len(table(model)) == tokenizer.vocabulary_size()
