"""CLIP's text tower against transformers, alone, projected, and beside its image tower."""

import json

import keras
import numpy as np
import pytest

from arrays import assert_same_tensors, read_npz, to_numpy
from kmodels.core.errors import InputError
from kmodels.models import (
    CLIPTextConfig,
    CLIPTextEncoder,
    CLIPTextModelWithProjection,
    ViTImageClassifier,
)
from kmodels.models.clip.presets import PRESETS
from kmodels.weights import read_safetensors, write_safetensors
from tolerances import tolerance

CASES = ("projected", "legacy", "bare")
SIZES = {
    "vocabulary_size": 24, "embedding_dim": 16, "hidden_dim": 16, "num_layers": 2, "num_heads": 4,
    "intermediate_dim": 20, "intermediate_activation": "gelu", "intermediate_output_index": None,
    "max_sequence_length": 9,
}  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 24, (4, 7))


class Case:
    """A reference with the models that were read from it."""

    def __init__(self, folder):
        self.path = folder / "model"
        self.expected = read_npz(folder / "expected.npz")
        self.inputs = {
            name: self.expected[name].astype("int32") for name in ("token_ids", "padding_mask")
        }
        self.model = CLIPTextModelWithProjection.from_preset(self.path)
        self.backbone = self.model.backbone
        self.result = self.expected.get("embeds", self.expected["pooled"])

    def pooled(self, inputs, **settings):
        settings = {"projection_dim": None, **settings}
        return to_numpy(CLIPTextModelWithProjection.from_preset(self.path, **settings)(inputs))


@pytest.fixture(scope="module", params=CASES)
def case(request, references):
    return Case(references / "clip" / request.param)


def near(found, expected, what="hidden"):
    found = to_numpy(found)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance(what))


@pytest.mark.each_backend
def test_every_hidden_state_under_a_mask(case):
    found = case.backbone.intermediates(case.inputs)
    assert list(found) == ["tokens", "block_0", "block_1", "block_2", "final_norm"]
    for i in range(3):
        near(found[f"block_{i}"], case.expected[f"block_{i}"])
    near(found["final_norm"], case.expected["hidden"])
    near(case.backbone(case.inputs), case.expected["hidden"])
    near(case.backbone.predict(case.inputs, verbose=0), case.expected["hidden"])


def test_the_mask_matters_to_what_is_pooled(case):
    ids = case.inputs["token_ids"]
    near(case.backbone(ids), case.expected["hidden_all"])
    near(case.pooled(ids), case.expected["pooled_all"])
    near(case.pooled(case.inputs), case.expected["pooled"])
    apart = np.abs(case.expected["pooled"] - case.expected["pooled_all"]).max(axis=-1)
    # A token in the middle of the first row is masked; what stands behind an end token no end sees.
    assert apart[0] > 0.05 and (apart[1:] < 1e-5).all()


@pytest.mark.each_backend
def test_the_projection(case):
    near(case.model(case.inputs), case.result, "logits")
    near(case.model.predict(case.inputs, verbose=0), case.result, "logits")
    assert case.model.settings["projection_dim"] == (10 if "embeds" in case.expected else None)


def test_the_rule_of_the_end_token(references):
    """Each rule gives the numbers of its own config, and far other ones for the other's."""
    found = {name: Case(references / "clip" / name) for name in ("projected", "legacy")}
    ends = {name: case.backbone.config.end_token_id for name, case in found.items()}
    assert ends == {"projected": 40, "legacy": None}
    for name, other in (("projected", None), ("legacy", 40)):
        case = found[name]
        near(case.pooled(case.inputs), case.expected["pooled"])
        wrong = case.pooled(case.inputs, end_token_id=other)
        assert np.abs(wrong - case.expected["pooled"])[0].max() > 100 * tolerance("hidden")
        # The other rows have one end token, or several of which the first counts, and none above.
        near(wrong[1:], case.expected["pooled"][1:])


def test_bfloat16_is_as_close_to_float64_as_transformers(references):
    for name in ("projected", "legacy"):
        case = Case(references / "clip" / name)
        model = CLIPTextModelWithProjection.from_preset(case.path, dtype="bfloat16")
        exact = case.expected["many64"]
        ours = np.abs(to_numpy(model(case.expected["many"].astype("int32"))) - exact).mean()
        assert ours < 1.1 * np.abs(case.expected["many16"] - exact).mean()


# === Hugging Face, both ways ===


def test_export_is_what_was_read(case, tmp_path):
    case.model.export_to_transformers(tmp_path / "out")
    assert_same_tensors(tmp_path / "out", case.path)
    again = CLIPTextModelWithProjection.from_preset(tmp_path / "out", load_weights=False)
    assert again.backbone.config == case.backbone.config
    assert again.settings == case.model.settings
    old = json.loads((case.path / "config.json").read_text())
    new = json.loads((tmp_path / "out" / "config.json").read_text())
    names = ("architectures", "eos_token_id", "hidden_act", "layer_norm_eps", "hidden_size")
    assert {name: new[name] for name in names} == {name: old[name] for name in names}


@pytest.mark.across("torch")
def test_transformers_loads_the_export(case, tmp_path):
    import torch

    from torchvision_cpu import define_torchvision_operators

    define_torchvision_operators()
    import transformers

    given = {
        "input_ids": torch.as_tensor(case.expected["token_ids"]),
        "attention_mask": torch.as_tensor(case.expected["padding_mask"]),
    }
    for model, keys in ((case.model, ("embeds", "pooled")), (case.backbone, ("pooled",))):
        folder = model.export_to_transformers(tmp_path / type(model).__name__)
        name = json.loads((folder / "config.json").read_text())["architectures"][0]
        theirs = getattr(transformers, name).from_pretrained(folder, attn_implementation="eager")
        with torch.no_grad():
            out = theirs(**given)
        found = out.text_embeds if name.endswith("WithProjection") else out.pooler_output
        key = next(key for key in keys if key in case.expected)
        np.testing.assert_array_equal(found.numpy(), case.expected[key])


def test_files_of_transformers_4(references, tmp_path):
    """Bare models had a prefix there, and kept places beside the weights."""
    source = references / "clip" / "bare" / "model"
    old = {f"text_model.{name}": x for name, x in read_safetensors(source).items()}
    places = {"text_model.embeddings.position_ids": np.arange(12)[None]}
    write_safetensors(tmp_path / "model.safetensors", _lazy(places) | old)
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    for one, two in zip(
        *[CLIPTextEncoder.from_preset(x).weights for x in (source, tmp_path)], strict=True
    ):
        np.testing.assert_array_equal(to_numpy(one), to_numpy(two))


def _lazy(arrays):
    from kmodels.weights import LazyArray

    return {name: LazyArray(x.shape, x.dtype, lambda x=x: x) for name, x in arrays.items()}


def test_unknown_and_missing_tensors_are_named(references, tmp_path):
    source = references / "clip" / "projected" / "model"
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    tensors = dict(read_safetensors(source))
    write_safetensors(
        tmp_path / "model.safetensors", tensors | _lazy({"text_model.more": np.ones(2, "float32")})
    )
    with pytest.raises(InputError, match=r"1 tensors without a variable: text_model\.more"):
        CLIPTextModelWithProjection.from_preset(tmp_path)
    del tensors["text_model.final_layer_norm.bias"]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(InputError, match="1 variables without a tensor: final_norm/bias"):
        CLIPTextEncoder.from_preset(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; the model supports gelu"),
        ({"eos_token_id": [2, 40]}, r"eos_token_id is \[2, 40\]; the model supports one number"),
    ],
)
def test_settings_without_counterpart_are_named(references, tmp_path, change, message):
    text = json.loads((references / "clip" / "bare" / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**text, **change}))
    with pytest.raises(InputError, match=message):
        CLIPTextEncoder.from_preset(tmp_path, load_weights=False)
    with pytest.raises(InputError, match="pools at the highest id where end_token_id is 2"):
        CLIPTextEncoder(**SIZES, end_token_id=2).export_to_transformers(tmp_path / "out")


def test_a_config_of_both_towers_says_all(references, tmp_path):
    """`text_config_dict` counts in place of `text_config`, and what is left out has defaults."""
    text = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    description = {"model_type": "clip", "text_config": {"hidden_size": 8}, "projection_dim": 6}
    description |= {"text_config_dict": text, "logit_scale_init_value": 1.5}
    (tmp_path / "config.json").write_text(json.dumps(description))
    model = CLIPTextModelWithProjection.from_preset(tmp_path, load_weights=False)
    assert model.settings == {"projection_dim": 6, "logit_scale": 1.5}
    assert model.backbone.config == CLIPTextConfig(49_408, 32, 32, 1, 4, 2048, end_token_id=49_407)


# === Zero-shot classification ===


@pytest.mark.each_backend
def test_logits_per_image_are_those_of_transformers(references):
    folder = references / "clip" / "both"
    expected = read_npz(folder / "expected.npz")
    with pytest.warns(UserWarning, match="does not say how its images are normalised"):
        images = ViTImageClassifier.from_preset(folder / "model")
    texts = CLIPTextModelWithProjection.from_preset(folder / "model")
    assert texts.logit_scale == 2.0
    given = {name: expected[name].astype("int32") for name in ("token_ids", "padding_mask")}
    logits = texts.logits_per_image(images(expected["images"]), texts(given))
    near(logits, expected["logits_per_image"], "logits")
    embeds = images.predict(expected["images"], verbose=0), texts.predict(given, verbose=0)
    near(texts.logits_per_image(*embeds), expected["logits_per_image"], "logits")


# === As a model of Keras ===


def test_training_moves_all_and_dropout_acts():
    model = CLIPTextModelWithProjection(
        CLIPTextEncoder(**SIZES, attention_dropout=0.5), projection_dim=3
    )
    outputs = [to_numpy(model(IDS, training=training)) for training in (False, False, True)]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert np.abs(outputs[0] - outputs[2]).max() > 1e-3
    before = {v.path: to_numpy(v).copy() for v in model.trainable_variables}
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    losses = model.fit(IDS, np.ones((4, 3)), epochs=8, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]
    still = [v.path for v in model.trainable_variables if np.all(before[v.path] == to_numpy(v))]
    assert not still


def test_mixed_bfloat16_and_lora_train():
    backbone = CLIPTextEncoder(**SIZES, dtype="mixed_bfloat16")
    assert keras.backend.standardize_dtype(backbone(IDS).dtype) == "bfloat16"
    model = CLIPTextModelWithProjection(backbone, projection_dim=3)
    assert keras.backend.standardize_dtype(model(IDS).dtype) == "float32"
    backbone.enable_lora(rank=2)
    names = {v.path.rsplit("/", 1)[-1] for v in backbone.trainable_variables}
    assert names == {"lora_a", "lora_b"}
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    losses = model.fit(IDS, np.ones((4, 3)), epochs=6, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_adapters_of_peft_both_ways(references, tmp_path):
    folder = references / "clip"
    expected = read_npz(folder / "adapter.npz")
    model = CLIPTextModelWithProjection.from_preset(folder / "projected" / "model")
    ids = expected["token_ids"].astype("int32")
    near(model(ids), expected["plain"], "logits")
    model.load_adapter(folder / "adapter")
    assert np.abs(expected["plain"] - expected["embeds"]).max() > 100 * tolerance("logits")
    near(model(ids), expected["embeds"], "logits")
    model.save_adapter(tmp_path / "out")
    written, read = (
        read_safetensors(f / "adapter_model.safetensors")
        for f in (tmp_path / "out", folder / "adapter")
    )
    # A task's head is trained beside the adapters, so it goes with them.
    assert set(written) - set(read) == {"base_model.model.text_projection.weight"}
    for name, tensor in read.items():
        np.testing.assert_array_equal(written[name].read(), tensor.read())


@pytest.mark.across
@pytest.mark.needs("peft")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["projected", "bare"])
def test_peft_reads_adapters(references, name, tmp_path):
    import torch

    from torchvision_cpu import define_torchvision_operators

    define_torchvision_operators()
    import peft
    import transformers

    case = Case(references / "clip" / name)
    model = case.model if name == "projected" else case.backbone
    model.enable_lora(2, alpha=3.0, targets="all-linear")
    rng = np.random.default_rng(1)
    for variable in model.trainable_variables:
        drawn = rng.normal(size=variable.shape).astype("float32")
        variable.assign(variable + 0.2 * drawn)
    model.save_adapter(tmp_path)
    kind = {"projected": "CLIPTextModelWithProjection", "bare": "CLIPTextModel"}[name]
    base = getattr(transformers, kind).from_pretrained(case.path)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    with torch.no_grad():
        out = theirs(input_ids=torch.as_tensor(case.expected["token_ids"]))
    expected = out.text_embeds if name == "projected" else out.last_hidden_state
    near(model(case.inputs["token_ids"]), expected.numpy(), "logits")
    plain = type(model).from_preset(case.path)(case.inputs["token_ids"])
    assert np.abs(expected.numpy() - to_numpy(plain)).max() > 0.01


@pytest.mark.parametrize("index", [1, -1])
def test_an_intermediate_output(index, tmp_path):
    sizes = {**SIZES, "intermediate_output_index": index}
    backbone = CLIPTextEncoder(**sizes)
    found = backbone(IDS)
    assert set(found) == {"sequence_output", "intermediate_output"}
    steps = backbone.intermediates(IDS)
    np.testing.assert_array_equal(
        to_numpy(found["intermediate_output"]), to_numpy(steps["block_1"])
    )
    plain = CLIPTextEncoder(**SIZES)
    plain.set_weights(backbone.get_weights())
    near(found["sequence_output"], to_numpy(plain(IDS)))
    models = [CLIPTextModelWithProjection(x, projection_dim=None) for x in (backbone, plain)]
    near(models[0](IDS), to_numpy(models[1](IDS)))
    models[0].save_to_preset(tmp_path / "model")
    again = CLIPTextModelWithProjection.from_preset(tmp_path / "model")
    assert again.backbone.config == backbone.config
    near(again(IDS), to_numpy(models[0](IDS)))


def test_positional_arguments_are_in_keras_hubs_order():
    backbone = CLIPTextEncoder(*SIZES.values())
    assert {name: getattr(backbone.config, name) for name in SIZES} == SIZES
    assert {name: getattr(backbone, name) for name in SIZES} == SIZES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embedding_dim": 8}, "embedding_dim is 8 and hidden_dim 16"),
        ({"num_heads": 3}, "3 heads do not divide the width of 16"),
        ({"intermediate_activation": "relu"}, "intermediate_activation is 'relu'; choose one of"),
        ({"intermediate_output_index": 2}, "index is 2; give one of the 2 blocks, from -2 to 1"),
        ({"attention_dropout": 1.0}, r"attention_dropout is 1\.0; give a rate"),
        ({"end_token_id": -1}, "end_token_id is -1; give at least 0"),
        ({"num_positions": 3}, "takes no num_positions"),
    ],
)
def test_a_config_is_checked(change, message):
    with pytest.raises(InputError, match=message):
        CLIPTextEncoder(**{**SIZES, **change})


def test_wrong_inputs_are_refused():
    backbone = CLIPTextEncoder(**SIZES)
    with pytest.raises(InputError, match=r"a row of 10 tokens is longer than the 9 positions"):
        backbone(np.zeros((1, 10), "int32"))
    with pytest.raises(InputError, match="it needs token_ids, and takes padding_mask too"):
        backbone({"padding_mask": IDS})


@pytest.mark.parametrize(
    ("name", "parameters"),
    # Those of transformers' models of the published configs, with their projections.
    [
        ("clip_text_base", 63_428_096),
        ("clip_text_large", 123_650_304),
        ("clip_text_huge", 354_032_640),
        ("clip_text_bigg", 694_659_840),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, parameters):
    fields = dict(PRESETS[name])
    width = fields.pop("task_projection_dim")
    c = CLIPTextConfig(**fields)
    block = 4 * width * (width + 1) + c.intermediate_dim * (2 * width + 1) + 5 * width
    tables = (c.vocabulary_size + c.max_sequence_length) * width
    assert tables + c.num_layers * block + 2 * width + width * width == parameters
    debug = CLIPTextModelWithProjection.from_preset("clip_text_debug")
    assert debug.count_params() < 100_000 and debug(IDS).shape == (4, 32)
