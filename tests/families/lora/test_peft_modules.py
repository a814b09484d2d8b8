"""Modules trained as a whole beside adapters, and adapters of tables, to PEFT and from it."""

import copy
import json

import keras
import numpy as np
import pytest

from arrays import assert_equal, to_numpy
from kmodels import lora
from kmodels.models import GemmaCausalLM, Qwen3CausalLM, ViTImageClassifier
from refusals import refused
from tolerances import tolerance

pytestmark = [
    pytest.mark.across,
    pytest.mark.needs("peft"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Careful, disabling adapter layers:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]
QWEN, GEMMA, VIT = "qwen3/untied", "gemma/untied", "lora/vit"
TABLES = ["embed_tokens", "lm_head"]
# Base, targets, and other settings of PEFT.
CASES = {
    "linear": (QWEN, ["q_proj"], {"modules_to_save": ["o_proj"]}),
    "linear with bias": (VIT, ["q_proj"], {"modules_to_save": ["fc1"]}),
    "head": (VIT, ["q_proj"], {"modules_to_save": ["classifier"]}),
    "norms": (QWEN, ["q_proj"], {"modules_to_save": ["input_layernorm", "k_norm"]}),
    "final norm": (QWEN, ["q_proj"], {"modules_to_save": ["model.norm"]}),
    "table": (QWEN, ["q_proj"], {"modules_to_save": ["embed_tokens"]}),
    "output layer": (QWEN, ["q_proj"], {"modules_to_save": ["lm_head"]}),
    "both": (QWEN, ["q_proj"], {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "rows and head": (
        *(QWEN, ["q_proj"]),
        {"modules_to_save": ["lm_head"], "trainable_token_indices": [7, 3]},
    ),
    "biases of adapters": (VIT, ["q_proj", "fc2"], {"bias": "lora_only"}),
    "no biases": (QWEN, ["q_proj"], {"bias": "all"}),
    "start": (QWEN, ["q_proj"], {"init_lora_weights": "mica"}),
    "matrices of both tables": (QWEN, ["q_proj", *TABLES], {}),
    "matrices of the table": (QWEN, ["embed_tokens"], {"use_rslora": True}),
    "matrices of the head": (QWEN, ["lm_head"], {"lora_dropout": 0.1}),
    "matrices of other ranks": (
        *(QWEN, ["q_proj", *TABLES]),
        {"rank_pattern": {"lm_head": 4, "embed_tokens": 3}, "alpha_pattern": {"lm_head": 1}},
    ),
    "matrices with lengths": (QWEN, ["q_proj", *TABLES], {"use_dora": True}),
    "matrices and a head": (QWEN, ["embed_tokens"], {"modules_to_save": ["lm_head"]}),
    "matrices and rows of the head's table": (
        *(QWEN, ["lm_head"]),
        {"trainable_token_indices": [7, 3]},
    ),
    "matrices of scaled rows": (GEMMA, ["q_proj", *TABLES], {}),
    "matrices of scaled rows with lengths": (GEMMA, TABLES, {"use_dora": True}),
}

# The same with a quantized base.
QUANTIZED = {
    "quantized linear": (QWEN, ["q_proj"], {"modules_to_save": ["o_proj"]}),
    "quantized linear with bias": (VIT, ["q_proj"], {"modules_to_save": ["fc1"]}),
    "head beside quantized": (VIT, ["q_proj"], {"modules_to_save": ["classifier"]}),
    "biases of quantized": (VIT, ["q_proj", "fc2"], {"bias": "lora_only"}),
}


class Theirs:
    """PEFT's model with random values of all that is trained, and what it gives."""

    def __init__(self, folder, targets, settings, adapter, rows=None):
        import peft
        import torch

        from torchvision_cpu import define_torchvision_operators

        define_torchvision_operators()
        import transformers

        self.is_text = "vit" not in folder.name
        name = "AutoModelForCausalLM" if self.is_text else "ViTForImageClassification"
        self.base = getattr(transformers, name).from_pretrained(folder).eval()
        if rows is not None:
            self.base.resize_token_embeddings(rows)
        config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=targets, **settings)
        self.model = peft.get_peft_model(self.base, config).eval()
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape) * 0.3)
        self.model.save_pretrained(adapter)

    def __call__(self, x, model=None):
        import torch

        given = (
            torch.from_numpy(x).long() if self.is_text else torch.from_numpy(x).permute(0, 3, 1, 2)
        )
        with torch.no_grad():
            return (model or self.model)(given).logits.numpy()


@pytest.fixture(params=CASES)
def case(request, references, tmp_path):
    base, targets, settings = {**CASES, **QUANTIZED}[request.param]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 8, 8, 1)).astype("float32")
    folder = references / base
    folder = folder / "model" if (folder / "model").is_dir() else folder
    if base != VIT:
        size = json.loads((folder / "config.json").read_text())["vocab_size"]
        x = rng.integers(3, size, (2, 8)).astype("int32")
        x[:, ::3] = 7
    cls = {QWEN: Qwen3CausalLM, GEMMA: GemmaCausalLM, VIT: ViTImageClassifier}[base]
    theirs = Theirs(folder, targets, settings, tmp_path / "adapter")
    return cls.from_preset(folder, preprocessor=None), theirs, x, folder


def outputs(model, x):
    given = {"token_ids": x, "padding_mask": np.ones_like(x)} if x.ndim == 2 else x
    return to_numpy(model(given, training=False))


def close(found, wanted):
    scale = max(1, np.abs(wanted).max())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance("logits") * scale)


@pytest.mark.each_time(
    "matrices with lengths",
    "matrices of scaled rows",
    "matrices of both tables",
    "matrices and a head",
    "norms",
    "linear",
    "rows and head",
    "biases of adapters",
)
def test_the_original_stays_beside_what_is_trained(case, tmp_path):
    import peft
    import transformers

    model, theirs, x, folder = case
    base, before = outputs(model, x), model.get_weights()
    expected = theirs(x)
    assert np.abs(base - expected).max() > 0.01
    model.load_adapter(tmp_path / "adapter")
    tuned = outputs(model, x)
    close(tuned, expected)
    with lora.disabled(model):
        np.testing.assert_array_equal(outputs(model, x), base)
    np.testing.assert_array_equal(outputs(model, x), tuned)
    # What is written here gives the same in PEFT, and here in all ways.
    model.save_adapter(tmp_path / "ours")
    plain = type(theirs.base).from_pretrained(folder).eval()
    assert isinstance(plain, transformers.PreTrainedModel)
    close(theirs(x, peft.PeftModel.from_pretrained(plain, tmp_path / "ours").eval()), expected)
    model.save(tmp_path / "model.keras")
    model.save_to_preset(tmp_path / "preset")
    again = [
        keras.saving.load_model(tmp_path / "model.keras"),
        type(model).from_preset(tmp_path / "preset"),
    ]
    for other in again:
        np.testing.assert_allclose(outputs(other, x), tuned, rtol=0, atol=1e-6)
        with lora.disabled(other):
            np.testing.assert_allclose(outputs(other, x), base, rtol=0, atol=1e-6)
        paths = [[v.path for v in m.trainable_weights] for m in (model, other)]
        assert paths[0] == paths[1]
    model.load_adapter(tmp_path / "ours")
    np.testing.assert_array_equal(outputs(model, x), tuned)
    model.merge_lora()
    close(outputs(model, x), expected)
    assert len(model.get_weights()) == len(before)
    model.unmerge_lora()
    np.testing.assert_array_equal(outputs(model, x), tuned)
    with lora.disabled(model):
        np.testing.assert_array_equal(outputs(model, x), base)


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", *TABLES]])
def test_a_resized_base_comes_with_both_tables(targets, references, tmp_path):
    import peft

    folder, rows = references / QWEN / "model", 170
    theirs = Theirs(folder, targets, {}, tmp_path / "theirs", rows)
    x = np.random.default_rng(0).integers(3, rows, (2, 8)).astype("int32")
    expected = theirs(x)
    model = Qwen3CausalLM.from_preset(folder, preprocessor=None)
    refused("resize_token_embeddings.170. first", model.load_adapter, tmp_path / "theirs")
    model.resize_token_embeddings(rows)
    model.load_adapter(tmp_path / "theirs")
    close(outputs(model, x), expected)
    model.save_adapter(tmp_path / "ours")
    plain = type(theirs.base).from_pretrained(folder).eval()
    plain.resize_token_embeddings(rows)
    close(theirs(x, peft.PeftModel.from_pretrained(plain, tmp_path / "ours").eval()), expected)
    again = Qwen3CausalLM.from_preset(folder, preprocessor=None)
    again.resize_token_embeddings(rows)
    again.load_adapter(tmp_path / "ours")
    close(outputs(again, x), expected)


@pytest.mark.parametrize("way", ["bin", "shards of bin", "shards", "names"])
def test_other_files_of_peft_are_read(way, references, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    folder = references / "lora" / "vit_head"
    whole = load_file(folder / "adapter" / "adapter_model.safetensors")
    ending = "bin" if "bin" in way else "safetensors"
    save = torch.save if ending == "bin" else save_file
    (tmp_path / "adapter_config.json").write_text(
        (folder / "adapter" / "adapter_config.json").read_text()
    )
    if way == "names":
        whole = {
            name.replace(".lora_A.", ".lora_A.mine.").replace(".lora_B.", ".lora_B.mine."): x
            for name, x in whole.items()
        }
    parts = {f"adapter_model.{ending}": whole}
    if way.startswith("shards"):
        names = sorted(whole)
        parts = {
            f"adapter_model-0000{i}-of-00002.{ending}": {n: whole[n] for n in names[i - 1 :: 2]}
            for i in (1, 2)
        }
        index = {"weight_map": {n: file for file, held in parts.items() for n in held}}
        (tmp_path / f"adapter_model.{ending}.index.json").write_text(json.dumps(index))
    for file, held in parts.items():
        save(held, str(tmp_path / file))
    models = [ViTImageClassifier.from_preset(references / VIT, preprocessor=None) for _ in "ab"]
    models[0].load_adapter(folder / "adapter")
    models[1].load_adapter(tmp_path)
    assert_equal(models[1].get_weights(), models[0].get_weights())


class Runs:
    def __reduce__(self):
        return exec, ("raise SystemExit('code of a file ran')",)


def test_code_in_a_file_does_not_run(references, tmp_path):
    import torch

    model = ViTImageClassifier.from_preset(references / VIT, preprocessor=None)
    config = references / "lora" / "vit_head" / "adapter" / "adapter_config.json"
    (tmp_path / "adapter_config.json").write_text(config.read_text())
    torch.save({"x": Runs()}, tmp_path / "adapter_model.bin")
    refused("holds more than tensors", model.load_adapter, tmp_path)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_matrices_of_a_table_that_is_the_head_are_refused(target, references, tmp_path):
    folder = references / "qwen3/tied/model"
    Theirs(folder, ["q_proj", target], {}, tmp_path)
    model = Qwen3CausalLM.from_preset(folder, preprocessor=None)
    refused("of an embedding table that is the output layer too", model.load_adapter, tmp_path)
    refused("'token_embedding' is not a linear", model.enable_lora, 2, targets="token_embedding")


@pytest.mark.each_time(
    "quantized linear-int4",
    "quantized linear-nf4",
    "biases of quantized-int8",
    "head beside quantized-nf4",
)
@pytest.mark.parametrize("mode", ["int8", "int4", "nf4"])
@pytest.mark.parametrize("case", QUANTIZED, indirect=True)
def test_a_copy_of_a_quantized_module_holds_floats(case, mode, tmp_path):
    import torch

    from kmodels.lora.modules import linear_layers, names

    model, theirs, x, _ = case
    model.quantize(mode)
    base, layers = outputs(model, x), linear_layers(model.backbone)
    # PEFT's base gets the numbers that quantization leaves; its copies stay what they are.
    for path, name in names(model, layers).items():
        module = theirs.base.get_submodule(name)
        module = getattr(module, "original_module", getattr(module, "base_layer", module))
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(to_numpy(layers[path].wide_kernel()).T.copy()))
    expected, variables = theirs(x), len(model.get_weights())
    model.load_adapter(tmp_path / "adapter")
    tuned = outputs(model, x)
    close(tuned, expected)
    with lora.disabled(model):
        np.testing.assert_array_equal(outputs(model, x), base)
    np.testing.assert_array_equal(outputs(model, x), tuned)
    refused("merge_lora would round the adapter away", model.merge_lora)
    model.save_adapter(tmp_path / "ours")
    close(theirs_of(theirs, tmp_path / "ours")(x), expected)
    model.save(tmp_path / "model.keras")
    model.save_to_preset(tmp_path / "preset")
    for other in (
        keras.saving.load_model(tmp_path / "model.keras"),
        type(model).from_preset(tmp_path / "preset"),
        copy.deepcopy(model),
    ):
        np.testing.assert_allclose(outputs(other, x), tuned, rtol=0, atol=1e-6)
        with lora.disabled(other):
            np.testing.assert_allclose(outputs(other, x), base, rtol=0, atol=1e-6)
        assert [v.path for v in other.trainable_weights] == [
            v.path for v in model.trainable_weights
        ]
    model.load_adapter(tmp_path / "ours")
    np.testing.assert_array_equal(outputs(model, x), tuned)
    assert len(model.get_weights()) > variables


def theirs_of(theirs, folder):
    """What PEFT gives with an adapter of ours on the base of a `Theirs`."""
    import peft

    base = theirs.model.unload()
    assert base is theirs.base
    for name, module in list(base.named_modules()):
        if hasattr(module, "original_module"):
            parent, _, last = name.rpartition(".")
            setattr(base.get_submodule(parent), last, module.original_module)
    return lambda x: theirs(x, peft.PeftModel.from_pretrained(base, folder).eval())


def test_a_quantized_module_begins_as_its_numbers(references):
    model = Qwen3CausalLM.from_preset(references / QWEN / "model", preprocessor=None)
    model.quantize("int8")
    x = np.arange(16, dtype="int32").reshape(2, 8)
    base = outputs(model, x)
    model.enable_lora(2, targets=["query"], modules_to_save=["attention/output"])
    np.testing.assert_allclose(outputs(model, x), base, rtol=0, atol=1e-3)
    names = {v.path for v in model.trainable_weights if "lora_kernel" in v.path}
    assert names and all("attention/output" in name for name in names)


def test_the_head_of_a_task_is_a_module_to_save(references, tmp_path):
    model = ViTImageClassifier.from_preset(references / VIT, preprocessor=None)
    x = np.random.default_rng(0).normal(size=(2, 8, 8, 1)).astype("float32")
    base = outputs(model, x)
    model.enable_lora(2, targets=["query"], modules_to_save=["classifier"])
    trained = {v.path for v in model.trainable_weights if "logits" in v.path}
    assert trained == {"logits/lora_kernel", "logits/lora_bias"}
    np.testing.assert_array_equal(outputs(model, x), base)
    for variable in model.trainable_weights:
        variable.assign(to_numpy(variable) + 0.1)
    wanted = outputs(model, x)
    assert np.abs(wanted - base).max() > 0.01
    with lora.disabled(model):
        np.testing.assert_array_equal(outputs(model, x), base)
    model.save_adapter(tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["modules_to_save"] == ["classifier"]
    model.save_to_preset(tmp_path / "it")
    again = ViTImageClassifier.from_preset(references / VIT, preprocessor=None)
    again.load_adapter(tmp_path / "adapter")
    for one in (again, ViTImageClassifier.from_preset(tmp_path / "it")):
        np.testing.assert_allclose(outputs(one, x), wanted, rtol=0, atol=1e-6)
        assert {v.path for v in one.trainable_weights if "logits" in v.path} == trained
