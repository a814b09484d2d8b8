"""A plan on a mesh: the arithmetic of the papers, and what eight devices really hold and send."""

import json
import math
import re
import runpy
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import pytest

from kmodels.distribution import distribute
from kmodels.layers import remat
from kmodels.lora import LoraSettings
from kmodels.models import GemmaCausalLM, Llama3CausalLM, Qwen3CausalLM, ViTImageClassifier
from kmodels.tools import cli
from kmodels.tools.plan import Plan, Setup
from kmodels.tools.plan.estimate import ACTIVATIONS, FROZEN, HEAD, OPTIMIZER, SCRATCH, TRAINED
from kmodels.training import AdamW

ROOT = Path(__file__).resolve().parents[3]
GIB = 2**30


def exchanges(plan):
    """(axis, kind, what) -> S."""
    return {(one.axis, one.kind, one.what): one.size for one in plan.exchanges}


def sent(plan, axis):
    return sum(one.bytes for one in plan.exchanges if one.axis == axis)


# Gemma 7B: 28 blocks of width 3072, 16 heads of 256, an MLP of 24576, 256,000 words (2403.08295).
KERNELS = 28 * (4 * 3072 * 4096 + 3 * 3072 * 24_576) + 256_000 * 3072
NORMS = (2 * 28 + 1) * 3072


@pytest.mark.nightly("jax", "tensorflow")
def test_each_axis_divides_what_the_papers_say(backend):
    """Rajbhandari et al. 2020, figure 1: weights, gradients and slots in parts."""
    full = Setup(8, 16, accelerator=True)
    one, data, fsdp, model = (
        Plan("gemma_7b_en", full, mesh=mesh) for mesh in ("data=1", "data=8", "fsdp=8", "model=8")
    )
    assert one.estimate.part(TRAINED) == 4 * (KERNELS + NORMS)
    assert data.estimate.part(TRAINED) == one.estimate.part(TRAINED)
    for cut in (fsdp, model):
        assert cut.estimate.part(TRAINED) == 4 * (KERNELS / 8 + NORMS)
        assert cut.estimate.part(OPTIMIZER) == 2 * cut.estimate.part(TRAINED)
        assert cut.parameters(TRAINED) == KERNELS + NORMS
    # A ring sends 7/8 of what it gathers or reduces in parts, and an all-reduce twice that.
    assert not one.exchanges and sent(data, "data") == 2 * 4 * (KERNELS + NORMS) * 7 // 8
    found = exchanges(fsdp)
    assert found["fsdp", "reduce-scatter", "gradients"] == 4 * KERNELS
    assert found["fsdp", "all-reduce", "gradients of unsharded weights"] == 4 * NORMS
    # FSDP2 lets the table go between the tokens and the logits, XLA keeps it.
    table = 4 * 256_000 * 3072 if backend == "torch" else 0
    assert found["fsdp", "all-gather", "weights, forward"] == 4 * KERNELS + table
    # Shoeybi et al. 2019, figure 4: two sums a block forward and two backward, of all tokens.
    hidden, found = 4 * 8 * 16 * 3072, exchanges(model)
    assert found["model", "all-reduce", "hidden states, forward"] == 2 * 28 * hidden
    assert found["model", "all-reduce", "hidden states, backward"] == 2 * 28 * hidden
    assert found["model", "all-reduce", "embeddings of the tokens"] == hidden
    assert {axis for axis, *_ in found} == {"model"}


@pytest.mark.nightly("jax", "tensorflow")
def test_precision_lora_and_remat_count(backend):
    def planned(mesh, **changes):
        return Plan("gemma_7b_en", Setup(8, 64, accelerator=True, **changes), mesh=mesh)

    lora = planned("fsdp=8", precision="mixed_bfloat16", lora=LoraSettings(4), remat="block")
    found = exchanges(lora)
    # Weights travel in the compute dtype, and the frozen ones have no gradients to reduce.
    adapters = 28 * 2 * 4 * (3072 + 4096)
    table = 2 * 256_000 * 3072
    gathered = 2 * (KERNELS + adapters)
    twice = table if backend == "torch" else 0
    assert found["fsdp", "all-gather", "weights, forward"] == gathered + twice
    # The table is frozen: the loss has its gradient at once, and asks for it no third time.
    assert found["fsdp", "all-gather", "weights, backward"] >= gathered - table - 2 * adapters
    assert found["fsdp", "reduce-scatter", "gradients"] == 4 * adapters
    assert sent(planned("data=8", lora=LoraSettings(4)), "data") == 2 * 4 * adapters * 7 // 8
    # With rematerialisation a device has two blocks and no more, of the 28.
    blocks = [h.size for h in lora.estimate.arrays if h.name == "weights of two blocks"]
    assert blocks[0] < 2 * KERNELS / 4
    # On a model axis the blocks' first sums are done again.
    plain, again = (planned("model=8", remat=mode) for mode in ("none", "block"))
    forward = ("model", "all-reduce", "hidden states, forward")
    assert 2 * exchanges(again)[forward] == 3 * exchanges(plain)[forward]
    # No device holds the logits of more than its rows, nor of more than its words.
    for one, parts in ((planned("fsdp=8"), 8), (planned("model=8"), 8)):
        assert one.estimate.part(HEAD) <= 2 * 4 * 8 * 64 * 256_000 / parts


@pytest.mark.once
def test_an_axis_that_does_not_divide_leaves_a_weight_whole():
    """Gemma 2B has one key/value head of 256 outputs, which two devices do not part."""
    whole, cut = (Plan("gemma_2b_en", Setup(2, 16), mesh=mesh) for mesh in ("data=1", "model=2"))
    keys_and_values, norms = 18 * 2 * 2048 * 256, (2 * 18 + 1) * 2048
    everything = whole.estimate.count(TRAINED)
    assert cut.estimate.count(TRAINED) == (everything + keys_and_values + norms) / 2
    name = ("model", "all-reduce", "gradients of keys and values that are whole")
    assert exchanges(cut)[name] == 18 * 2 * 2 * 16 * 256 * 4


def test_27_billion_weights_on_512_devices_take_seconds_and_no_memory():
    def resident():
        text = Path("/proc/self/status").read_text()
        return int(text.split("VmRSS:")[1].split()[0]) * 1024

    before = resident()
    setup = Setup(64, 4096, "mixed_bfloat16", remat="block", accelerator=True)
    found = Plan("gemma2_27b_en", setup, mesh="data=8,fsdp=8,model=8")
    assert resident() - before < GIB / 4
    held = sum(found.estimate.part(part) for part in (FROZEN, TRAINED, OPTIMIZER))
    assert 12 * 27.2e9 / 64 < held < 12.2 * 27.3e9 / 64
    assert {one.axis for one in found.exchanges} == {"data", "fsdp", "model", "data+fsdp"}


TABLES = ("query", "token_embedding", "reverse_embeddings")
MEASURED = [
    ("gemma_debug", "fsdp=8", Setup(8, 16)),
    ("gemma3_debug", "data=2,fsdp=2,model=2", Setup(8, 16, lora=LoraSettings(2, dora=True))),
    ("gemma2_debug", "fsdp=2,model=4", Setup(8, 16, "bfloat16", LoraSettings(4), "int4")),
    ("gemma3_debug", "data=2,model=4", Setup(8, 16, lora=LoraSettings(4), quantize="int8")),
    ("gemma3_debug", "fsdp=2,model=2", Setup(8, 16, lora=LoraSettings(4), quantize="nf4")),
    ("llama3_debug", "fsdp=2,model=2", Setup(8, 16, lora=LoraSettings(2, dora=True))),
    ("vit_debug", "data=2,fsdp=4", Setup(8, precision="mixed_bfloat16")),
    (
        *("qwen3_debug", "data=2,fsdp=2,model=2"),
        Setup(8, 16, lora=LoraSettings(2, targets=TABLES, dora=True)),
    ),
]


def real(name, setup):
    tasks = {"gemma": GemmaCausalLM, "llama": Llama3CausalLM, "qwen3": Qwen3CausalLM}
    cls = tasks.get(name[:5], ViTImageClassifier)
    model = cls.from_preset(name, dtype=setup.precision)
    if setup.quantize:
        model.quantize(setup.quantize)
    if (lora := setup.lora) is not None:
        model.enable_lora(lora.rank, targets=lora.targets, dora=lora.dora)
    remat.rematerialize(model.backbone, setup.remat)
    return model


def on_first_device(variables):
    """Bytes on one of the devices, which all of them lie on."""
    return sum(v.value.addressable_shards[0].data.nbytes for v in variables)


@pytest.mark.parametrize(("name", "mesh", "setup"), MEASURED)
def test_weights_and_slots_are_what_a_device_holds(backend, name, mesh, setup):
    if backend != "jax":
        return
    found = Plan(name, setup, mesh=mesh).estimate
    distribute(mesh)
    model = real(name, setup)
    frozen = [v for v in model.non_trainable_weights if "seed" not in v.path]
    optimizer = AdamW(1e-3)
    optimizer.build(model.trainable_weights)
    slots = [v for v in optimizer.variables if len(v.shape) and v.path.startswith("adamw/")]
    assert found.part(TRAINED) == on_first_device(model.trainable_weights)
    assert found.part(FROZEN) == on_first_device(frozen)
    assert found.part(OPTIMIZER) == on_first_device(slots)


def program(name, mesh, setup):
    from compiled_step_jax import compiled_step

    distribute(mesh)
    model = real(name, setup)
    model.compile(AdamW(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    if name.startswith("gemma"):
        ids = np.ones((setup.batch_size, setup.sequence_length), "int32")
        batch = ({"token_ids": ids, "padding_mask": np.ones_like(ids)}, ids)
    else:
        shape = (setup.batch_size, *model.backbone.config.image_shape)
        batch = (np.ones(shape, "float32"), np.zeros(setup.batch_size, "int32"))
    return compiled_step(model, batch)


WIDTHS = {"f32": 4, "bf16": 2, "s32": 4, "pred": 1}


def collected(text):
    """Bytes that each kind of collective of a program works on."""
    found = Counter()
    pattern = r" = (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all)(?:-start)?\("
    for shapes, kind in re.findall(pattern, text):
        for dtype, shape in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", shapes):
            size = math.prod(int(length) for length in shape.split(",") if length)
            found[kind] += size * WIDTHS[dtype]
    return found


def test_gathers_and_sums_of_fsdp_are_those_of_the_compiled_step(backend):
    if backend != "jax":
        return
    setup = Setup(8, remat="block")
    found = exchanges(Plan("vit_micro_patch2_8", setup, mesh="fsdp=8"))
    sent = collected(program("vit_micro_patch2_8", "fsdp=8", setup).as_text())
    gathered = sum(size for (_, kind, _), size in found.items() if kind == "all-gather")
    assert found["fsdp", "all-gather", "weights, backward"] > gathered / 3
    assert sent["all-gather"] == pytest.approx(gathered, rel=0.01)
    # On a CPU XLA sums whole gradients, and each device takes its part of them.
    summed = found["fsdp", "reduce-scatter", "gradients"]
    summed += found["fsdp", "all-reduce", "gradients of unsharded weights"]
    assert sent["all-reduce"] == pytest.approx(summed, rel=0.01)


def test_sums_and_memory_of_a_model_axis_are_those_of_the_compiled_step(backend):
    if backend != "jax":
        return
    mesh, setup = "data=4,model=2", Setup(8, 16, lora=LoraSettings(4))
    plan = Plan("gemma3_debug", setup, mesh=mesh)
    compiled = program("gemma3_debug", mesh, setup)
    found = exchanges(plan)
    assert {kind for _, kind, _ in found} == {"all-reduce"}
    # Of two blocks three sums: nothing below the first asks for its attention's gradient. On a CPU
    # XLA sums what query, key and value pass back each alone, and so with gate and up.
    once = found["model", "all-reduce", "hidden states, backward"] / 3
    summed = sum(found.values()) + once * ((3 + 2 + 2) - 3)
    sent = collected(compiled.as_text())
    assert sent["all-reduce"] == pytest.approx(summed, rel=0.01) and len(sent) == 1
    memory, parts = compiled.memory_analysis(), plan.estimate.parts
    assert memory is not None
    batch = 2 * setup.batch_size * setup.sequence_length * 4 / 4
    held = parts[FROZEN] + parts[TRAINED] + parts[OPTIMIZER] + batch
    assert memory.argument_size_in_bytes == pytest.approx(held, rel=0.05)
    moving = sum(parts[name] for name in (ACTIVATIONS, HEAD, SCRATCH))
    assert 0.5 < moving / memory.temp_size_in_bytes < 2.0


@pytest.mark.once
def test_the_command(capsys):
    arguments = "--preset gemma_2b_en --mesh data=2,fsdp=4 --batch-size 16 --sequence-length 64"
    with pytest.raises(SystemExit) as done:
        cli.main(["plan", *arguments.split(), "--json"])
    assert done.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"data": 2, "fsdp": 4, "sequence": 1, "model": 1}
    assert set(found["sent_bytes"]["fsdp"]) == {"all-gather", "reduce-scatter"}
    assert all(one["source"] and one["formula"] for one in found["exchanges"])
    with pytest.raises(SystemExit):
        cli.main(["plan", *arguments.split(), "--full", "--memory", "80GiB"])
    shown = capsys.readouterr().out
    assert "on data=2,fsdp=4, each device" in shown and "it fits" in shown
    assert "2 (n-1)/n S" in shown and "Rajbhandari et al. 2020" in shown and "gathered" in shown


@pytest.mark.once
def test_the_page_quotes_the_results():
    scaling = runpy.run_path(str(ROOT / "benchmarks" / "scaling.py"))
    text = scaling["PAGE"].read_text()
    assert scaling["page"](text) == text
    assert text.count("| devices | mesh |") == 2 * len(scaling["CASES"])


def test_the_results_are_what_is_planned_now(backend):
    results = sorted((ROOT / "benchmarks" / "results").glob(f"scaling_{backend}_*.json"))
    for path in results[-1:]:
        rows = json.loads(path.read_text())["rows"]
        old = next(row for row in rows if row["mesh"] == "data=8,fsdp=64")
        setup = Setup(512, 4096, "mixed_bfloat16", remat="block", accelerator=True)
        new = Plan(old["preset"], setup, mesh=old["mesh"])
        assert new.bytes == old["peak_bytes"]
        assert sent(new, "fsdp") == old["sent_bytes"]["fsdp"]
