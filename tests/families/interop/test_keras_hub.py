"""keras-hub's models against ours: weights, logits, adapters and preprocessing, there and back."""

import json
from importlib import import_module

import h5py
import keras
import numpy as np
import pytest

import hub_models
from kmodels import lora
from kmodels.core.errors import InputError
from kmodels.interop import keras_hub
from kmodels.models import (
    Gemma3Backbone,
    Gemma3CausalLM,
    Gemma3CausalLMPreprocessor,
    GemmaBackbone,
    GemmaCausalLM,
    GemmaCausalLMPreprocessor,
    Qwen3Backbone,
    ViTBackbone,
    ViTImageClassifier,
    ViTImageClassifierPreprocessor,
)
from kmodels.text import demo
from refusals import refused
from tolerances import tolerance

pytestmark = [pytest.mark.needs("keras_hub"), pytest.mark.across("torch")]
# What a backend computes; refusals and files are the same on each.
EVERYWHERE = pytest.mark.across("torch", "jax", "tensorflow")
# An encoder and a decoder: which weights go where is the same on each backend, and that a backend
# computes what the original does is a check of tests/families/test_families.py.
ON_EACH = ("vit_classifier", "gemma3")
# Beside the weights that both have: DINOv2's second table of positions, SigLIP's numbers.
TWICE = {"dinov2": 37 * 16, "dinov2_giant": 17 * 16, "siglip": 16}


@pytest.fixture(scope="module")
def models():
    return import_module("keras_hub").models


@pytest.mark.each_time("vit_classifier", on=("jax", "tensorflow"))
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[EVERYWHERE] * (name in ON_EACH)) for name in hub_models.MAKERS],
)
def test_there_and_back_bit_for_bit_with_equal_outputs(name, models):
    theirs = hub_models.make(name, models)
    ours = keras_hub.from_hub(theirs)
    x = hub_models.inputs(name)
    wanted, found = (hub_models.output(model, x) for model in (theirs, ours))
    assert found.shape == wanted.shape
    assert np.abs(wanted).max() > 0.05
    assert np.abs(found - wanted).max() <= tolerance("logits")
    assert ours.count_params() == theirs.count_params() - TWICE.get(name, 0)

    back = keras_hub.to_hub(ours)
    assert type(back) is type(theirs)
    held = {path.removeprefix("tower_"): value for path, value in hub_models.values(theirs).items()}
    if name == "dinov2":  # whose table is that of the size in use from here on
        held.pop("embeddings/position_embeddings")
    for path, value in hub_models.values(back).items():
        if path in held and "variable" not in path:
            assert np.array_equal(value, held[path]), path
    again = keras_hub.from_hub(back)
    assert type(again) is type(ours)
    assert hub_models.values(again).keys() == hub_models.values(ours).keys()
    for path, value in hub_models.values(again).items():
        assert np.array_equal(value, hub_models.values(ours)[path]), path
    assert getattr(again, "backbone", again).config == getattr(ours, "backbone", ours).config
    assert getattr(again, "settings", None) == getattr(ours, "settings", None)


def test_the_classes_are_those_of_keras_hubs_names(models):
    assert type(keras_hub.from_hub(hub_models.make("gemma3", models))) is Gemma3CausalLM
    tower = keras_hub.from_hub(hub_models.make("siglip", models))
    assert isinstance(tower, ViTImageClassifier) and tower.pooling == "map"


def test_bfloat16_stays_bfloat16(models):
    theirs = models.ViTBackbone(**hub_models.VIT, dtype="bfloat16")
    ours = keras_hub.from_hub(theirs)
    assert {str(v.dtype) for v in ours.weights} == {"bfloat16"}
    assert keras_hub.to_hub(ours).dtype_policy.name == "bfloat16"


@pytest.fixture(scope="module")
def pair(models):
    theirs = hub_models.make("vit", models)
    return keras_hub.from_hub(theirs), theirs


BLOCK = "vit_encoder/transformer_block_1"


def change(model, path, value):
    next(v for v in model.weights if v.path == path).assign(value)


@pytest.mark.parametrize(
    "path", [f"{BLOCK}/mha/query/kernel", f"{BLOCK}/ln_1/gamma", "vit_encoder/ln/beta"]
)
def test_one_changed_number_is_named(pair, path):
    ours, theirs = pair
    held = hub_models.values(theirs)[path]
    changed = held.copy()
    changed.flat[3] += 1e-6
    change(theirs, path, changed)
    refused(f"different: {path}$", keras_hub.compare, ours, theirs)
    change(theirs, path, held)
    keras_hub.compare(ours, theirs)


def test_swapped_and_transposed_weights_are_named(pair):
    ours, theirs = pair
    names = [f"{BLOCK}/mha/{part}/kernel" for part in ("query", "key")]
    square = f"{BLOCK}/mlp/dense_1/kernel"
    held = hub_models.values(theirs)
    change(theirs, names[0], held[names[1]])
    change(theirs, names[1], held[names[0]])
    change(theirs, square, held[square].T)
    with pytest.raises(InputError, match="different: ") as error:
        keras_hub.compare(ours, theirs)
    assert {*names, square} == set(str(error.value).partition("different: ")[2].split(", "))
    for name in (*names, square):
        change(theirs, name, held[name])


def test_dropped_added_and_misshapen_weights_are_named(models):
    # A model whose arguments say something else than what it holds.
    theirs = models.ViTBackbone(**hub_models.VIT)
    theirs.use_mlp_bias = False
    refused(f"4 tensors without a variable: {BLOCK}/mlp/dense_1/bias", keras_hub.from_hub, theirs)
    theirs = models.ViTBackbone(**hub_models.VIT, use_mlp_bias=False)
    theirs.use_mlp_bias = True
    refused("variables without a tensor: block_0/mlp/up/bias", keras_hub.from_hub, theirs)
    theirs.use_mlp_bias, theirs.mlp_dim = False, 12
    refused(f"{BLOCK}/mlp/dense_1/kernel is .16, 16., the model need", keras_hub.from_hub, theirs)


def test_adapters_are_not_dropped(models):
    theirs = models.ViTBackbone(**hub_models.VIT)
    theirs.enable_lora(2)
    refused(r"has LoRA adapters .8 weights.*save_lora_weights", keras_hub.from_hub, theirs)
    ours = ViTBackbone.from_preset("vit_debug")
    ours.enable_lora(2)
    refused("no place for these LoRA adapters; call merge_lora", keras_hub.to_hub, ours)


VIT = {"image_shape": (16, 16, 3), "patch_size": 8, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 8}
GEMMA = {**hub_models.GEMMA, "num_layers": 2, "intermediate_dim": 48}


def vit(fields, settings=None):
    model = ViTBackbone(**VIT, num_layers=1, **fields)
    return model if settings is None else ViTImageClassifier(model, **settings)


def gemma(**fields):
    return GemmaBackbone(**GEMMA, **fields)


def gemma4(**fields):
    return GemmaBackbone.from_preset("gemma4_debug", **fields)


DISTILLED = {"use_distillation_token": True}
DINOV3 = {"rope_theta": 9.0, "use_position_embedding": False, "layer_scale": 1.0}
DINOV3 |= {"pos_embed_rescale": 2.0, "use_query_bias": False}
NO, NO_4 = "keras-hub's GemmaBackbone .*", "Gemma4Backbone has no counterpart for "


@pytest.mark.parametrize(
    "model, named",
    [
        (lambda: vit({"qk_norm": True}), "keras-hub's ViTBackbone has no counterpart for qk_norm"),
        (lambda: vit({"approximate_gelu": True}), "approximate_gelu=True"),
        (lambda: vit({"num_register_tokens": 2}), "register tokens"),
        (lambda: vit({}, {"num_classes": 3, "pooling": "gap"}), "gap.* beside a class token"),
        (lambda: vit({}, {"num_classes": 3, "head_bias": False}), "logits without bias"),
        (
            lambda: vit(DISTILLED, {"num_classes": 3, "pooling": "distilled"}),
            "keras-hub's DeiTBackbone has no counterpart for pooling='distilled'",
        ),
        (lambda: vit({"layer_scale": 1.0}, {"num_classes": 3}), "a head .give model.backbone."),
        (lambda: vit({"layer_scale": 1.0, "layer_norm_epsilon": 1e-5}), "layer_norm_epsilon=1e-05"),
        (lambda: vit({}, {"num_classes": 0, "pooling": "map"}), "a class token"),
        (lambda: vit(DINOV3), "DINOV3Backbone has no counterpart for pos_embed_rescale"),
        (lambda: gemma(query_pre_attention_scalar=99.0), NO + "a query scale of 0.100504"),
        (
            lambda: gemma(use_sliding_window_attention=True, sliding_window_pattern=3),
            NO + "window_pattern=3",
        ),
        (lambda: gemma(global_rope_wavelength=1e6), NO + "global_rope_wavelength=1000000.0"),
        (lambda: gemma(global_rope_scaling_factor=8.0), NO + "global_rope_scaling_factor=8.0"),
        (lambda: gemma(tie_word_embeddings=False), NO + "tie_word_embeddings=False"),
        (lambda: gemma4(tie_word_embeddings=False), NO_4 + "tie_word_embeddings=False"),
        (lambda: gemma4(use_value_norm=False), NO_4 + "use_value_norm=False"),
        (lambda: gemma4(query_pre_attention_scalar=4.0), NO_4 + "this query scale"),
        (
            lambda: gemma4(attention_k_eq_v=False),
            NO_4 + "num_global_key_value_heads without attention_k_eq_v",
        ),
    ],
)
def test_what_keras_hubs_models_lack_is_named(model, named):
    refused(named, keras_hub.to_hub, model())


def hub_gemma(**changes):
    sizes = {**hub_models.GEMMA, "num_layers": 1, "intermediate_dim": 48}
    return lambda models: models.GemmaBackbone(**{**sizes, **changes})


def hub_gemma4(**changes):
    sizes = {**hub_models.GEMMA, **hub_models.GEMMA_4}
    return lambda models: models.Gemma4Backbone(**sizes, **changes)


def channels_first(models):
    theirs = models.ViTBackbone(**hub_models.VIT)
    theirs.data_format = "channels_first"
    return theirs


@pytest.mark.parametrize(
    "make, named",
    [
        (hub_gemma(layer_norm_epsilon=1e-5), "layer_norm_epsilon=1e-05"),
        (hub_gemma(head_dim=8, query_head_dim_normalize=False), "which keras-hub ignores"),
        (channels_first, "no counterpart for ViTBackbone with channels in front"),
        (
            lambda models: models.DINOV3Backbone(**hub_models.NARROW, hidden_activation="relu"),
            "hidden_activation='relu' with use_gated_mlp=False",
        ),
        (
            hub_gemma4(use_bidirectional_attention=True),
            "for Gemma4Backbone with use_bidirectional_attention",
        ),
        (
            hub_gemma4(enable_moe_block=True, num_experts=2, expert_intermediate_dim=4),
            "for Gemma4Backbone with enable_moe_block",
        ),
        (
            lambda models: models.VGGBackbone(stackwise_num_repeats=[1], stackwise_num_filters=[2]),
            "VGGBackbone has no counterpart; Gemma4Back",
        ),
    ],
)
def test_what_keras_hub_has_besides_or_ignores_is_refused(models, make, named):
    refused(named, keras_hub.from_hub, make(models))


def test_presets_of_keras_hub_load_from_their_directory(models, tmp_path):
    theirs = hub_models.make("vit_classifier", models)
    theirs.save_to_preset(str(tmp_path / "classifier"))
    ours = keras_hub.from_hub(tmp_path / "classifier")
    keras_hub.compare(ours, theirs)
    hub_models.make("dinov2", models).save_to_preset(str(tmp_path / "backbone"))
    assert isinstance(keras_hub.from_hub(str(tmp_path / "backbone")), ViTBackbone)
    refused("is not a directory", keras_hub.from_hub, tmp_path / "absent")
    ours.backbone.export_to_transformers(tmp_path / "hugging_face")
    with pytest.raises(InputError, match=r"is not a preset of keras-hub.*from_preset reads"):
        keras_hub.from_hub(tmp_path / "hugging_face")


def test_a_preset_without_the_weights_of_its_head_is_named(models, tmp_path, caplog):
    hub_models.make("vit_classifier", models).save_to_preset(str(tmp_path))
    keras_hub.from_hub(tmp_path)
    assert "task.weights.h5" not in caplog.text
    (tmp_path / "task.weights.h5").unlink()
    keras_hub.from_hub(tmp_path)
    assert f"{tmp_path} lacks task.weights.h5, so its head has new weights" in caplog.text


@pytest.mark.parametrize(("file", "key"), [("config.json", "dtype"), ("task.json", "backbone")])
def test_damaged_settings_of_a_preset_are_told_in_a_line(models, tmp_path, file, key):
    hub_models.make("vit_classifier", models).save_to_preset(str(tmp_path))
    described = json.loads((tmp_path / file).read_text())
    described["config"][key] = "junk"
    (tmp_path / file).write_text(json.dumps(described))
    refused(f"keras-hub cannot load {tmp_path}: ", keras_hub.from_hub, tmp_path)


def test_presets_with_a_weight_too_few_or_too_many_are_named(models, tmp_path):
    theirs = hub_models.MAKERS["vit"](models)
    theirs.save_to_preset(str(tmp_path))
    with h5py.File(tmp_path / "model.weights.h5", "r+") as file:
        file["layers/extra/vars/0"] = np.ones(2)
    refused(r"that ViTBackbone does not have: layers/extra/vars/0$", keras_hub.from_hub, tmp_path)
    with h5py.File(tmp_path / "model.weights.h5", "r+") as file:
        found: list[str] = []
        file.visit(found.append)
        del file[next(name for name in found if name.endswith("query_dense/vars/0"))]
    refused("Layer 'query' expected 1 variables, but received 0", keras_hub.from_hub, tmp_path)


def test_both_towers_give_the_vision_tower(models):
    tower = hub_models.make("siglip", models)
    text = models.SigLIPTextEncoder(32, 16, 16, 1, 2, 16, max_sequence_length=4)
    ours = keras_hub.from_hub(models.SigLIPBackbone(tower, text))
    keras_hub.compare(ours, tower)


def test_a_family_without_a_table_of_keras_hub_is_named(tmp_path):
    ours = Qwen3Backbone.from_preset("qwen3_debug")
    for call in (
        keras_hub.to_hub,
        lambda model: keras_hub.read_lora(model, tmp_path / "x.lora.h5"),
    ):
        refused("Qwen3Backbone has no counterpart in kmodels' tables", call, ours)


@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
def test_keras_hub_trains_what_it_was_given(models):
    ours = ViTImageClassifier(ViTBackbone(**VIT, num_layers=1), 3)
    theirs = keras_hub.to_hub(ours)
    theirs.compile(optimizer=keras.optimizers.SGD(0.1))
    x = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype("float32")
    theirs.fit(x, np.arange(2), epochs=1, verbose=0)
    refused("different: ", keras_hub.compare, ours, theirs)


def test_rates_of_training_that_keras_hub_lacks_are_named(models, caplog):
    keras_hub.to_hub(ViTBackbone.from_preset("vit_debug", num_layers=2, drop_path_rate=0.2))
    assert "keras-hub's ViTBackbone has no drop_path_rate=0.2, and trains without" in caplog.text
    keras_hub.to_hub(ViTBackbone.from_preset("vit_debug", num_layers=2))
    assert caplog.text.count("trains without") == 1


def test_the_text_part_alone_is_asked_for():
    """What was left out of a checkpoint is refused in tests/families/gemma/test_checkpoint.py."""
    ours = GemmaBackbone.from_preset("gemma_debug", num_layers=1)
    ours.left_out = ("vision_tower",)
    keras_hub.compare(ours, keras_hub.to_hub(ours, text_only=True))


# === Adapters ===

RANKS = {"vit": 4, "dinov2": 4, "gemma": 8, "gemma3": 8, "gemma4": 8}


def adapted(name, models, file):
    """A model without adapters, and the same with those in a file, both of keras-hub."""
    plain, other = (hub_models.make(name, models) for _ in range(2))
    backbone = getattr(other, "backbone", other)
    backbone.enable_lora(2)
    rng = np.random.default_rng(3)
    for variable in backbone.trainable_weights:
        if "lora_kernel" in variable.path:  # it leaves biases trainable, and out of the file
            variable.assign(rng.normal(size=tuple(variable.shape)) * 0.2)
    backbone.save_lora_weights(str(file))
    return plain, other


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=EVERYWHERE if name == "gemma" else ()) for name in RANKS]
)
def test_outputs_are_those_of_keras_hubs_adapters(name, models, tmp_path):
    plain, other = adapted(name, models, tmp_path / "made.lora.h5")
    ours = keras_hub.from_hub(plain)
    x = hub_models.inputs(name)
    base, wanted = hub_models.output(ours, x), hub_models.output(other, x)
    keras_hub.read_lora(ours, tmp_path / "made.lora.h5")
    found = hub_models.output(ours, x)
    assert np.abs(wanted - base).max() > 0.01
    assert np.abs(found - wanted).max() <= tolerance("logits")
    assert {settings["rank"] for settings in lora.describe(ours).values()} == {RANKS[name]}

    ours.save_adapter(tmp_path / "peft")
    again = keras_hub.from_hub(plain)
    again.load_adapter(tmp_path / "peft")
    assert np.array_equal(hub_models.output(again, x), found)


def test_files_that_do_not_fit_change_nothing(models, tmp_path):
    file = tmp_path / "made.lora.h5"
    adapted("vit", models, file)
    sizes = {**hub_models.VIT, "layer_norm_epsilon": 1e-5, "use_mha_bias": False}
    wider = ViTBackbone(**{**sizes, "hidden_dim": 32})
    refused(r"kernel has adapters of \(16, 2, 2\)", keras_hub.read_lora, wider, file)
    shorter = ViTBackbone(**{**sizes, "num_layers": 1})
    with pytest.raises(InputError, match=r"made for another model|has no linear layer of its own"):
        keras_hub.read_lora(shorter, file)
    assert not lora.describe(wider) and not lora.describe(shorter)
    (tmp_path / "other.lora.h5").write_bytes(b"no such file")
    refused(
        r"is not a .lora.h5 of keras-hub", keras_hub.read_lora, wider, tmp_path / "other.lora.h5"
    )
    wider.enable_lora(2)
    refused("has LoRA adapters already", keras_hub.read_lora, wider, file)


def test_ranks_that_a_layer_has_no_room_for(models, tmp_path):
    sizes = {**hub_models.GEMMA, "num_layers": 1, "intermediate_dim": 16}
    narrow = {**sizes, "num_key_value_heads": 1, "head_dim": 4}
    theirs = models.GemmaBackbone(**narrow)
    theirs.enable_lora(2)
    theirs.save_lora_weights(str(tmp_path / "made.lora.h5"))
    with pytest.raises(InputError, match=r"rank 8 here.*block_0/attention/value takes at most 4"):
        keras_hub.read_lora(GemmaBackbone(**narrow), tmp_path / "made.lora.h5")


# === Preprocessing ===

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TEXTS = ["Hello  wörld,\n 12 \U0001f600", "<start_of_turn>user\nHi<end_of_turn>", "a"]


def classifier(**settings):
    preprocessor = ViTImageClassifierPreprocessor((16, 24), MEAN, STD, **settings)
    sizes = {"patch_size": 8, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 8, "num_layers": 1}
    backbone = ViTBackbone(image_shape=(16, 24, 3), **sizes)
    return ViTImageClassifier(backbone, 3, preprocessor=preprocessor)


@pytest.mark.parametrize("crop", [False, True])
@pytest.mark.parametrize(
    "interpolation, antialias",
    [
        pytest.param("bilinear", True, marks=EVERYWHERE),
        ("bilinear", False),
        ("bicubic", True),
        pytest.param("bicubic", False, marks=EVERYWHERE),
    ],
)
def test_pictures_come_out_alike(interpolation, antialias, crop):
    ours = classifier(interpolation=interpolation, antialias=antialias, crop_to_aspect_ratio=crop)
    theirs = keras_hub.to_hub(ours)
    # Smooth, so that no cubic overshoots what an image can hold; each side treats that otherwise.
    rows, columns = np.meshgrid(np.arange(37), np.arange(61), indexing="ij")
    waves = [np.sin(rows / 5 + i) * np.cos(columns / (7 - i)) for i in range(3)]
    # Floats, since of uint8 it rounds what it resized to whole numbers again.
    pictures = (127 + 100 * np.stack(waves, -1)).astype("float32")[None]
    # In a map, where its cubic without smoothing is TensorFlow's on every backend.
    data = import_module("tensorflow").data.Dataset.from_tensors(pictures)
    (wanted,) = data.map(theirs.preprocessor).as_numpy_iterator()
    assert np.abs(ours.preprocessor(pictures) - wanted).max() <= tolerance("pictures")
    assert keras_hub.from_hub(theirs).preprocessor.to_dict() == ours.preprocessor.to_dict()


def test_converters_without_a_counterpart():
    theirs = keras_hub.to_hub(classifier())
    kind = import_module("keras_hub").layers.ViTImageConverter
    for settings, named in (
        ({"crop_to_aspect_ratio": False, "pad_to_aspect_ratio": True}, "pad_to_aspect_ratio"),
        ({"interpolation": "lanczos5"}, "lanczos5"),
        ({"interpolation": "lanczos3"}, "interpolation='lanczos' with antialias=False"),
    ):
        theirs.preprocessor.image_converter = kind(image_size=(16, 24), **settings)
        refused(named, keras_hub.from_hub, theirs)
    assert keras_hub.from_hub(theirs, preprocessor=False).preprocessor is None
    # One that does nothing scales nothing.
    theirs.preprocessor.image_converter = kind()
    pictures = np.full((1, 16, 24, 3), 7, "uint8")
    assert np.abs(keras_hub.from_hub(theirs).preprocessor(pictures) - 7.0).max() <= 1e-5


SIZES = {**hub_models.GEMMA, "vocabulary_size": 800, "num_layers": 1, "intermediate_dim": 16}


@pytest.fixture(scope="module")
def causal():
    preprocessor = GemmaCausalLMPreprocessor(
        hub_models.tokenizer(demo.texts()), sequence_length=24, add_end_token=False
    )
    return GemmaCausalLM(GemmaBackbone(**SIZES), preprocessor=preprocessor)


def test_tokens_come_out_alike(causal):
    theirs = keras_hub.to_hub(causal)
    tokenizer = theirs.preprocessor.tokenizer
    for text in TEXTS:
        ids = causal.preprocessor.tokenizer(text)
        assert list(tokenizer(text)) == ids
    ours = causal.preprocessor(TEXTS)
    for part, wanted in zip(theirs.preprocessor(TEXTS), ours, strict=True):
        if not isinstance(part, dict):
            part, wanted = {"": part}, {"": wanted}
        for name, value in part.items():
            assert np.array_equal(keras.ops.convert_to_numpy(value), wanted[name]), name

    again = keras_hub.from_hub(theirs).preprocessor
    assert again.sequence_length == 24 and not again.add_end_token
    assert again.tokenizer(TEXTS) == causal.preprocessor.tokenizer(TEXTS)
    assert again.tokenizer.stop_token_ids == causal.preprocessor.tokenizer.stop_token_ids


# It leaves the file open that it reads.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning")
def test_presets_carry_the_tokenizer(causal, tmp_path):
    keras_hub.to_hub(causal).save_to_preset(str(tmp_path / "preset"))
    again = keras_hub.from_hub(tmp_path / "preset")
    assert again.preprocessor.tokenizer(TEXTS) == causal.preprocessor.tokenizer(TEXTS)


def test_gemma_3_has_no_tokens_of_pictures(causal):
    preprocessor = Gemma3CausalLMPreprocessor(causal.preprocessor.tokenizer, sequence_length=16)
    sizes = {**SIZES, **hub_models.GEMMA_2, "sliding_window_pattern": 6}
    ours = Gemma3CausalLM(Gemma3Backbone(**sizes), preprocessor=preprocessor)
    theirs = keras_hub.to_hub(ours)
    assert list(theirs.preprocessor.tokenizer("a b")) == preprocessor.tokenizer("a b")
    assert type(keras_hub.from_hub(theirs)) is Gemma3CausalLM
