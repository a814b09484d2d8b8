"""Whole steps with tensors on CUDA that have no numbers; `test_fake_cuda.py` starts these tests.

torch knows of each kernel on which devices its arguments may lie and when it needs numbers, so a
tensor that was left on the CPU raises, and so does a read of the device. The kernels are those of
CUDA: their choice is asserted. `make accelerator` asks a device itself.
"""

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest

import kmodels
from fake_steps import batch_of
from kmodels import layers, models, registry, training
from public_models import CASES

if keras.backend.backend() != "torch" or not os.environ.get("KMODELS_FAKE_CUDA"):
    pytest.skip("test_fake_cuda.py runs them on torch", allow_module_level=True)

import torch
import torch.distributed as collectives
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from kmodels.core import keras_internals, runtime_torch
from kmodels.distribution.engines import ddp_torch, fsdp_torch
from kmodels.generation import loop_torch
from kmodels.generation.cache import Passes
from kmodels.layers.quantized import Quantization
from kmodels.training import optimizers_torch, set_criterion_torch
from pretended_cuda_torch import (
    WaitsForDevice,
    fake_cuda,
    know_batches,
    know_seeds,
    on_device,
    outlined,
    two_processes,
    without_copies,
)
from refusals import refused

BF16 = "mixed_bfloat16"
OLDER_THAN_2_12 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)


@pytest.fixture
def kernels(monkeypatch) -> Iterator[set[str]]:
    """Stands for a GPU; the kernels of attention that were chosen."""
    with fake_cuda(monkeypatch) as chosen:
        yield chosen


def paths() -> tuple[set[str], dict[str, set[str]]]:
    """The ops that took their override since the reset, and the reasons of the others by op."""
    counts = {op: {r for r, n in found.items() if n} for op, found in kmodels.decisions().items()}
    declined = {op: found - {"override"} for op, found in counts.items()}
    overrides = {op for op, found in counts.items() if "override" in found}
    return overrides, {op: found for op, found in declined.items() if found}


def steps(model: Any, batch: Any, begun: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The logs of the last training step; the first one makes what stays, then `begun` is called.

    With accumulated gradients, both an update and a step before one come after it.
    """
    model.make_train_function()
    model.train()
    model.train_function([batch])
    begun()
    with without_copies():
        for _ in range(model.optimizer.accumulate):
            logs = model.train_function([batch])
    return logs


PATCHES = {"patch_embedding": "generic"}  # torch has no override
# Numbers in a table have a body of their own.
WIDE = {
    "int8": {"quantized_dense": "numbers of int8 are in no table"},
    "int4": {"quantized_dense": "numbers of int4 are in no table"},
    "nf4": {},
    "fp8": {},
}
TURNED = {"rotary_embedding_2d": "only halves turn as those of a row do"}
TOWER = "attention dense layer_norm mlp"
TEXT = "attention dense gated_gelu rms_norm rotary_embedding"
DECODER = f"{TEXT} linear_cross_entropy"
SILU = DECODER.replace("gelu", "silu")


@dataclass
class Step:
    """A training step, and the paths that its ops take on CUDA.

    Args:
        make: returns the model.
        overrides: ops that take their override in some call.
        kernels: kernels of attention.
        declined: reasons of the overrides that decline a call, by op.
        change: changes the model before it is compiled.
        settings: arguments of `compile`.
        packed: whether a row holds several texts.
        rule: arguments of AdamW, or with "momentum" of SGD.
        rows: of the batch.
    """

    make: Callable[[], Any]
    overrides: str
    kernels: str = "sdpa"
    declined: Mapping[str, str] = field(default_factory=dict)
    change: Callable[[Any], Any] = lambda model: None
    settings: Mapping[str, Any] = field(default_factory=dict)
    packed: bool = False
    rule: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 2


def preset(name: str, cls: Any = models.GemmaCausalLM, dtype: str = BF16, **more: Any) -> Any:
    return lambda: cls.from_preset(name, dtype=dtype, preprocessor=None, **more)


def public(cls: Any) -> Any:
    return lambda: CASES[cls][0](dtype=BF16)


def lora(model: Any) -> None:
    model.enable_lora(rank=4, dropout=0.1)


def qlora(mode: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for layer in keras_internals.sublayers(model.backbone):
            if hasattr(layer, "to_quantized"):
                layer.to_quantized(Quantization(mode))
        lora(model)

    return change


def vit(dtype: str = BF16, **more: Any) -> Any:
    return preset("vit_debug", models.ViTImageClassifier, dtype, num_classes=10, **more)


DROPS: dict[str, Any] = {
    "dropout_rate": 0.1, "attention_dropout": 0.1, "drop_path_rate": 0.1, "patch_drop_rate": 0.5,
}  # fmt: skip
LOSS = {
    "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "metrics": ["accuracy"],
}
TOWERS = models.ImageTextSimilarity
GEMMA4 = models.Gemma4ImageTextLM
STEPS = {
    "ViT": Step(vit(**DROPS), f"{TOWER} dropout", "sdpa", PATCHES, settings=LOSS),
    "ViT, float32": Step(vit("float32"), TOWER, "sdpa", PATCHES, settings=LOSS),
    "ViT, LoRA": Step(vit("bfloat16"), f"{TOWER} dropout", "sdpa", PATCHES, lora, LOSS),
    "ViT, accumulated": Step(
        *(vit(), TOWER, "sdpa", PATCHES), settings=LOSS, rule={"accumulate": 2, "ema": 0.99}
    ),
    "ViT, plain SGD": Step(vit(), TOWER, "sdpa", PATCHES, settings=LOSS, rule={"momentum": 0.9}),
    "NaFlex": Step(public(models.NaFlexViTImageClassifier), TOWER),
    "DeiT": Step(public(models.DeiTImageClassifier), TOWER, "", PATCHES),  # one query each
    "MAE": Step(public(models.ViTMAEForPreTraining), TOWER, "sdpa", PATCHES),
    "segmenter": Step(public(models.ViTImageSegmenter), TOWER, "sdpa", PATCHES),
    "EoMT": Step(public(models.EoMTImageSegmenter), TOWER, "sdpa", {**PATCHES, "gelu": "generic"}),
    "CLIP": Step(preset("clip_debug", TOWERS), TOWER, "sdpa", PATCHES),
    "SigLIP": Step(preset("siglip_debug", TOWERS), TOWER, "sdpa", PATCHES),
    "SigLIP, NaFlex": Step(preset("siglip_debug", TOWERS, naflex=True), TOWER),
    "CLIP text": Step(
        preset("clip_text_debug", models.CLIPTextModelWithProjection),
        TOWER,
        settings={"loss": "mse"},
    ),
    "Gemma": Step(preset("gemma_debug", dropout=0.1), f"{DECODER} dropout"),
    "Gemma, rematerialized": Step(
        preset("gemma_debug"), DECODER, change=lambda model: layers.rematerialize(model, "block")
    ),
    "Gemma 2": Step(preset("gemma2_debug"), f"{DECODER} dropout", "flex", change=lora),
    "Gemma 2, a packed row": Step(preset("gemma2_debug"), DECODER, "flex", packed=True, rows=1),
    "Gemma 3": Step(preset("gemma3_debug"), f"{DECODER} dropout", "sdpa varlen", change=lora),
    "Gemma 3, bfloat16": Step(preset("gemma3_debug", dtype="bfloat16"), DECODER, "sdpa varlen"),
    "Gemma 3, float32": Step(preset("gemma3_debug", dtype="float32"), DECODER),
    **{
        f"Gemma 3, {mode}": Step(
            preset("gemma3_debug"),
            f"{DECODER} dropout" + " quantized_dense" * (not WIDE[mode]),
            *("sdpa varlen", WIDE[mode], qlora(mode)),
        )
        for mode in WIDE
    },
    "Gemma 3, accumulated": Step(
        *(preset("gemma3_debug"), f"{DECODER} dropout", "sdpa varlen"),
        change=lora,
        rule={"accumulate": 3},
    ),
    "Gemma 3, packed": Step(
        preset("gemma3_debug"), f"{DECODER} dropout", "sdpa", change=lora, packed=True
    ),
    "Gemma 3 vision": Step(
        preset("gemma3_vision_debug", models.Gemma3ImageTextLM),
        *(f"{DECODER} dropout layer_norm mlp", "flex sdpa", PATCHES, lora),
    ),
    "Gemma 4": Step(preset("gemma4_debug"), f"{DECODER} dropout", "sdpa varlen", change=lora),
    "Gemma 4, experts": Step(preset("gemma4_moe_debug"), f"{DECODER} grouped_dense", "sdpa varlen"),
    "Gemma 4 vision": Step(
        preset("gemma4_vision_debug", GEMMA4), *(f"{DECODER} dropout", "sdpa varlen", TURNED, lora)
    ),
    "Gemma 4 unified": Step(
        preset("gemma4_unified_debug", GEMMA4), f"{DECODER} layer_norm", "flex sdpa"
    ),
    "Gemma 4 unified, a row": Step(
        *(preset("gemma4_unified_debug", GEMMA4), f"{DECODER} layer_norm", "flex sdpa"), rows=1
    ),
    "EmbeddingGemma": Step(preset("embedding_gemma_debug", models.GemmaTextEmbedder), TEXT),
    "Llama 3": Step(preset("llama3_debug", models.Llama3CausalLM), f"{SILU} dropout", change=lora),
    "Qwen 3": Step(preset("qwen3_debug", models.Qwen3CausalLM), SILU),
    "Qwen 3 embedder": Step(public(models.Qwen3TextEmbedder), TEXT.replace("gelu", "silu")),
}


def matched_elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The devices of the costs that EoMT reads: those of all matchings at once, on the host."""
    matched: list[Any] = []

    def on_host(cost: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        matched.append(cost.device.type)
        return torch.zeros_like(valid, dtype=torch.int32)

    monkeypatch.setattr(set_criterion_torch, "on_host", on_host)
    return matched


def compiled(step: Step, prepare: Callable[[Any], Any] = lambda model: model) -> Any:
    """The compiled model of a step.

    Args:
        step: the step.
        prepare: distributes the model before it is compiled.
    """
    model = outlined(step.make)
    step.change(model)
    model = prepare(model)
    know_seeds(model)
    kind = training.SGD if "momentum" in step.rule else training.AdamW
    model.compile(kind(1e-3, clip_norm=1.0, **step.rule), **step.settings)
    know_batches(model.optimizer)
    return model


# A step takes two to five seconds here: each kernel, kind of loss and way to accumulate once.
@pytest.mark.each_time(
    *("ViT", "ViT, accumulated", "EoMT", "Gemma 2", "Gemma 3, nf4", "Gemma 3, packed"),
    *("Gemma 4, experts", "Llama 3"),
)
@pytest.mark.parametrize("label", STEPS)
def test_a_training_step_stays_on_the_device(kernels, monkeypatch, label: str) -> None:
    step = STEPS[label]
    model = compiled(step)
    matched = matched_elsewhere(monkeypatch)
    kmodels.reset_decisions()
    logs = steps(model, on_device(batch_of(model, step.rows, packed=step.packed)))
    assert all(x.is_cuda and x.shape == () for x in logs.values())
    assert matched == ["cuda"] * (2 * (label == "EoMT"))
    overrides, declined = paths()
    assert overrides == set(step.overrides.split())
    assert declined == {op: {reason} for op, reason in step.declined.items()}
    assert kernels == set(step.kernels.split())


DISTRIBUTED = [
    *(("data=2", label) for label in ("ViT", "ViT, accumulated", "CLIP", "Gemma 3, int4")),
    *(("fsdp=2", label) for label in ("ViT", "ViT, accumulated", "Gemma 3, int4")),
    *((mesh, "Gemma 3, nf4") for mesh in ("data=2", "fsdp=2")),
    ("fsdp=2", "Gemma 3, accumulated"),
]


@pytest.mark.each_time("data=2-ViT, accumulated", "fsdp=2-Gemma 3, int4", "fsdp=2-ViT")
@pytest.mark.parametrize(("mesh", "label"), DISTRIBUTED)
def test_a_step_of_several_processes_stays_on_the_device(
    kernels, monkeypatch, mesh: str, label: str
) -> None:
    with two_processes(monkeypatch, mesh) as (plan, sent):
        if mesh == "fsdp=2" and label.endswith(("int4", "nf4")) and OLDER_THAN_2_12:
            refused("cannot shard the integer weights of", compiled, STEPS[label], plan.prepare)
            return
        model = compiled(STEPS[label], plan.prepare)
        logs = steps(model, on_device(batch_of(model)), sent.clear)
        assert all(x.is_cuda and x.shape == () for x in logs.values())
    batches = model.optimizer.accumulate
    sizes, dtypes = Counter[str](), set()
    for name, dtype, size in sent:
        sizes[name] += size
        dtypes |= {dtype} if name != "all_gather" else set()
    assert dtypes == {torch.float32}
    gradients = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    scalars = sum(v.value.numel() for metric in model.metrics for v in metric.variables)
    # A language task also sums the weight of each batch.
    scalars += getattr(model, "divisor", None) is not None
    if mesh == "data=2":
        assert sizes == {"all_reduce": gradients + batches * scalars}
        return
    # Parts of accumulated gradients are summed; whole ones if few weights are trained.
    times = 1 if label.startswith("Gemma") else batches
    assert sizes["reduce_scatter"] == times * gradients
    assert sizes["all_reduce"] == batches * scalars
    # Once for each pass, if it is not kept for the backward pass.
    assert 2 * sizes["all_gather"] >= batches * sum(math.prod(x.shape) for x in model.weights)


NO_CAP = {"attention": {"scaled_dot_product_attention has no soft cap"}}
GENERATED = {
    "gemma2_debug": (TEXT.replace("attention", ""), NO_CAP),
    "gemma3_debug": (TEXT, {}),
    "gemma4_moe_debug": (f"{TEXT} grouped_dense", {}),
}


@pytest.mark.each_time("gemma3_debug-2", "gemma4_moe_debug-32")
@pytest.mark.parametrize("rows", [2, 32])
@pytest.mark.parametrize("name", GENERATED)
def test_a_step_of_generate_stays_on_the_device(kernels, name: str, rows: int) -> None:
    model = outlined(preset(name))
    model.compile(sampler="top_p")
    loop = loop_torch.Loop(
        Passes(model.backbone, model.generator.sampler, rows, 8, 24), jit_compile=False
    )
    # Prompts of other lengths are padded.
    prompts, lengths = np.zeros((rows, 8), "int32"), np.arange(rows, dtype="int32") % 8 + 1
    draws = np.zeros((4, rows), "float32")
    tokens = loop.start(prompts, lengths, draws[0])
    tokens = loop.step(0, tokens, draws[1])
    kmodels.reset_decisions()
    with without_copies():
        tokens = loop.step(1, loop.step(0, tokens, draws[2]), draws[3])
    assert tokens.is_cuda and tokens.shape == (rows,)
    overrides, declined = GENERATED[name]
    assert paths() == (set(overrides.split()), declined)


# === All sizes ===

PREFIXES = {
    "eomt_": models.EoMTImageSegmenter,
    "vit_mae_": models.ViTMAEForPreTraining,
    "embedding_gemma_": models.GemmaTextEmbedder,
}
SIZES = [
    pytest.param(
        next((cls for prefix, cls in PREFIXES.items() if name.startswith(prefix)), family.tasks[0]),
        name,
        id=f"{family.name}-{name}",
    )
    for family in registry.families()
    for name in family.presets
    if family.tasks and not name.endswith("_debug")
]
# Parameters as published: transformers' `google/gemma-3-27b-it` without its vision tower and
# projector, and `facebook/dinov2-giant` without its mask token.
PARAMETERS = {"gemma3_27b_text": 27_009_002_240, "dinov2_giant_patch14_518": 1_136_479_232}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_beyond_this_machine(kernels, name: str) -> None:
    cls = models.ViTBackbone if name.startswith("dinov2") else models.GemmaBackbone
    model = outlined(lambda: cls.from_preset(name, dtype="bfloat16", load_weights=False))
    assert model.count_params() == PARAMETERS[name]


@pytest.mark.nightly
@pytest.mark.parametrize(("cls", "name"), SIZES)
def test_a_step_of_each_size_stays_on_the_device(kernels, monkeypatch, cls: Any, name: str) -> None:
    matched_elsewhere(monkeypatch)
    labelled = cls in (models.ViTImageClassifier, models.EoMTImageSegmenter)
    more = {"num_classes": 10} if labelled else {}
    model = outlined(preset(name, cls, "bfloat16", **more))
    if isinstance(model.backbone, models.GemmaBackbone):
        lora(model)
        know_seeds(model)
    texts = cls is models.CLIPTextModelWithProjection
    model.compile(training.AdamW(1e-3), **({"loss": "mse"} if texts else {}))
    logs = steps(model, on_device(batch_of(model, rows=1, length=1024)))
    assert all(x.is_cuda for x in logs.values())
    assert "generic" not in kernels


# === What is wrong is found ===

READS = DataDependentOutputException, "_local_scalar_dense"
QUANTIZED = sys.modules["kmodels.ops.quantized_dense"]  # the package has an op of its name
NUMBERS, SUM = QUANTIZED.dequantize, collectives.all_reduce


def read(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def several(mesh: str, label: str) -> Callable[..., None]:
    return partial(test_a_step_of_several_processes_stays_on_the_device, mesh=mesh, label=label)


def alone(label: str) -> Callable[..., None]:
    return partial(test_a_training_step_stays_on_the_device, label=label)


def generated(kernels: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    test_a_step_of_generate_stays_on_the_device(kernels, "gemma3_debug", 32)


# What is broken: a test, an attribute and its replacement, an error and its message.
BROKEN = {
    "accumulation by Keras": (
        *(alone("ViT, accumulated"), optimizers_torch, "_counts", lambda optimizer: False),
        READS,
    ),
    "descent by Keras": (
        *(alone("ViT, plain SGD"), optimizers_torch._Descent, "move_all"),
        *(keras_internals.OwnSteps.move_all, READS),
    ),
    "an average by a number that is sent": (
        *(alone("ViT, accumulated"), optimizers_torch._Groups, "average_all"),
        lambda self, variables: variables[0].value.mul_(torch.tensor(1.0).to("cuda")),
        (WaitsForDevice, "cpu to cuda"),
    ),
    "8 bits that are read": (
        *(alone("Gemma 3, int8"), QUANTIZED, "dequantize"),
        *(lambda *arrays, **more: read(NUMBERS(*arrays, **more)), READS),
    ),
    "4 bits on the host": (
        *(alone("Gemma 3, int4"), QUANTIZED, "dequantize"),
        lambda *arrays, **more: NUMBERS(*arrays, **more) + torch.ones(1, 1, device="cpu"),
        (RuntimeError, "found at least two devices, cuda:0 and cpu|two different devices"),
    ),
    "a count of DDP that is read": (
        *(several("data=2", "ViT, accumulated"), runtime_torch, "known", lambda tensor: None),
        READS,
    ),
    "gradients that DDP leaves": (
        *(several("data=2", "ViT"), ddp_torch._Reducer, "joined", lambda self, loss: loss),
        (AssertionError, "all_reduce"),
    ),
    "gradients that DDP sums in each batch": (
        *(several("data=2", "ViT, accumulated"), ddp_torch.DistributedDataParallel, "no_sync"),
        *(lambda self: nullcontext(), (AssertionError, "all_reduce")),
    ),
    "metrics summed on the host": (
        *(several("fsdp=2", "ViT"), collectives, "all_reduce"),
        *(lambda x: SUM(x.cpu()), (AssertionError, "all_reduce of a tensor on cpu")),
    ),
    "whole gradients that FSDP reduces in each batch": (
        *(several("fsdp=2", "Gemma 3, accumulated"), fsdp_torch.FSDPTrainer, "_waits"),
        *(lambda self, *more: False, (AssertionError, "assert 2688 == ")),
    ),
    "an event that the host waits for": (
        *(several("fsdp=2", "ViT"), fsdp_torch.FSDPTrainer, "joined"),
        lambda self, loss, *more: torch.cuda.current_stream().synchronize() or loss,
        (WaitsForDevice, "synchronize"),
    ),
    "a slot of the cache that is read": (
        *(generated, loop_torch.Store, "write"),
        *(lambda self, ring, slot, new: self.rings[ring][:, slot.item()], READS),
    ),
    "draws that are sent with a wait": (
        *(generated, runtime_torch, "pinned", lambda host, device: host.to(device)),
        (WaitsForDevice, "cpu to cuda"),
    ),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("label", BROKEN)
def test_what_breaks_a_step_is_found(kernels, monkeypatch, label: str) -> None:
    run, owner, name, broken, (error, message) = BROKEN[label]
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(error, match=message):
        run(kernels, monkeypatch)


FAULTS = {
    "a tensor of the CPU": (
        lambda x: x + torch.ones(x.shape[-1], device="cpu"),
        # The second spelling is torch 2.11's.
        *(RuntimeError, "found at least two devices, cuda:0 and cpu|two different devices"),
    ),
    "item": (lambda x: x * x.sum().item(), DataDependentOutputException, "_local_scalar_dense"),
    "bool": (lambda x: x if x.any() else -x, DataDependentOutputException, "_local_scalar_dense"),
    "tolist": (lambda x: x * x[0, 0].tolist()[0], DataDependentOutputException, "_local_scalar"),
    "a mask": (lambda x: x * x[x > 0].sum(), DynamicOutputShapeException, "nonzero"),
    "a copy to the host": (lambda x: x + x.sum().cpu(), WaitsForDevice, "from cuda to cpu"),
    "a number sent": (lambda x: x * torch.tensor(2.0).to("cuda"), WaitsForDevice, "cpu to cuda"),
    "a list sent": (
        lambda x: x * torch.tensor([2.0], device="cuda"),
        # Backward passes run in a thread that sends it by CUDA's own kernel, which builds for CPUs
        # lack and builds for CUDA cannot start without a driver.
        (WaitsForDevice, RuntimeError),
        "from cpu to cuda|from the 'CUDA' backend|Cannot initialize CUDA",
    ),
}  # fmt: skip


@pytest.mark.each_time("a tensor of the CPU-forward", "item-backward", "a number sent-forward")
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("label", FAULTS)
def test_a_fault_in_a_layer_is_found(kernels, monkeypatch, label: str, when: str) -> None:
    fault, error, message = FAULTS[label]

    class Fault(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return fault(x) if when == "forward" else x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] if when == "forward" else fault(gradients[0])

    model = outlined(vit())
    model.compile(training.AdamW(1e-3), **LOSS)
    call = layers.MLP.call
    monkeypatch.setattr(
        layers.MLP, "call", lambda self, x, **more: Fault.apply(call(self, x, **more))
    )
    with pytest.raises(error, match=message):
        steps(model, on_device(batch_of(model)))


def test_another_choice_of_a_kernel_is_found(kernels) -> None:
    model = outlined(preset("gemma3_debug"))
    model.compile(training.AdamW(1e-3))
    kmodels.reset_decisions()
    with kmodels.generic_only("attention"):
        steps(model, on_device(batch_of(model)))
    assert not kernels
    assert paths()[1]["attention"] == {"generic"}
