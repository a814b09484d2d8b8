"""Settings of a config.json mean what they mean in transformers, or are refused by name."""

import inspect
import json
import shutil
from dataclasses import fields

import keras
import numpy as np
import pytest

from arrays import to_numpy
from family_table import row_of
from kmodels.generation import generation_config
from kmodels.models import GemmaCausalLM, Llama3CausalLM, Qwen3CausalLM, ViTImageClassifier
from kmodels.models.blocks import directories, huggingface
from kmodels.models.vit.weights import eva as of_eva
from kmodels.models.vit.weights import timm
from kmodels.weights import read_safetensors
from refusals import refused
from tolerances import tolerance

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rope_theta": 1e4,
    "max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LENGTHENED = {"factor": 4.0, "original_max_position_embeddings": 16}
LINEAR, PLAIN = {"rope_type": "linear", "factor": 3.0}, {"rope_type": "default"}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
WINDOW = {"use_sliding_window": True, "max_window_layers": 0}
IDS = np.random.default_rng(0).integers(0, 64, (2, 48)).astype("int32")
# model_type, and what is changed in the config.json that transformers writes.
LIKE_TRANSFORMERS = {
    "yarn": ("qwen3", {"rope_scaling": YARN}),
    "yarn's older name and all its numbers": (
        "qwen3",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                          "attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2}},
    ),
    "yarn with two scales": (
        "qwen3", {"rope_scaling": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False}}
    ),
    "yarn of the whole length": ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
    "yarn among rope_parameters": ("qwen3", {"rope_parameters": {**YARN, "rope_theta": 5e3}}),
    "linear": ("qwen3", {"rope_scaling": LINEAR}),
    "rope_scaling beside rope_parameters": (
        "qwen3", {"rope_scaling": LINEAR, "rope_parameters": {**PLAIN, "rope_theta": 1e4}}
    ),
    "llama's rope_scaling": ("llama", {"rope_scaling": LINEAR}),
    "llama's slow channels": ("llama", {"rope_scaling": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 3.0,
        "original_max_position_embeddings": 40}}),
    "llama's slow channels of the whole length": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "rope_theta": 5e3}}),
    "a window": ("qwen3", {**WINDOW, "sliding_window": 5, "layer_types": None}),
    "a window of 4096": ("qwen3", {**WINDOW, "sliding_window": 4096, "layer_types": None}),
    "windows from a later layer": ("qwen3", {"use_sliding_window": True, "layer_types": None}),
    "gemma's rope_scaling": ("gemma", {"rope_scaling": LINEAR}),
    "gemma2's rope_scaling beside rope_parameters": (
        "gemma2", {"rope_scaling": LINEAR, "rope_parameters": {**PLAIN, "rope_theta": 1e4}}
    ),
    "gemma3's rope_scaling beside rope_parameters": (
        "gemma3_text",
        {"rope_scaling": LINEAR, "rope_parameters": {
            GLOBAL: {**PLAIN, "rope_theta": 1e4}, LOCAL: {**PLAIN, "rope_theta": 1e3}}},
    ),
    "gemma's yarn": ("gemma", {"rope_scaling": YARN}),
    "gemma2's yarn of the whole length": ("gemma2", {"rope_parameters": {
        "rope_type": "yarn", "factor": 2.0, "rope_theta": 5e3, "truncate": False}}),
    "gemma3's yarn, by its older name": ("gemma3_text", {"rope_scaling": YARN}),
    "gemma3's yarn in both kinds of layers": (
        "gemma3_text", {"rope_parameters": {
            GLOBAL: {**YARN, "rope_theta": 1e4, "attention_factor": 1.3, "beta_slow": 2.0},
            LOCAL: {**YARN, "rope_theta": 1e3, "mscale": 1.2, "mscale_all_dim": 0.7}}},
    ),
    "gemma3's factor of layers with a window": (
        "gemma3_text", {"rope_parameters": {
            GLOBAL: {**PLAIN, "rope_theta": 1e4}, LOCAL: {**LINEAR, "rope_theta": 1e3}}},
    ),
    "gemma4's yarn in both kinds of layers": (
        "gemma4_text", {"rope_parameters": {
            GLOBAL: {**YARN, "rope_theta": 1e4, "beta_fast": 8.0},
            LOCAL: {**YARN, "rope_theta": 1e3}}},
    ),
}  # fmt: skip
TASKS = {"llama": Llama3CausalLM, "qwen3": Qwen3CausalLM}
OF_GEMMA_4 = {
    "hidden_size_per_layer_input": 0, "global_head_dim": 64, "sliding_window": 8,
    "layer_types": [LOCAL, GLOBAL],
}  # fmt: skip


def _written(folder, kind, changes, **settings):
    """Writes a tiny model as transformers does, changes its config.json, and reads it there."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    more = {} if kind in ("gemma", *TASKS) else {
        "query_pre_attn_scalar": 16, "layer_types": [LOCAL, GLOBAL],
    }  # fmt: skip
    more = OF_GEMMA_4 if kind == "gemma4_text" else more
    config = AutoConfig.for_model(kind, **SIZES, **more, **settings)
    theirs = AutoModelForCausalLM.from_config(config)
    for parameter in theirs.parameters():
        parameter.data.normal_(0, 0.2)
    theirs.save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    if "rope_scaling" in changes and "rope_parameters" not in changes:
        described.pop("rope_parameters", None)
        described["rope_theta"] = SIZES["rope_theta"]
    (folder / "config.json").write_text(json.dumps({**described, **changes}))
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def _logits(model):
    import torch

    if isinstance(model, torch.nn.Module) and not hasattr(model, "backbone"):
        with torch.no_grad():
            return model(torch.tensor(IDS, dtype=torch.long)).logits.numpy()
    return to_numpy(model({"token_ids": IDS, "padding_mask": np.ones_like(IDS)}))


@pytest.mark.needs("transformers", "gguf")
@pytest.mark.parametrize("name", LIKE_TRANSFORMERS)
def test_settings_mean_what_they_mean_in_transformers(tmp_path, name):
    from transformers import AutoModelForCausalLM

    kind, changes = LIKE_TRANSFORMERS[name]
    expected, limit = _logits(_written(tmp_path, kind, changes)), tolerance("logits")
    task = TASKS.get(kind, GemmaCausalLM)
    ours = task.from_preset(tmp_path)
    np.testing.assert_allclose(_logits(ours), expected, rtol=0, atol=limit)
    ours.export_to_transformers(tmp_path / "out")
    if "yarn" not in name:  # which writes the length that it makes
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        length = SIZES["max_position_embeddings"]
        assert written["max_position_embeddings"] == ours.backbone.max_sequence_length == length
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    np.testing.assert_allclose(_logits(theirs), expected, rtol=0, atol=limit)
    again = task.from_preset(tmp_path / "out")
    np.testing.assert_array_equal(_logits(again), _logits(ours))


BOTH = {"local_rope_yarn": LENGTHENED, "global_rope_yarn": LENGTHENED}


@pytest.mark.needs("gguf")
@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("qwen3_debug", {"rope_yarn": LENGTHENED}),
        ("qwen3_debug", {"rope_yarn": {**LENGTHENED, "factor": 2.0, "beta_fast": 16.0}}),
        ("qwen3_debug", {"rope_scaling_factor": 4.0}),
        ("gemma_debug", BOTH),
        ("gemma2_debug", BOTH),
        ("gemma3_debug", {"global_rope_yarn": LENGTHENED}),
    ],
)
def test_a_gguf_file_keeps_the_scaling(tmp_path, preset, changes):
    task = Qwen3CausalLM if preset == "qwen3_debug" else GemmaCausalLM
    model = task.from_preset(preset, preprocessor=None, **changes)
    again = task.from_preset(model.export_to_gguf(tmp_path / "it.gguf", "float32"))
    for name, value in changes.items():
        found = getattr(again.backbone.config, name)
        assert value.items() <= found.items() if isinstance(value, dict) else found == value
    np.testing.assert_array_equal(_logits(again), _logits(model))
    plain = task.from_preset(preset, preprocessor=None)
    for ours, theirs in zip(plain.weights, model.weights, strict=True):
        ours.assign(to_numpy(theirs))
    assert np.abs(_logits(plain) - _logits(model)).max() > 1e-3


@pytest.mark.needs("gguf")
@pytest.mark.parametrize(
    ("preset", "changes", "message"),
    [
        ("gemma3_debug", BOTH, "no place for .*rope_scaling of layer 0="),
        (
            "gemma2_debug",
            {"global_rope_yarn": LENGTHENED},
            "no place for .*rope_scaling of layer 0",
        ),
        ("gemma4_debug", {"local_rope_yarn": LENGTHENED}, "no place for .*rope_scaling of layer 0"),
        (
            "gemma3_debug",
            {"global_rope_yarn": {**LENGTHENED, "attention_factor": 1.5}},
            "no place for attention_factor of YaRN",
        ),
    ],
)
def test_what_a_gguf_file_has_no_place_for(tmp_path, preset, changes, message):
    model = GemmaCausalLM.from_preset(preset, preprocessor=None, **changes)
    refused(message, model.export_to_gguf, tmp_path / "it.gguf", "float32")


CONFIGS = (
    *(
        "LlamaConfig",
        "Qwen3Config",
        "GemmaConfig",
        "Gemma2Config",
        "Gemma3TextConfig",
        "Gemma3Config",
    ),
    *("Gemma4TextConfig", "Gemma4Config", "Gemma4UnifiedTextConfig", "Gemma4UnifiedConfig"),
)


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("name", CONFIGS)
def test_every_setting_of_transformers_is_read_or_known_to_be_idle(name):
    import transformers

    known = huggingface.READ | huggingface.IDLE | set(huggingface.FIELDS.values())
    assert not set(getattr(transformers, name)().to_dict()) - known


ENCODERS = (
    *("ViTConfig", "DeiTConfig", "ViTMAEConfig", "IJepaConfig", "Dinov2Config"),
    *("Dinov2WithRegistersConfig", "DINOv3ViTConfig", "EomtConfig", "EomtDinov3Config"),
    *("CLIPConfig", "CLIPVisionConfig", "CLIPTextConfig", "SiglipConfig", "SiglipVisionConfig"),
    *("SiglipTextConfig", "Siglip2Config", "Siglip2VisionConfig", "Siglip2TextConfig"),
    *("Gemma4VisionConfig", "Gemma4UnifiedVisionConfig"),
)


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("name", ENCODERS)
def test_every_setting_of_an_encoder_in_transformers_is_known(name, caplog, tmp_path):
    import transformers

    described = dict.fromkeys(getattr(transformers, name)().to_dict(), 1)
    described |= dict.fromkeys(("text_config", "vision_config"), None)
    directories.warn_of_encoder(tmp_path, described)
    assert "does not know" not in caplog.text


@pytest.mark.needs("timm")
def test_every_setting_of_timm_is_known():
    from timm.models import eva, naflexvit, vision_transformer
    from timm.models._pretrained import PretrainedCfg

    vit, rotary = vision_transformer.VisionTransformer, eva.Eva
    for names, supported in (
        (inspect.signature(vit).parameters, timm.SUPPORTED),
        (inspect.signature(rotary).parameters, of_eva.SUPPORTED | {"rope_type": ()}),
        ([x.name for x in fields(naflexvit.NaFlexVitCfg)], timm.NAFLEX_SUPPORTED),
        ([x.name for x in fields(PretrainedCfg)], timm.NOTES),
    ):
        assert not set(names) - timm.READ - set(supported)


@pytest.mark.parametrize(
    ("name", "within"),
    [
        *(("vit/timm_token", x) for x in (None, "model_args", "pretrained_cfg")),
        *(("vit_recent/timm_dinov3", x) for x in (None, "model_args")),
    ],
)
def test_an_unknown_setting_of_timm_is_named(references, tmp_path, caplog, name, within):
    row = row_of(name, references)
    shutil.copytree(row.path, tmp_path / "it")
    file = tmp_path / "it" / "config.json"
    described = json.loads(file.read_text())
    for more in ({}, {"logits_scaling": 8.0}):
        changed = {within: {**described.get(within, {}), **more}} if within else more
        file.write_text(json.dumps({**described, **changed}))
        caplog.clear()
        row.task.from_preset(tmp_path / "it", **row.settings)
        assert ("sets logits_scaling, which kmodels does not know" in caplog.text) == bool(more)
        assert caplog.text.count("does not know") == bool(more)


@pytest.mark.needs("timm")
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("vit_small_patch16_dinov3", {"global_pool": "map"}, None),
        ("vit_small_patch16_rope_224", {"global_pool": "map", "attn_pool_num_heads": 2}, None),
        ("vit_small_patch16_rope_224", {"rope_grid_offset": 1.0}, None),
        ("vit_small_patch16_dinov3", {"rope_grid_offset": 1.0}, "rope_grid_offset=1.0 has no"),
    ],
)
def test_settings_mean_what_they_mean_in_timm(name, settings, message, tmp_path):
    import timm
    import torch

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    arguments = {**sizes, "num_classes": 5, **settings}
    torch.manual_seed(0)
    theirs = timm.create_model(name, **arguments).eval()
    for parameter in theirs.parameters():
        parameter.data.normal_(0, 0.2)
    timm.models.save_for_hf(theirs, tmp_path, model_args=arguments, safe_serialization=True)
    if message is not None:
        refused(message, ViTImageClassifier.from_preset, tmp_path)
        return
    x = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype("float32")
    with torch.no_grad():
        expected = theirs(torch.from_numpy(x).permute(0, 3, 1, 2)).numpy()
    found = to_numpy(ViTImageClassifier.from_preset(tmp_path, preprocessor=None)(x))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance("logits"))


def test_the_older_form_of_timms_settings(references, tmp_path):
    row = row_of("vit/timm_token", references)
    shutil.copytree(row.path, tmp_path / "it")
    file = tmp_path / "it" / "config.json"
    described = json.loads(file.read_text())
    of_images = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "interpolation": "bilinear"}
    names = {str(i): f"class {i}" for i in range(described["num_classes"])}
    described.pop("pretrained_cfg", None)
    file.write_text(json.dumps({**described, **of_images, "label_names": names}))
    model = row.task.from_preset(tmp_path / "it")
    assert (model.preprocessor.mean, model.preprocessor.interpolation) == (
        (0.1, 0.2, 0.3), "bilinear",
    )  # fmt: skip
    assert model.class_names == list(names.values())
    described["model_args"] = {**described.get("model_args", {}), "global_pool": ""}
    file.write_text(json.dumps(described))
    refused("global_pool is ''; known: token", row.task.from_preset, tmp_path / "it")


@pytest.mark.needs("transformers")
def test_every_setting_of_generation_in_transformers_is_known():
    import transformers

    assert not set(transformers.GenerationConfig().to_dict()) - generation_config.KNOWN


# The audio of Gemma 4 is left out.
@pytest.mark.filterwarnings("ignore:.*are left out")
@pytest.mark.parametrize(
    ("name", "within"),
    [
        ("gemma3_vision", "vision_config"),
        ("gemma4_vision/tower", "vision_config"),
        *(
            (name, None)
            for name in (
                *("vit/hf_token", "vit_kinds/dinov2", "vit_recent/dinov3", "vit_kinds/clip"),
                *("vit_eomt/dinov2", "two_towers/clip", "clip/projected", "vit_kinds/siglip_model"),
                *("gemma3_vision", "gemma4_vision/unified"),
            )
        ),
    ],
)
def test_an_unknown_setting_of_an_encoder_is_named(references, tmp_path, caplog, name, within):
    row = row_of(name, references)
    shutil.copytree(row.path, tmp_path / "it")
    file = tmp_path / "it" / "config.json"
    described = json.loads(file.read_text())
    for more in ({}, {"logits_scaling": 8.0}):
        changed = {within: {**described[within], **more}} if within else more
        file.write_text(json.dumps({**described, **changed}))
        caplog.clear()
        row.task.from_preset(tmp_path / "it", **row.settings)
        assert ("sets logits_scaling, which kmodels does not know" in caplog.text) == bool(more)
        assert caplog.text.count("does not know") == bool(more)


@pytest.mark.parametrize(
    "name", ["vit_recent/dinov3", "vit_kinds/dinov2_giant", "vit_eomt/dinov2", "vit_eomt/dinov3"]
)
def test_register_tokens_that_config_json_omits_are_refused(references, tmp_path, name):
    row = row_of(name, references)
    shutil.copytree(row.path, tmp_path / "it")
    file = tmp_path / "it" / "config.json"
    described = json.loads(file.read_text())
    assert described["num_register_tokens"] > 0
    file.write_text(json.dumps({**described, "num_register_tokens": 0}))
    refused(
        "1 tensors without a variable: .*register_tokens", row.task.from_preset, tmp_path / "it",
        **row.settings,
    )  # fmt: skip


def test_an_unknown_setting_of_generation_is_named(references, tmp_path, caplog):
    row = row_of("qwen3/tied", references)
    shutil.copytree(row.path, tmp_path / "it")
    (tmp_path / "it" / "generation_config.json").write_text('{"temprature": 0.5, "use_cache": 1}')
    Qwen3CausalLM.from_preset(tmp_path / "it")
    assert "generation_config.json sets temprature, which kmodels does not know" in caplog.text


def test_an_unknown_setting_is_named(references, tmp_path, caplog):
    row = row_of("qwen3/tied", references)
    shutil.copytree(row.path, tmp_path / "it")
    described = json.loads((tmp_path / "it" / "config.json").read_text())
    for more, told in (({}, 0), ({"logits_scaling": 8.0, "residual_multiplier": 0.2}, 1)):
        (tmp_path / "it" / "config.json").write_text(json.dumps({**described, **more}))
        Qwen3CausalLM.from_preset(tmp_path / "it")
        assert caplog.text.count("which kmodels does not know and does not follow") == told
    assert "config.json sets logits_scaling, residual_multiplier, which" in caplog.text


QUANTIZED = "is quantized by fbgemm_fp8, which is not read yet; open the directory it"
REFUSED = {
    "a window of null": ("gemma3_text", {"sliding_window": None}, "window is None; giv"),
    "a window of 0": ("gemma2", {"sliding_window": 0}, "have a window and sliding_window is 0"),
    "no window beside local layers": (
        "qwen3", {"use_sliding_window": False, "layer_types": [LOCAL, LOCAL]}, "layers with a win",
    ),
    "windows in some layers": (
        "qwen3", {"use_sliding_window": True, "layer_types": [LOCAL, GLOBAL]}, "windows in so"
    ),
    "a negative scale of queries": (
        "gemma3_text", {"query_pre_attn_scalar": -1.5}, "query_pre_attention_scalar is -1.5; give"),
    "a cap beyond float32": (
        "gemma2", {"final_logit_softcapping": 1e38}, "final_logit_soft_cap is 1e\\+38; give"),
    "a negative epsilon": ("qwen3", {"rms_norm_eps": -1e-6}, "epsilon is -1e-06; give"),
    "no number as epsilon": ("gemma", {"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; g"),
    "a null size": (
        "gemma3_text", {"intermediate_size": None}, "intermediate_size of config.json are null",
    ),
    "a null scale of queries": (
        "gemma2", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar of config.json are null",
    ),
    "linear without a factor": (
        "qwen3", {"rope_scaling": {"rope_type": "linear"}}, "is 'linear' without a factor; give",
    ),
    "linear with a null factor": (
        "gemma3_text", {"rope_parameters": {GLOBAL: {"rope_type": "linear", "factor": None}}},
        "is 'linear' without a factor; give",
    ),
    **{
        f"{len(types)} kinds of layers in {kind}": (
            kind, {"layer_types": types},
            f"layer_types of config.json names {len(types)} layers, and num_hidden_layers is 2; g",
        )
        for kind in ("qwen3", "gemma2", "gemma3_text", "gemma4_text")
        for types in ([], [GLOBAL], [LOCAL, LOCAL, GLOBAL])
    },
    "no number as a factor": (
        "llama", {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": "x"}},
        "low_freq_factor is 'x'; give a whole number or a",
    ),
    "an unknown kind": ("qwen3", {"rope_scaling": {"rope_type": "longrope"}}, "'longrope'; the mo"),
    "an unknown setting of yarn": ("qwen3", {"rope_scaling": {**YARN, "alpha": 1}}, "alpha; give"),
    "yarn without a factor": (
        "qwen3", {"rope_scaling": {**YARN, "factor": -1.0}}, "factor is -1.0; give a positive",
    ),
    "gemma3's yarn without the length before": (
        "gemma3_text", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "YaRN's original_max"
    ),
    "gemma3's yarn with a range that is not rounded": (
        "gemma3_text", {"rope_scaling": {**YARN, "truncate": False}}, "full_attention has truncate",
    ),
    "gemma4's yarn of a part of the channels": (
        "gemma4_text", {"rope_parameters": {GLOBAL: {**YARN, "partial_rotary_factor": 0.5}}},
        "partial_rotary_factor; give",
    ),
    "a quantized directory": (
        "qwen3", {"quantization_config": {"quant_method": "fbgemm_fp8"}}, QUANTIZED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_followed_is_refused_by_name(tmp_path, name):
    kind, changes, message = REFUSED[name]
    described = {"model_type": kind, **SIZES, **changes}
    (tmp_path / "config.json").write_text(json.dumps(described))
    task = TASKS.get(kind, GemmaCausalLM)
    refused(message, task.backbone_class.from_preset, tmp_path, load_weights=False)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma", "gemma3_text", "gemma4_text"])
def test_a_null_base_is_the_usual_one(tmp_path, kind):
    configs = []
    for rope in ({"rope_type": "default"}, {"rope_type": "default", "rope_theta": None}):
        ropes = rope if "_" not in kind else {GLOBAL: rope, LOCAL: rope}
        described = {"model_type": kind, **SIZES, "rope_parameters": ropes}
        described["hidden_size_per_layer_input"] = 0  # Gemma 4's usual table has 262,144 rows.
        (tmp_path / "config.json").write_text(json.dumps(described))
        backbone = TASKS.get(kind, GemmaCausalLM).backbone_class
        configs.append(backbone.from_preset(tmp_path, load_weights=False).config)
    assert configs[0] == configs[1]


# What config.json says of the output layer, which one lies in the file, and which the model has.
OUTPUTS = {
    "tied": (True, None, True),
    "tied, and the table twice": (True, "equal", True),
    "tied, and another head": (True, "another", False),
    "untied": (False, None, False),
    "untied, and the table twice": (False, "equal", False),
}
KINDS = ("llama", "qwen3", "gemma", "gemma2", "gemma3_text", "gemma4_text")
# The others share the code of one of these; they have a file of their own head and one without.
IN_EACH_CASE = ("qwen3", "gemma3_text", "gemma4_text")
OWN_HEAD = ("tied, and another head", "untied")


def _with_head(folder, head, name="lm_head.weight"):
    """Puts an output layer into a file: the embedding table, or other numbers."""
    from safetensors.numpy import save_file

    tensors = {name: tensor.read() for name, tensor in read_safetensors(folder).items()}
    table = next(x for name, x in tensors.items() if name.endswith("embed_tokens.weight"))
    tensors[name] = table[::-1].copy() if head == "another" else table
    for file in folder.glob("model*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.each_time(
    "untied-gemma4_text",
    "tied, and the table twice-gemma3_text",
    "tied, and another head-llama",
    "tied-qwen3",
    "untied, and the table twice-qwen3",
    "tied, and another head-gemma2",
)
@pytest.mark.needs("transformers")
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (case, kind)
        for case in OUTPUTS
        for kind in KINDS
        if case in OWN_HEAD or kind in IN_EACH_CASE
    ],
)
def test_tied_or_not_is_what_the_file_holds(tmp_path, kind, case):
    from transformers import AutoModelForCausalLM

    said, head, tied = OUTPUTS[case]
    _written(tmp_path, kind, {}, tie_word_embeddings=said)
    if head:
        _with_head(tmp_path, head)
    expected = _logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    task = TASKS.get(kind, GemmaCausalLM)
    ours = task.from_preset(tmp_path)
    assert ours.backbone.tie_word_embeddings == tied
    assert task.from_preset(tmp_path, load_weights=False).backbone.tie_word_embeddings == tied
    np.testing.assert_allclose(_logits(ours), expected, rtol=0, atol=tolerance("logits"))
    ours.export_to_transformers(tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    np.testing.assert_allclose(_logits(theirs), expected, rtol=0, atol=tolerance("logits"))
    ours.save_to_preset(tmp_path / "preset")
    ours.save(tmp_path / "it.keras")
    again = [task.from_preset(tmp_path / name) for name in ("out", "preset")]
    for other in (*again, keras.saving.load_model(tmp_path / "it.keras")):
        assert other.backbone.tie_word_embeddings == tied
        np.testing.assert_array_equal(_logits(other), _logits(ours))


@pytest.mark.needs("transformers")
def test_an_untied_output_layer_that_is_missing_is_named(tmp_path):
    from safetensors.numpy import save_file

    _written(tmp_path, "qwen3", {}, tie_word_embeddings=False)
    tensors = {name: tensor.read() for name, tensor in read_safetensors(tmp_path).items()}
    del tensors["lm_head.weight"]
    for file in tmp_path.glob("model*.safetensors*"):
        file.unlink()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    message = "has no lm_head.weight and config.json says tie_word_embeddings=false; write true"
    refused(message, Qwen3CausalLM.from_preset, tmp_path)
    with pytest.warns(UserWarning, match=f"follows config.json alone: .* {message}"):
        model = Qwen3CausalLM.from_preset(tmp_path, load_weights=False)
    assert not model.backbone.tie_word_embeddings
    (tmp_path / "model.safetensors").unlink()  # then there is nothing that could differ
    model = Qwen3CausalLM.from_preset(tmp_path, load_weights=False)
    assert not model.backbone.tie_word_embeddings


@pytest.mark.needs("transformers")
@pytest.mark.filterwarnings("ignore:.* of the checkpoint are left out:UserWarning")
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gemma3_vision", "lm_head.weight"),
        ("gemma3_vision", "language_model.lm_head.weight"),
        ("gemma4_vision/tower_small", "lm_head.weight"),
        ("gemma4_vision/unified", "lm_head.weight"),
    ],
)
def test_a_model_of_images_has_the_head_of_its_file(references, tmp_path, family, name):
    row = row_of(family, references)
    folder = tmp_path / "it"
    shutil.copytree(row.path, folder)
    _with_head(folder, "another", name)
    for said in (True, False):
        described = json.loads((folder / "config.json").read_text())
        described["tie_word_embeddings"] = said
        (folder / "config.json").write_text(json.dumps(described))
        ((_, expected, plain, _),) = row.result_of_peer(folder)
        assert np.abs(expected - plain).max() > 0.1
        ours = row.task.from_preset(folder)
        assert not ours.backbone.tie_word_embeddings
        logits = to_numpy(ours(row.inputs("two")))[:, -expected.shape[1] :]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance("logits"))
        text = GemmaCausalLM.from_preset(folder)
        tables = [model.backbone.token_embedding.get_weights() for model in (ours, text)]
        np.testing.assert_array_equal(*tables)
    row.export(row.task.from_preset(folder), tmp_path / "out")
    ((_, logits, _, _),) = row.result_of_peer(tmp_path / "out")
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance("logits"))
    assert not row.task.from_preset(tmp_path / "out").backbone.tie_word_embeddings
