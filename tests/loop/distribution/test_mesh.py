"""The mesh: its text, its errors, and which axis cuts which dimension."""

import logging
import re

import keras
import pytest
import small_models

from kmodels import models
from kmodels.core.errors import InputError
from kmodels.distribution import Mesh, check_batch, distribute, layout, parse_mesh, register
from kmodels.distribution.mesh import fill
from kmodels.layers.placement import granularity_of
from kmodels.models.blocks.sharding import DECODER
from kmodels.models.vit.model import LAYOUT
from refusals import refused

# No test here needs devices; what TensorFlow refuses is in test_replicas_tensorflow.py.
pytestmark = pytest.mark.once
FSDP, BOTH = Mesh(fsdp=4), Mesh(fsdp=2, model=2)


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    monkeypatch.setattr(layout, "_said", set())
    monkeypatch.setattr(layout, "_RULES", dict(layout._RULES))


def test_parse():
    assert parse_mesh("data=4,model=2") == Mesh(data=4, model=2)
    assert parse_mesh(" model = 2 ") == Mesh(model=2)
    assert str(parse_mesh("model=2, fsdp=3")) == "fsdp=3,model=2"
    assert str(parse_mesh("data=1")) == "data=1"
    assert (Mesh(2, 3, 4).size, Mesh(2, 3, 4).replicas) == (24, 6)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rows=2", "axis 'rows' is unknown; write data, fsdp, sequence and model"),
        ("data=2,data=2", "named twice"),
        ("data=zero", "length 'zero'; give a whole number"),
        ("data=0", "length '0'"),
        ("data=-2", "length '-2'"),
        ("data", "length ''"),
        ("data=-1,fsdp=-1", "has -1 twice"),
        ("", "the mesh is empty"),
        ("data=" + "9" * 5000, "give a whole number"),
        (3, "the mesh is 3; give a text, such as 'data=4,model=2'"),
        ({"data": 2}, "the mesh is {'data': 2}; give a text"),
    ],
)
def test_wrong_spec(spec, message):
    refused(message, parse_mesh, spec)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ("WORLD_SIZE=2", "WORLD_SIZE is 2, and torch joins no processes by it"),
        ("KERAS_DISTRIBUTION_NUM_PROCESSES=3", "NUM_PROCESSES is 3, and torch joins no processes"),
        ("SLURM_STEP_NUM_TASKS=4", "SLURM_STEP_NUM_TASKS is 4, and torch joins no processes by"),
        ("WORLD_SIZE=x", "WORLD_SIZE is 'x'; give a whole number"),
        ("RANK=0", "RANK is set and WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not"),
        ("RANK=2 WORLD_SIZE=2", "RANK is 2 and WORLD_SIZE 2; ranks are 0 to WORLD_SIZE - 1"),
        ("RANK=-1 WORLD_SIZE=2", "RANK is '-1'; give a whole number"),
        ("RANK=0 WORLD_SIZE=0", "RANK is 0 and WORLD_SIZE 0"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=a", "LOCAL_RANK is 'a'; give a whole number"),
    ],
)
def test_variables_of_launchers_that_do_not_fit_together(variables, message, monkeypatch):
    stated = dict(part.split("=") for part in variables.split())
    if len(stated) > 1:
        stated |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in stated.items():
        monkeypatch.setenv(name, value)
    refused(message, distribute, "data=-1")


@pytest.mark.parametrize("length", [0, -2, 2.0, "2", True, None])
def test_wrong_lengths(length):
    refused("mesh axis fsdp is", Mesh, fsdp=length)
    refused("batch size is", check_batch, "data=2", length)


def test_rows_by_tokens_are_refused_where_they_cannot_be_cut():
    """Before devices are counted: more of them would not help."""
    refused(r"sequence=2 cuts .* not supported on torch: ", distribute, "sequence=2")


def test_what_is_left_of_the_devices():
    assert fill(parse_mesh("data=-1"), 8, "") == Mesh(data=8)
    assert fill(parse_mesh("model=2,fsdp=-1"), 8, "") == Mesh(fsdp=4, model=2)
    assert fill(parse_mesh("data=2"), 8, "") == Mesh(data=2)
    with pytest.raises(InputError, match="no whole fsdp axis of 8 devices, which 3 does not"):
        fill(parse_mesh("data=3,fsdp=-1"), 8, "")
    for spec in ("data=4,model=4", "data=16,fsdp=-1"):
        with pytest.raises(InputError, match=r"needs 16 devices and there are 8; .* or buy 16"):
            fill(parse_mesh(spec), 8, "buy {}")


def test_the_batch_must_divide():
    check_batch("data=4,model=2", 8)
    check_batch("data=-1,fsdp=4", 8)
    refused("batch of 10; the nearest batches that work are 8 and 12", check_batch, "data=4", 10)
    refused(r"data=2,fsdp=4, 8 parts in all, .* of 12", check_batch, "data=2,fsdp=4,model=3", 12)


@pytest.fixture(scope="module")
def debug_models():
    """A ViT, a Llama and each generation of Gemma, with adapters on every matrix."""
    made = [models.ViTImageClassifier.from_preset("vit_debug", num_classes=10)]
    for name in ("gemma_debug", "gemma2_debug", "gemma3_debug", "gemma4_debug", "gemma4_moe_debug"):
        made.append(models.GemmaCausalLM.from_preset(name))
    made.append(models.Llama3CausalLM.from_preset("llama3_debug"))
    for model in made:
        model.enable_lora(2, targets="all-linear", dora=True)
    untied = models.GemmaCausalLM.from_preset("gemma2_debug", tie_word_embeddings=False)
    untied.enable_lora(2, targets=["token_embedding", "reverse_embeddings"])
    return [*made, untied]


def test_the_families_agree_and_name_every_matrix(debug_models):
    tables = (LAYOUT, DECODER)
    for variable in (v for model in debug_models for v in model.variables):
        rank = len(variable.shape)
        words = {w for t in tables for p, w in t.items() if re.fullmatch(p, variable.path)}
        assert len(words) <= 1, (variable.path, words)
        assert all(len(word) == rank for word in words), variable.path
        assert words or rank < 2 or variable.path.startswith("logits/lora"), variable.path


def test_each_matrix_is_cut_in_both_axes(debug_models):
    for variable in (v for model in debug_models for v in model.variables):
        if variable.path.endswith("kernel") and "block_" in variable.path:
            assert set(layout.axes_of(variable, FSDP)) == {"fsdp", None}, variable.path
            cut = {"fsdp", "model"}
            router = "/router/" in variable.path  # small, and each device needs all of its result
            if router or granularity_of(variable) == (None, 1):
                cut = {"fsdp", None}
            beside = {None} if len(variable.shape) == 3 else set()  # all of an expert
            assert set(layout.axes_of(variable, BOTH)) == cut | beside, variable.path


def test_an_axis_that_does_not_divide_is_dropped_and_said_once(caplog):
    caplog.set_level(logging.WARNING)
    for index in range(3):
        path = f"block_{index}/mlp/up/kernel"
        assert layout.axes(path, (8, 6), Mesh(model=4)) == (None, None)
        assert layout.axes(path, (8, 6), Mesh(fsdp=3)) == (None, "fsdp")
    assert [record.getMessage() for record in caplog.records] == [
        "mesh axis model=4 leaves up whole: it does not divide 6",
        "mesh axis fsdp=3 leaves up whole: it does not divide 8",
    ]


def test_heads_stay_together(caplog):
    """Gemma 2B: one key/value head of 256 columns, which 2 divides and must not cut."""
    caplog.set_level(logging.WARNING)
    backbone = small_models.gemma(num_query_heads=8, head_dim=4).backbone
    found = {v.path: v for v in backbone.variables}
    for name, cut in (
        ("query", ("fsdp", "model")),
        ("key", ("fsdp", None)),
        ("value", ("fsdp", None)),
        ("output", ("model", "fsdp")),
    ):
        variable = found[f"block_0/attention/{name}/kernel"]
        assert layout.axes_of(variable, BOTH) == cut, name
    assert layout.axes_of(found["block_0/attention/query/kernel"], Mesh(model=16)) == (None, None)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "mesh axis model=2 leaves key whole: it does not divide 1 part of 4"
    assert said[-1] == "mesh axis model=16 leaves query whole: it does not divide 8 parts of 32"


def test_a_model_without_rules_is_cut_along_its_largest_dimension():
    assert layout.axes("conv/kernel", (3, 3, 8, 32), FSDP) == (None, None, None, "fsdp")
    assert layout.axes("mine/kernel", (64, 30), FSDP) == ("fsdp", None)
    assert layout.axes("mine/kernel", (64, 30), BOTH) == ("fsdp", None)
    assert layout.axes("mine/kernel", (7, 9), FSDP) == (None, None)
    assert layout.axes("mine/bias", (64,), FSDP) == (None,)


def test_rules_of_ones_own():
    register({r".*/expert/kernel": (None, "embed", "mlp"), r"mlp/up/kernel": ("model", None)})
    assert layout.axes("a/expert/kernel", (4, 8, 8), BOTH) == (None, "fsdp", "model")
    # The rule that came last counts; `fsdp` takes what it leaves.
    assert layout.axes("mlp/up/kernel", (8, 8), BOTH) == ("model", "fsdp")
    refused("rule 'x' names 'width'; write embed, heads, mlp, vocab", register, {"x": ("width",)})


def test_a_familys_table_is_about_its_own_models(monkeypatch):
    monkeypatch.setattr(layout, "_FAMILIES", dict(layout._FAMILIES))
    before = {v.path: layout.axes_of(v, BOTH) for v in _families()}
    # A family that calls its parts as Gemma does, and has them lie another way.
    paths = r"(?:.*/)?(?:attention|mlp)/.*/kernel"
    register({paths: (None, "embed"), r".*embeddings": (None, None)}, family="third")
    found = _families()
    assert {v.layout_family for v in found} == {"clip", "gemma", "llama3", "qwen3", "vit"}
    assert {v.path: layout.axes_of(v, BOTH) for v in found} == before
    path = "block_0/attention/query/kernel"
    assert layout.axes(path, (8, 8), BOTH, family="third") == (None, "fsdp")
    assert layout.axes(path, (8, 8), BOTH, family="gemma") == ("fsdp", "model")
    # Rules for all models count before those of a family.
    register({r"block_0/attention/query/kernel": ("model", "fsdp")})
    assert layout.axes(path, (8, 8), BOTH, family="gemma") == ("model", "fsdp")


def _families():
    """Variables of every family, of adapters and of kernels in few bits too."""
    gemma = models.GemmaCausalLM.from_preset("gemma_debug")
    gemma.backbone.enable_lora(rank=2)
    llama3 = models.Llama3CausalLM.from_preset("llama3_debug")
    qwen3 = models.Qwen3CausalLM.from_preset("qwen3_debug")
    qwen3.quantize("int8")
    vit = models.ViTImageClassifier.from_preset("vit_debug", num_classes=3)
    clip = models.CLIPTextModelWithProjection.from_preset("clip_text_debug")
    clip.enable_lora(rank=2)
    embedder = models.GemmaTextEmbedder.from_preset("embedding_gemma_debug")
    embedder.enable_lora(rank=2, targets="all-linear")
    found = (clip, embedder, gemma, llama3, qwen3, vit)
    return [v for model in found for v in model.variables if "seed" not in v.path]


def test_slots_and_small_variables_stay_whole_where_no_rule_says_otherwise():
    metric = keras.metrics.Mean()
    assert {layout.axes_of(variable, FSDP) for variable in metric.variables} == {()}
