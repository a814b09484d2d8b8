"""What a step will need: equal to the real model's weights, near to what a process really takes."""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import keras
import pytest

from command_line import run
from kmodels.lora import LoraSettings
from kmodels.models import GemmaCausalLM, Qwen3CausalLM, ViTImageClassifier
from kmodels.runs import settings as flags
from kmodels.tools import plan
from kmodels.tools.plan import estimate
from kmodels.tools.plan.estimate import (
    ACTIVATIONS,
    FROZEN,
    GRADIENTS,
    HEAD,
    OPTIMIZER,
    TRAINED,
    Setup,
    width_of,
)
from kmodels.training import AdamW
from python_process import run_python
from recipe_modules import load
from refusals import refused

ROOT = Path(__file__).resolve().parents[2]
ANYWAY = "--ignore-memory-check"
GIB = 2**30
TABLES = ("query", "token_embedding", "reverse_embeddings")


def made(name, setup):
    """The real model, as a run makes it."""
    tasks = {"gemma": GemmaCausalLM, "qwen3": Qwen3CausalLM}
    cls = tasks.get(name[:5], ViTImageClassifier)
    model = cls.from_preset(name, dtype=setup.precision)
    if setup.quantize:
        model.quantize(setup.quantize)
    if (lora := setup.lora) is not None:
        model.enable_lora(lora.rank, targets=lora.targets, dora=lora.dora)
    return model


def weight(variables):
    return sum(math.prod(v.shape) * width_of(v.dtype) for v in variables)


@pytest.mark.parametrize(
    ("name", "setup"),
    [
        ("gemma_debug", Setup(2, 16)),
        ("gemma3_debug", Setup(2, 16, "bfloat16", LoraSettings(4), "int8")),
        ("gemma2_debug", Setup(2, 16, lora=LoraSettings(2, targets="all-linear"), quantize="int4")),
        ("gemma3_debug", Setup(2, 16, "bfloat16", LoraSettings(4), "nf4")),
        ("gemma3_debug", Setup(2, 16, "mixed_bfloat16", LoraSettings(3, dora=True))),
        ("gemma4_debug", Setup(2, 16)),
        ("vit_debug", Setup(2, precision="mixed_bfloat16", lora=LoraSettings(2))),
        ("vit_micro_patch2_8", Setup(2)),
        ("qwen3_debug", Setup(2, 16, lora=LoraSettings(3, targets=TABLES, dora=True))),
    ],
)
def test_weights_and_slots_are_those_of_the_real_model(name, setup):
    found = plan.Plan(name, setup).estimate
    model = made(name, setup)
    trained, frozen = model.trainable_weights, model.non_trainable_weights
    seeds = [v for v in frozen if "seed" in v.path]
    assert found.count(TRAINED) == sum(math.prod(v.shape) for v in trained)
    assert found.part(TRAINED) == weight(trained)
    assert found.part(FROZEN) == weight(frozen) - weight(seeds)
    assert {h.name for h in found.arrays if h.part in (TRAINED, FROZEN)} == {
        v.path for v in (*trained, *frozen) if v not in seeds
    }
    optimizer = AdamW(1e-3)
    optimizer.build(trained)
    slots = [v for v in optimizer.variables if len(v.shape) and v.path.startswith("adamw/")]
    assert found.part(OPTIMIZER) == weight(slots) == 2 * found.part(GRADIENTS)


def test_nothing_is_allocated():
    before = resident()
    found = plan.Plan("gemma3_27b_text", Setup(1, 4096, "bfloat16", LoraSettings(8)))
    assert found.estimate.part(FROZEN) > 50 * GIB
    assert resident() - before < GIB / 4
    # Keras gives waiting variables their values at the end of the next block of this kind.
    with keras.StatelessScope():
        pass
    assert resident() - before < GIB / 4


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_parts_follow_the_setup(monkeypatch):
    setup = Setup(4, 64, lora=LoraSettings(4))
    base = plan.Plan("gemma3_debug", setup).estimate

    def changed(**changes):
        return plan.Plan("gemma3_debug", replace(setup, **changes)).estimate

    doubled = changed(batch_size=8)
    assert doubled.part(ACTIVATIONS) == 2 * base.part(ACTIVATIONS)
    assert doubled.part(FROZEN) == base.part(FROZEN)
    assert changed(precision="bfloat16").part(FROZEN) * 2 == base.part(FROZEN)
    assert changed(optimizer="sgd").part(OPTIMIZER) == 0
    assert changed(accumulate=2, ema=True).part(OPTIMIZER) == 2 * base.part(OPTIMIZER)
    assert list(base.blocks)[:2] == ["block_0", "block_1"]
    # No adapter below the second block: the first keeps nothing.
    late = changed(lora=LoraSettings(4, targets="block_1/attention/query"))
    assert "block_0" not in late.blocks and late.blocks["block_1"] <= base.blocks["block_1"]
    lean = replace(estimate.facts(), remat=True)
    monkeypatch.setattr(estimate, "facts", lambda accelerator: lean)
    block, *parts = (changed(remat=mode) for mode in ("block", "attention", "mlp"))
    for part in parts:
        assert block.part(ACTIVATIONS) < part.part(ACTIVATIONS) < base.part(ACTIVATIONS)
    kept = {held.name for held in block.arrays if held.part == ACTIVATIONS}
    assert {name for name in kept if "head" not in name} == {"block_0/input", "block_1/input"}
    # The head holds tiles, never positions times vocabulary, for the loss that compile chooses.
    large = plan.Plan("gemma3_270m", Setup(4, 512)).estimate
    assert large.part(HEAD) < 4 * 512 * 262_144


def test_adapters_of_tables_are_planned():
    def planned(*targets):
        return plan.Plan(
            "qwen3_debug", Setup(2, 16, lora=LoraSettings(3, targets=targets))
        ).estimate

    plain, head = planned("block_1/mlp/down"), planned("block_1/mlp/down", "reverse_embeddings")
    # The table and its gradient, with the rank appended.
    assert head.part(HEAD) - plain.part(HEAD) == 2 * 320 * (32 + 3) * 4
    assert "block_0" not in plain.blocks and "block_0" not in head.blocks
    rows = planned("block_1/mlp/down", "token_embedding")
    assert rows.part(HEAD) == plain.part(HEAD)
    assert "block_0" in rows.blocks


def test_what_lowers_the_peak_is_told_with_its_worth():
    found = plan.Plan("vit_base_patch16_224", Setup(8), available=GIB)
    assert found.fits is False
    savings = {saving.flag: saving.bytes for saving in found.savings()}
    less = plan.Plan("vit_base_patch16_224", Setup(4), available=GIB)
    assert savings["--batch-size 4"] == found.bytes - less.bytes > 0
    assert list(savings.values()) == sorted(savings.values(), reverse=True)
    message, flags = (
        r"needs about \d.* GiB, and 1.0 GiB are available: ",
        ("--batch-size", "--precision"),
    )
    text = refused(message, plan.check, found, flags, ANYWAY)
    assert "--batch-size 4 saves " in text and "--ignore-memory-check continues" in text
    assert "--optimizer" not in text
    plan.check(plan.Plan("vit_debug", Setup(8)), (), ANYWAY)


@pytest.mark.parametrize(
    ("recipe", "preset", "setup", "gibibytes"),
    [
        ("vit", "vit_base_patch16_224", Setup(64), 3),
        ("vit", "vit_base_patch16_224", Setup(32, precision="mixed_bfloat16"), 2),
        ("gemma_lora", "gemma3_270m", Setup(8, 512, lora=LoraSettings(4)), 1),
        ("gemma_lora", "gemma3_270m", Setup(8, 512, lora=LoraSettings(4), remat="block"), 1),
    ],
)
def test_a_recipe_accepts_what_it_is_told(recipe, preset, setup, gibibytes):
    settings = load(recipe).Settings
    found = plan.Plan(preset, setup, available=int(gibibytes * GIB))
    text = refused("a step needs about", plan.check, found, settings, ANYWAY)
    told = re.findall(r"(--[a-z-]+ \S+) saves", text)
    assert told
    (together,) = re.findall(r"; (--[^;]+) would fit with ", text)
    for argv in (*(flag.split() for flag in told), together.split()):
        flags.parse(settings, argv)
    # The set that is proposed does fit.
    changed = flags.parse(settings, together.split())
    names = {part.removeprefix("--").replace("-", "_") for part in together.split()[::2]}
    setup = replace(setup, **{name: getattr(changed, name) for name in names})
    assert plan.Plan(preset, setup, available=int(gibibytes * GIB)).fits


def test_nothing_is_proposed_that_does_not_help_enough():
    found = plan.Plan("vit_base_patch16_224", Setup(8), available=GIB // 64)
    settings = load("vit").Settings
    refused("no set of flags makes it fit, use a smaller", plan.check, found, settings, ANYWAY)
    refused("iB; use a smaller model; --ignore-memory-check", plan.check, found, (), ANYWAY)


def test_the_command(capsys):
    small = "--preset gemma3_270m --batch-size 4 --sequence-length 512 --precision bfloat16"
    lora = "--rank 4 --targets query,value --generate 600 --json"
    assert run("plan", *small.split(), *lora.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 268_098_176 + 184_320
    # keys and values, 4 rows, one head of 256, two bytes; 15 layers have a window of 512
    assert found["cache_bytes"] == 2 * 4 * (15 * 512 + 3 * 600) * 256 * 2
    # Each device has all rows, and a part of the heads if they divide.
    words = ("--preset", "llama3_debug", "--generate", "40", "--json", "--mesh")
    for mesh, share in (("data=2", 1), ("model=2", 2), ("model=4", 1)):
        assert run("plan", *words, mesh) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["cache_bytes"] * share == 8 * 40 * 2 * 2 * 16 * 4
    run("plan", "--preset", "vit_debug", "--image-size", "32", "--memory", "1GiB")
    shown = capsys.readouterr().out
    assert "trained weights" in shown and "it fits" in shown and "1.0 GiB" in shown


MESHES = {
    "fsdp=3": "fsdp=3 does not divide the batch of 8; the nearest batches that work are 6",
    "data=-1": "the mesh data=-1 has a length of -1; a plan needs all lengths",
    "data=2,sequence=4": "the mesh data=2,sequence=4 has a sequence axis; plans do not support it, "
    "leave it out",
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gemma3_270", "'gemma3_270' is neither a preset nor a directory; did you mean gemma3"),
        ("gemma3_debug --targets keys", "LoRA target 'keys' is not a linear layer"),
        ("gemma3_debug --rank 0", "LoRA rank is 0"),
        ("gemma3_debug --remat all", "remat is 'all'; choose one of none, block, attention, mlp"),
        ("gemma3_debug --full --quantize int8", "quantize is 'int8' but all weights are"),
        ("gemma3_debug --quantize int2", "quantization mode is 'int2'"),
        ("gemma3_debug --optimizer x", "optimizer is 'x'; choose one of adamw"),
        ("gemma3_debug --batch-size 0", "batch size is 0; give at least 1"),
        ("gemma3_debug --sequence-length 1", "sequence_length is 1; give a whole"),
        ("gemma3_debug --image-size 32", "has no image input"),
        *(
            (f"gemma3_debug --memory {text}", f"'{text}' is not an amount of memory")
            for text in ("much", "infGiB", "nanGiB", "-3GiB", "0", "1e99GiB")
        ),
        ("gemma3_debug --full --rank 4", "--rank has no effect with --full; leave it out"),
        ("vit_debug --targets mlp/up", "--targets has no effect without --lora"),
        ("vit_debug --dora", "--dora has no effect without --lora"),
        ("vit_debug --sequence-length 9", "--sequence-length has no effect on images"),
        ("siglip_debug --generate 9", "--generate has no effect on siglip_debug, which writes no"),
        ("gemma3_debug --sequence-length 1000000000000", "out of memory"),
        ("gemma_debug --mesh rows=2", "mesh axis 'rows' is unknown"),
        *((f"gemma_debug --mesh {mesh}", message) for mesh, message in MESHES.items()),
    ],
)
def test_wrong_settings_are_one_line(capsys, arguments, message):
    assert run("plan", "--preset", *arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


@pytest.mark.each_backend("nightly")
def test_a_process_takes_about_what_was_foretold(backend):
    script = ROOT / "benchmarks" / "memory_plan.py"
    done = run_python(script, "--backends", backend, "--cases", "small", XLA_FLAGS="")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0.5 < found["ratio"] < 2.0, found
