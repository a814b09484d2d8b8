"""Files of other packages and ours: what is read, what is refused by its name, what is written."""

import functools
import inspect
import json
import logging
import shutil
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from arrays import assert_equal, read_npz, to_numpy
from family_table import row_of, run
from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.models import (
    DINOV2Backbone,
    ViTBackbone,
    ViTImageClassifier,
    ViTImageSegmenter,
    ViTMAEForPreTraining,
    ViTObjectDetector,
)
from kmodels.models.vit.presets import PRESETS
from kmodels.models.vit.weights import augreg, eva, timm_names
from kmodels.models.vit.weights import timm as weights_timm
from kmodels.weights import LazyArray, export, load, read_safetensors, write_safetensors
from kmodels.weights.engine import variables
from kmodels.weights.gather import values
from public_models import random
from refusals import refused
from tolerances import tolerance

TINY = {
    "image_shape": (16, 24, 3), "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16,
    "mlp_dim": 32,
}  # fmt: skip
EVERYTHING = {
    "num_register_tokens": 3, "position_over_prefix": False, "layer_scale": 0.1, "qk_norm": True,
    "pre_norm": True, "pooling": "map",
}  # fmt: skip


def close(found, expected, what="hidden"):
    np.testing.assert_allclose(to_numpy(found), to_numpy(expected), atol=tolerance(what), rtol=0)


def made(**changes):
    task = {key: changes.pop(key) for key in ("pooling", "intermediate_dim") if key in changes}
    return random(ViTImageClassifier(ViTBackbone(**{**TINY, **changes}), 5, **task))


def bits(model):
    return {path: values(x).tobytes() for path, x in variables(model).items()}


def merged(held, changes):
    """A description with changes, in which None is left out."""
    held = dict(held)
    for name, x in changes.items():
        held[name] = merged(held.get(name, {}), x) if isinstance(x, dict) else x
        if x is None:
            del held[name]
    return held


def copied(references, name, folder, changes=None, tensors=None):
    """A reference's directory with another description, or other tensors."""
    shutil.copytree(references / name / "model", folder, copy_function=shutil.copyfile)
    file = folder / "config.json"
    file.write_text(json.dumps(merged(json.loads(file.read_text()), changes or {})))
    if tensors is not None:
        for old in folder.glob("*.safetensors*"):
            old.unlink()
        write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    return folder


# === What is read ===


@pytest.mark.parametrize("change", [{"approximate_gelu": True}, {"layer_norm_epsilon": 0.05}])
def test_a_wrong_variant_would_be_seen(references, change):
    row = row_of("vit/hf_token", references)
    logits = to_numpy(row.read(**change)(row.expected["images"]))
    assert np.abs(logits - row.expected["logits"]).max() > 2 * tolerance("logits")


def test_bare_backbones_have_a_pooler(references):
    folder = references / "vit" / "hf_model"
    expected = read_npz(folder / "expected.npz")
    close(ViTBackbone.from_preset(folder / "model")(expected["images"]), expected["final"])
    model = ViTImageClassifier.from_preset(folder / "model", num_classes=3)
    given = keras.ops.convert_to_tensor(expected["final"][:, 0])
    close(np.tanh(to_numpy(model.get_layer("pre_logits")(given))), expected["pooled"])


def test_another_number_of_classes_makes_a_new_head_and_says_so(references, caplog):
    row = row_of("vit/timm_token", references)
    with caplog.at_level(logging.INFO, "kmodels"):
        model = row.read(num_classes=9)
        assert "new weights for logits/kernel, logits/bias" in caplog.text
        caplog.clear()
        row.read(num_classes=5)
        assert not caplog.text
    assert model(row.expected["images"]).shape == (2, 9)
    assert to_numpy(model.get_layer("logits").kernel).std() > 0.01


def test_our_own_files_remember_the_rule_of_their_origin(references, tmp_path):
    row = row_of("vit_kinds/siglip2", references)
    row.model.save_to_preset(tmp_path)
    images, expected = (row.expected[f"resized_{name}"] for name in ("images", "final"))
    read = functools.partial(ViTBackbone.from_preset, tmp_path, image_shape=images.shape[1:])
    close(run(read(), images), expected)
    gap = run(read(position_interpolation="bicubic_antialias"), images) - expected
    assert np.abs(gap).max() > 10 * tolerance("hidden")


def test_a_feature_model_is_a_keras_model_over_the_same_weights(references):
    row = row_of("vit_kinds/dinov2_model", references)
    features = row.model.feature_model()
    assert isinstance(features, keras.Model)
    close(features.predict(row.expected["images"], verbose=0), row.expected["pooled"])
    held = {id(variable) for variable in row.model.weights}
    assert features.weights and all(id(variable) in held for variable in features.weights)
    close(run(row.model.backbone.feature_model(), row.expected["images"]), row.expected["final"])
    for outputs, given in (
        ("block_2", "'block_2'"),
        (["block_0", "block_2"], "'block_2'"),
        ([], "nothing"),
    ):
        message = f"feature_model got {given}; choose from pooled_output, "
        refused(message, row.model.feature_model, outputs)
    with pytest.raises(InputError, match="choose from sequence_output, patch_embedding, tokens"):
        row.model.backbone.feature_model("pooled_output")


def same(one, other):
    assert [w.path for w in one.weights] == [w.path for w in other.weights]
    assert_equal(one.weights, other.weights)


NEWER = {
    "vit/hf_token": ViTImageClassifier,
    "vit_kinds/deit": ViTImageClassifier,
    "vit_kinds/dinov2": ViTImageClassifier,
    "vit_kinds/dinov2_giant": DINOV2Backbone,
    "vit_recent/ijepa": ViTBackbone,
    "vit_recent/mae_pretraining": ViTMAEForPreTraining,
}


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("case", NEWER)
def test_names_that_transformers_5_has_inside(references, tmp_path, case):
    transformers, source = import_module("transformers"), references / case / "model"
    (kind,) = json.loads((source / "config.json").read_text())["architectures"]
    model = getattr(transformers, kind).from_pretrained(source)
    model.save_pretrained(tmp_path, save_original_format=False)
    shutil.copy(source / "preprocessor_config.json", tmp_path)
    newer, older = (set(read_safetensors(path)) for path in (tmp_path, source))
    assert any(".q_proj." in name for name in newer - older)
    assert not any(".q_proj." in name for name in older)
    assert "giant" not in case or any(".mlp.gate_proj." in name for name in newer)
    same(NEWER[case].from_preset(tmp_path), NEWER[case].from_preset(source))


@pytest.mark.parametrize(
    ("case", "kind", "old", "new", "name"),
    [
        ("dinov3", ViTBackbone, "layer.", "model.layer.", "model.layer.0.norm1.weight"),
        (
            *("mae_pretraining", ViTMAEForPreTraining, "decoder_encoder.layer."),
            *("decoder_layers.", "decoder.decoder_layers.0.attention.attention.query.weight"),
        ),
    ],
)
def test_names_of_published_files(references, tmp_path, case, kind, old, new, name):
    source = references / "vit_recent" / case / "model"
    tensors = {name.replace(old, new): x for name, x in read_safetensors(source).items()}
    assert name in tensors
    theta = json.loads((source / "config.json").read_text()).get("rope_theta")
    changes = {"rope_theta": None, "rope_parameters": {"rope_theta": theta}} if theta else {}
    folder = copied(references, f"vit_recent/{case}", tmp_path / "out", changes, tensors)
    same(kind.from_preset(folder), kind.from_preset(source))


def bare(path, model, drop=()):
    """Writes a model as a file of timm without its config.json."""
    tensors = export(model, weights_timm.rules(model.backbone.config))
    write_safetensors(path, {name: x for name, x in tensors.items() if name not in drop})
    return path


def test_a_bare_timm_file_tells_all_but_what_its_name_does(tmp_path):
    model = made(image_shape=(24, 24, 3))
    file = bare(tmp_path / "vit.safetensors", model)
    refused(
        "'vit' is no architecture of timm's.*give num_heads", ViTImageClassifier.from_preset, file
    )
    with pytest.warns(UserWarning) as caught:
        again = ViTImageClassifier.from_preset(file, num_heads=2)
    told = " ".join(str(one.message) for one in caught)
    assert "vit.safetensors does not say how its images are" in told
    assumed = (
        "assumed: layer_norm_epsilon=1e-06, approximate_gelu=False, pooling='token'; give them"
    )
    assert assumed in told
    assert again.preprocessor is None and bits(again) == bits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = {"layer_norm_epsilon": 1e-5, "approximate_gelu": True, "pooling": "gap"}
        again = ViTImageClassifier.from_preset(file, num_heads=2, preprocessor=None, **given)
    assert again.pooling == "gap" and again.backbone.config.layer_norm_epsilon == 1e-5
    with pytest.warns(UserWarning, match="approximate_gelu=False; give"):
        ViTBackbone.from_preset(file, num_heads=2)


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_positions_of_images_that_are_not_square(tmp_path, suffix):
    """14 x 16 patches and a class token are as many rows as 15 x 15 patches."""
    model = made(image_shape=(28, 32, 3), patch_size=2, num_heads=3, hidden_dim=24)
    file = tmp_path / f"vit_tiny_patch16_224{suffix}"
    if suffix == ".npz":
        names = ("", "Transformer/posembed_input/pos_embedding", False)
        tensors = export(model, augreg.rules(model.backbone.config, *names))
        arrays: Any = {name: x.read() for name, x in tensors.items()}
        np.savez(file, **arrays)
    else:
        bare(file, model)
    read = functools.partial(ViTImageClassifier.from_preset, file, preprocessor=None)
    refused("225 rows, which is no square and 1 in front; give image_shape=", read)
    again = read(image_shape=(28, 32, 3))
    assert again.backbone.config.image_shape == (28, 32, 3) and bits(again) == bits(model)
    if suffix == ".safetensors":
        # The positions of these architectures belong to patches alone.
        other = file.rename(tmp_path / "vit_mine.safetensors")
        given = {"layer_norm_epsilon": 1e-6, "approximate_gelu": False, "num_heads": 3}
        read = functools.partial(ViTBackbone.from_preset, other, **given)
        refused("give image_shape=.* of the file, or position_over_prefix=False", read)
        assert read(position_over_prefix=False).config.image_shape == (30, 30, 3)
        file = other.rename(tmp_path / "deit3_base_patch16_224.safetensors")
        config = ViTBackbone.from_preset(file, num_heads=3).config
        assert config.image_shape == (30, 30, 3) and not config.position_over_prefix


def test_a_bare_file_is_normalised_by_its_name_or_not_at_all():
    told = {"pretrained_cfg": {"mean": [0.1] * 3, "std": [0.2] * 3}}
    for name, mean in (
        ("deit3_small_patch16_224", (0.485, 0.456, 0.406)),
        ("vit_base_patch16_224", None),
        ("mine", None),
    ):
        found = weights_timm.statistics_of(name, {}, 3)
        assert (found and found[0]) == mean
        assert weights_timm.statistics_of(name, {}, 1) is None
        assert weights_timm.statistics_of(name, told, 3) == ((0.1,) * 3, (0.2,) * 3)


@pytest.mark.needs("timm")
def test_names_are_normalised_as_timm_normalises_them():
    timm = import_module("timm")
    known = 0
    for name in timm.list_pretrained():
        if not name.startswith(("vit_", "deit")):
            continue
        told = timm.get_pretrained_cfg(name)
        for written in (name, name.partition(".")[0]):
            if found := weights_timm.statistics_of(written, {}, 3):
                assert found == (tuple(told.mean), tuple(told.std)), written
                known += written == name
    assert known > 60


@pytest.mark.needs("timm")
def test_every_architecture_of_timm_is_known_or_refused_by_its_name(monkeypatch):
    """timm's functions are called without making their models."""
    timm = import_module("timm")
    names = timm.list_models(["vit_*", "deit*", "eva*", "flexivit_*", "*dinov3*", "naflexvit_*"])
    assert {*timm_names.ARCHITECTURES, *timm_names.LACKING} == set(names)
    assert not timm_names.ARCHITECTURES.keys() & timm_names.LACKING.keys()
    for name in names:
        if name in timm_names.LACKING:
            refused(
                f"{name} has .*which kmodels does not support", timm_names.architecture, "x", name
            )
            continue
        maker, asked = timm.model_entrypoint(name), {}
        module = import_module(maker.__module__)

        def build(cls, variant, pretrained=False, asked=asked, **arguments):
            asked.update(arguments, cls=cls)

        with monkeypatch.context() as patched:
            patched.setattr(module, "build_model_with_cfg", build)
            maker()
        config = asked.pop("cfg", None)
        asked |= {} if config is None else vars(config)
        known = timm_names.ARCHITECTURES[name]
        assert timm_names.architecture(Path("x"), f"{name}.some_tag") is known
        usual = {}
        for cls in reversed(asked["cls"].__mro__[:-1]):
            parameters = inspect.signature(cls.__init__).parameters
            usual |= {key: parameter.default for key, parameter in parameters.items()}
        if config is not None:
            usual |= vars(type(config)())
        get = {**usual, **asked}.get
        norm = get("norm_layer")
        assert known.num_heads == get("num_heads"), name
        assert known.pooling == get("global_pool"), name
        epsilon = eva.ROTARY.get(known.form, known).epsilon
        assert epsilon == getattr(norm, "keywords", {"eps": 1e-6})["eps"], name
        gated = known.form == "vit" and get("mlp_layer") != usual["mlp_layer"]
        assert known.activation == ("silu" if gated else get("act_layer") or "gelu"), name
        if known.form != "naflex":
            assert known.no_embed_class == get("no_embed_class"), name
        if asked["cls"].__name__ == "Eva":
            rotary = eva.ROTARY[known.form]
            whole = get("attn_type") == "rope"
            assert (rotary.theta, rotary.whole_bias) == (get("rope_temperature"), whole), name
            usual_type = (get("rope_type"), get("rope_grid_indexing"), get("rope_rotate_half"))
            expected = eva.THEIR_TYPES[rotary.rope_type]
            assert usual_type == (expected[0], expected[1] or usual_type[1], expected[2]), name
            assert rotary.reference == (get("ref_feat_shape") is not None), name
            assert (known.form == "perception") == name.startswith("vit_pe_"), name
        else:
            form = {"NaFlexVit": "naflex"}.get(asked["cls"].__name__, "vit")
            assert known.form == form, name
        for part in ("block_fn", "attn_layer", "embed_layer", "num_kv_heads", "scale_mlp"):
            value, default = get(part), usual.get(part)
            assert value in (default, None), (name, part)


# === What is refused ===


# A weight of each format, another of another shape, and the variable of the first.
DAMAGED = {
    "dinov2_giant": (
        "encoder.layer.0.mlp.weights_in.weight", "encoder.layer.0.layer_scale1.lambda1",
        "block_0/mlp/gate/kernel, block_0/mlp/up/kernel",
    ),
    "npz_siglip": (
        "params/img/MAPHead_0/MlpBlock_0/Dense_1/kernel", "params/img/MAPHead_0/probe",
        "pooling/mlp/down/kernel",
    ),
    "timm_deit": ("blocks.1.mlp.fc1.weight", "dist_token", "block_1/mlp/up/kernel"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_a_weight_that_is_not_right_is_refused_by_its_name(references, case, tmp_path):
    name, other, path = DAMAGED[case]
    row = row_of(f"vit_kinds/{case}", references)
    in_folder = row.path.is_dir()
    if in_folder:
        tensors = read_safetensors(row.path)
        (tmp_path / "config.json").write_bytes((row.path / "config.json").read_bytes())
    else:
        read = read_npz(row.path)
        tensors = {name: LazyArray(x.shape, x.dtype, lambda x=x: x) for name, x in read.items()}
    held, turned = tensors[name], tensors[name].map(tensors[name].shape[::-1], np.transpose)
    rest = {key: x for key, x in tensors.items() if key != name}
    for damaged, message in (
        (rest, f"variables? without a tensor: {path}"),
        ({**tensors, name + "_2": held}, f"without a variable: {name}_2"),
        ({**tensors, name: tensors[other], other: held}, f"wrong shapes: .*{name} is"),
        ({**tensors, name: turned}, f"wrong shapes: {name} is"),
    ):
        file = tmp_path / ("model.safetensors" if in_folder else row.path.name)
        if in_folder:
            write_safetensors(file, damaged)
        else:
            arrays: Any = {name: x.read() for name, x in damaged.items()}
            np.savez(file, **arrays)
        with pytest.raises(InputError, match=message):
            row.task.from_preset(tmp_path if in_folder else file, preprocessor=None, **row.settings)


HF, TIMM = "vit/hf_token", "vit/timm_token"
UNFIT = {
    HF: [
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; the model supports gelu, gelu_new"),
        ({"patch_size": [8, 4]}, r"patches of \(8, 4\) pixels; only square ones are supported"),
        ({"num_hidden_layers": 2}, "16 tensors without a variable: vit.encoder.layer.2"),
        ({"num_hidden_layers": 4}, "16 variables without a tensor: block_3/attention_norm/scale"),
    ],
    "vit/hf_model": [({"pooler_act": "relu"}, "pooler_act is 'relu'; only tanh is supported")],
    "vit_recent/dinov3_gated": [
        ({"hidden_act": "gelu"}, "use_gated_mlp with hidden_act 'gelu'; only 'silu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'; only 'default'"),
    ],
    "vit_eomt/gated": [
        ({"hidden_act": "quick_gelu"}, "use_swiglu_ffn with hidden_act 'quick_gelu'; only 'gelu'")
    ],
    TIMM: [
        ({"act_layer": "relu"}, "act_layer is 'relu'; known: gelu, gelu_tanh, quick_gelu"),
        (
            {"global_pool": "catavgmax"},
            "global_pool is 'catavgmax'; known: token, avg, max, avgmax",
        ),
        ({"pool_include_prefix": True}, "pool_include_prefix=True has no counterpart"),
        (
            {"architecture": "vit_mine", "model_args": {"num_heads": None}},
            "'vit_mine' is no architecture of timm's.*give num_heads",
        ),
        (
            {"architecture": "vit_base_patch16_rpn_224"},
            "vit_base_patch16_rpn_224 has norms after the branches, which kmodels does not support",
        ),
    ],
    "vit_recent/timm_dinov3": [
        ({"num_kv_heads": 1}, "num_kv_heads=1 has no counterpart in the model")
    ],
    "vit_kinds/timm_dinov2": [
        (
            {"architecture": "vit_tiny_patch16_224"},
            "has a gated MLP, which is supported only for vit_giant_patch14",
        )
    ],
}


def test_a_dinov3_whose_name_timm_does_not_have(references, tmp_path):
    row = row_of("vit_recent/timm_dinov3", references)
    file = tmp_path / "vit_mini_patch4_dinov3.safetensors"
    shutil.copy(references / "vit_recent/timm_dinov3/model/model.safetensors", file)
    model = ViTBackbone.from_preset(file, num_heads=3, image_shape=(32, 32, 3))
    found, expected = run(model, row.expected["images"]), row.expected["final"]
    np.testing.assert_allclose(found, expected, atol=tolerance("hidden"))


@pytest.mark.parametrize("case", UNFIT)
def test_settings_that_do_not_fit(references, tmp_path, case):
    for number, (changes, message) in enumerate(UNFIT[case]):
        if "timm" in case and "architecture" not in changes:
            changes = {"model_args": changes}
        folder = copied(references, case, tmp_path / str(number), changes)
        refused(message, ViTImageClassifier.from_preset, folder, num_classes=5, preprocessor=None)


def test_files_that_are_no_vit(references, tmp_path):
    def lacking(case, name, **others):
        held = read_safetensors(references / case / "model")
        tensors = {key: x for key, x in held.items() if key != name} | others
        return copied(references, case, tmp_path / (name or "longer"), tensors=tensors)

    folder = lacking(TIMM, "pos_embed")
    for source in (folder, folder / "model.safetensors"):
        refused("is not a timm ViT: it lacks pos_embed", ViTImageClassifier.from_preset, source)
    source = lacking("vit_recent/timm_dinov3", "blocks.0.attn.qkv.weight") / "model.safetensors"
    file = source.rename(tmp_path / "vit_small_patch16_dinov3.safetensors")
    refused("is not one of timm's EVAs: it lacks blocks", ViTBackbone.from_preset, file)
    table = np.zeros((1, 69, 24), "float32")
    longer = {"pos_embed": LazyArray(table.shape, table.dtype, lambda: table)}
    with pytest.raises(InputError, match="the positions cover the registers"):
        ViTImageClassifier.from_preset(lacking("vit/timm_registers", "", **longer))
    kernel = np.zeros((8, 8, 3, 16), "float32")
    for arrays, message in (
        ({"a": np.zeros(2)}, "is not a ViT of vision_transformer or big_vision"),
        ({"embedding/kernel": kernel}, "only learned position embeddings are supported"),
        (
            {"embedding/kernel": kernel, "pos_embedding": np.zeros((1, 4, 16))},
            "is not a known ViT: it lacks Transformer/encoderblock_0/Multi",
        ),
    ):
        np.savez(tmp_path / "x.npz", allow_pickle=False, **arrays)
        refused(message, ViTImageClassifier.from_preset, tmp_path / "x.npz")


# === What is written ===


def test_files_of_numpy_go_there_and_back_bit_for_bit():
    model = made(pooling="map", intermediate_dim=8)
    rules = augreg.rules(model.backbone.config, "params/", "pos_embedding", True)
    before, tensors = bits(model), {}
    for name, x in export(model, rules).items():
        array = x.read().copy()
        tensors[name] = LazyArray(array.shape, array.dtype, lambda array=array: array)
    random(model, seed=2)
    assert bits(model) != before
    load(model, tensors, rules)
    assert bits(model) == before


def test_an_export_keeps_how_pictures_are_prepared(tmp_path, caplog):
    model = ViTImageClassifier.from_preset("vit_debug", num_classes=2)
    model.preprocessor = ViTImageClassifier.preprocessor_class(
        (16, 16), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic"
    )
    folder = tmp_path / "out"
    model.export_to_transformers(folder)
    again = ViTImageClassifier.from_preset(folder)
    assert again.preprocessor.to_dict() == model.preprocessor.to_dict()
    # A processor of several parts holds that of images.
    (folder / "preprocessor_config.json").unlink()
    held = {"image_processor": {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}}
    (folder / "processor_config.json").write_text(json.dumps(held))
    assert ViTImageClassifier.from_preset(folder).preprocessor.mean == (0.1, 0.2, 0.3)
    held["image_processor"] |= {"image_mean": [0.25, 0.75], "image_std": [0.5] * 2}
    (folder / "processor_config.json").write_text(json.dumps(held))
    assert ViTImageClassifier.from_preset(folder).preprocessor.mean == (0.5,) * 3
    assert "sets image_mean=[0.25, 0.75] for 3 channels (the mean is taken), whi" in caplog.text


def test_an_export_names_rates_that_it_leaves_out(tmp_path, caplog):
    rates: Any = {"drop_path_rate": 0.1, "attention_dropout": 0.2, "patch_drop_rate": 0.5}
    model = ViTImageClassifier.from_preset("vit_debug", num_classes=2, dropout=0.3, **rates)
    model.export_to_transformers(tmp_path / "out")
    lost = "ViT has no drop_path_rate=0.1, patch_drop_rate=0.5, dropout=0.3; the exported"
    assert lost in caplog.text
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["attention_probs_dropout_prob"] == 0.2


def test_a_preprocessor_that_does_not_fit_is_named_with_its_file(references, tmp_path):
    changes = {"pretrained_cfg": {"interpolation": "box", "mean": [0.5] * 3, "std": [0.5] * 3}}
    folder = copied(references, TIMM, tmp_path / "it", changes)
    message = f"{folder}: its preprocessor: interpolation is 'box'; .*; or give preprocessor=None"
    refused(message, ViTImageClassifier.from_preset, folder)
    assert ViTImageClassifier.from_preset(folder, preprocessor=None).preprocessor is None


def test_a_mask_token_can_be_left_aside_on_the_way_to_timm(references, tmp_path):
    row = row_of("vit_kinds/dinov2_model", references)
    row.read(use_mask_token=False).export_to_timm(tmp_path / "out")
    again = ViTImageClassifier.from_preset(tmp_path / "out", num_classes=0)
    # The classifier's own predict takes images as they come.
    close(run(again.feature_model(), row.expected["images"]), row.expected["pooled"])


def test_what_has_no_class_token_is_told_from_siglip_by_its_gelu(references, tmp_path):
    fields = row_of("vit_recent/ijepa_classes", references).model.backbone.config.to_dict()
    for changes, name in (
        ({}, "IJepaForImageClassification"),
        ({"approximate_gelu": True}, "SiglipForImageClassification"),
        ({"position_interpolation": "bicubic_antialias"}, "SiglipForImageClassification"),
    ):
        other = ViTImageClassifier(ViTBackbone(**{**fields, **changes}), 3, pooling="gap")
        other.export_to_transformers(tmp_path / "out")
        described = json.loads((tmp_path / "out" / "config.json").read_text())
        assert described["architectures"] == [name]


MERGING = {**TINY, "image_shape": (16, 16, 3), "patch_size": 4, "token_merging": 2}
SCALED = {**MERGING, "token_merging": 0, "layer_scale": 0.1}
UNTURNED = {"use_position_embedding": False, "use_key_bias": False, "num_register_tokens": 2}
LACKING = [
    ("timm", "vit_kinds/dinov2_model", "timm's ViT has no counterpart for a mask token"),
    ("timm", "vit_kinds/dinov2", "pooling='token_gap'"),
    (
        "transformers",
        "vit_kinds/clip_classes",
        "has no counterpart for pre_norm, final_norm=False, poo",
    ),
    ("timm", "vit_recent/dinov3", "timm's EVA has no counterpart for a mask token"),
    (
        *("transformers", lambda dinov3: ViTImageClassifier(dinov3.backbone, 3, pooling="gap")),
        "has no counterpart for .*a rotary embedding",
    ),
    (
        *("timm", lambda _: ViTBackbone(**TINY, **UNTURNED)),
        "counterpart for use_position_embedding=False, biases of",
    ),
    (
        *("transformers", lambda _: made(**EVERYTHING)),
        "no counterpart for register tokens, layer_scale, qk_norm, pre_norm, pooling='map'",
    ),
    *(
        (kind, lambda _: ViTImageClassifier(ViTBackbone(**MERGING), 2), "token_merging=2")
        for kind in ("timm", "npz", "transformers")
    ),
    *(
        ("transformers", lambda _, task=task: task(ViTBackbone(**SCALED), 2), "head of this task")
        for task in (ViTImageSegmenter, ViTObjectDetector)
    ),
]


@pytest.mark.parametrize(("kind", "source", "message"), LACKING)
def test_what_a_peer_lacks_is_listed(references, tmp_path, kind, source, message):
    name = source if isinstance(source, str) else "vit_recent/dinov3"
    model = row_of(name, references).model
    model = model if isinstance(source, str) else source(model)
    refused(message, getattr(model, f"export_to_{kind}"), tmp_path / "out.npz")
    assert not (tmp_path / "out.npz").exists()


# === Presets ===


TASK = {"pooling": "token", "pooled_norm": False}


def count_of(preset, classes=0):
    """Parameters of a preset's model, of which two small ones are made."""
    fields = {key: x for key, x in PRESETS[preset].items() if not key.startswith("task_")}
    task = {key: PRESETS[preset].get(f"task_{key}", x) for key, x in TASK.items()}
    counts = []
    for layers in (1, 2):  # the others are as large as the second
        with keras_internals.without_values():
            backbone = ViTBackbone(**{**fields, "num_layers": layers})
            counts.append(ViTImageClassifier(backbone, classes, **task).count_params())
    return counts[0] + (fields["num_layers"] - 1) * (counts[1] - counts[0])


@pytest.mark.parametrize(("size", "count"), [("base", 86_567_656), ("small", 22_050_664)])
def test_1000_classes_have_the_published_number_of_parameters(size, count):
    assert count_of(f"vit_{size}_patch16_224", 1000) == count


COUNTS = {
    "dinov3_vits16": "vit_small_patch16_dinov3_qkvb",
    "dinov3_vits16plus": "vit_small_plus_patch16_dinov3_qkvb",
    "dinov3_vitb16": "vit_base_patch16_dinov3_qkvb",
    "dinov3_vitl16": "vit_large_patch16_dinov3_qkvb",
    "dinov3_vith16plus": "vit_huge_plus_patch16_dinov3_qkvb",
    "dinov3_vit7b16": "vit_7b_patch16_dinov3",
    "vit_base_patch16_rope_reg1_gap_256": "vit_base_patch16_rope_reg1_gap_256",
    "pe_core_tiny_patch16_384": "vit_pe_core_tiny_patch16_384",
    "pe_core_small_patch16_384": "vit_pe_core_small_patch16_384",
    "pe_core_base_patch16_224": "vit_pe_core_base_patch16_224",
    "pe_core_large_patch14_336": "vit_pe_core_large_patch14_336",
    "pe_core_gigantic_patch14_448": "vit_pe_core_gigantic_patch14_448",
    "vit_mae_huge_patch14_224": "vit_huge_patch14_224",
    "clip_gigantic_patch14_224": "vit_gigantic_patch14_clip_224",
    "clip_large_patch14_336": "vit_large_patch14_clip_336",
    "deit3_huge_patch14_224": "deit3_huge_patch14_224",
    "deit_small_distilled_patch16_224": "deit_small_distilled_patch16_224",
    "dinov2_giant_patch14_518": "vit_giant_patch14_dinov2",
    "dinov2_small_patch14_518": "vit_small_patch14_dinov2",
    "siglip2_giantopt_patch16_384": "vit_giantopt_patch16_siglip_384",
    "siglip_so400m_patch14_384": "vit_so400m_patch14_siglip_378",
}


@pytest.mark.across
@pytest.mark.filterwarnings("default")  # of the other packages
@pytest.mark.parametrize("preset", COUNTS)
def test_presets_have_as_many_parameters_as_timms_models(preset):
    torch, timm = import_module("torch"), import_module("timm")
    with torch.device("meta"):
        theirs = timm.create_model(COUNTS[preset], num_classes=0)
    assert count_of(preset) == sum(x.numel() for x in theirs.parameters())


# === npz ===


@pytest.mark.parametrize("pooling", ["token", "gap", "map"])
def test_a_vit_written_as_npz_is_the_same_vit(pooling, tmp_path):
    backbone = ViTBackbone.from_preset(
        "vit_debug", use_class_token=pooling == "token", position_over_prefix=True, mlp_dim=128
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
    refused(lost, model.export_to_npz, tmp_path / "model.npz")
    refused(r"ends in \.npz", model.export_to_npz, tmp_path / "model.bin")
    assert not list(tmp_path.iterdir())
