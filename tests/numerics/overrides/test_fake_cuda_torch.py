"""Whole steps with tensors on CUDA that have no numbers; `test_fake_cuda.py` starts these tests.

torch knows of each kernel on which devices its arguments may lie and when it needs numbers, so a
tensor that was left on the CPU raises, and so does a read of the device. The kernels are those of
CUDA: their choice is asserted. `make accelerator` asks a device itself.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from kmodels.generation.loop_torch import Loop
from kmodels.training import set_criterion_torch
from pretended_cuda_torch import (
    WaitsForDevice,
    fake_cuda,
    know_seeds,
    on_device,
    outlined,
    without_copies,
)

BF16 = "mixed_bfloat16"


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


def steps(model: Any, batch: Any) -> dict[str, Any]:
    """The logs of the second of two training steps; the first one makes what stays."""
    model.make_train_function()
    model.train()
    model.train_function([batch])
    with without_copies():
        return model.train_function([batch])


PATCHES = {"patch_embedding": "generic"}  # torch has no override
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
    """

    make: Callable[[], Any]
    overrides: str
    kernels: str = "sdpa"
    declined: Mapping[str, str] = field(default_factory=dict)
    change: Callable[[Any], Any] = lambda model: None
    settings: Mapping[str, Any] = field(default_factory=dict)
    packed: bool = False


def preset(name: str, cls: Any = models.GemmaCausalLM, dtype: str = BF16, **more: Any) -> Any:
    return lambda: cls.from_preset(name, dtype=dtype, preprocessor=None, **more)


def public(cls: Any) -> Any:
    return lambda: CASES[cls][0](dtype=BF16)


def lora(model: Any) -> None:
    model.enable_lora(rank=4, dropout=0.1)


def vit(dtype: str = BF16, **more: Any) -> Any:
    return preset("vit_debug", models.ViTImageClassifier, dtype, num_classes=10, **more)


DROPS = {
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
    "NaFlex": Step(public(models.NaFlexViTImageClassifier), TOWER),
    "DeiT": Step(public(models.DeiTImageClassifier), TOWER, "", PATCHES),  # one query each
    "MAE": Step(public(models.ViTMAEForPreTraining), TOWER, "sdpa", PATCHES),
    "segmenter": Step(public(models.ViTImageSegmenter), TOWER, "sdpa", PATCHES),
    "EoMT": Step(public(models.EoMTImageSegmenter), TOWER, "sdpa", {**PATCHES, "gelu": "generic"}),
    "CLIP": Step(preset("clip_debug", TOWERS), TOWER, "sdpa", PATCHES),
    "SigLIP": Step(preset("siglip_debug", TOWERS), TOWER, "sdpa", PATCHES),
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
    "Gemma 3": Step(preset("gemma3_debug"), f"{DECODER} dropout", "sdpa varlen", change=lora),
    "Gemma 3, bfloat16": Step(preset("gemma3_debug", dtype="bfloat16"), DECODER, "sdpa varlen"),
    "Gemma 3, float32": Step(preset("gemma3_debug", dtype="float32"), DECODER),
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
        preset("gemma4_vision_debug", GEMMA4),
        *(f"{DECODER} dropout", "sdpa varlen", TURNED, lora),
    ),
    "Gemma 4 unified": Step(
        preset("gemma4_unified_debug", GEMMA4), f"{DECODER} layer_norm", "flex sdpa"
    ),
    "EmbeddingGemma": Step(preset("embedding_gemma_debug", models.GemmaTextEmbedder), TEXT),
    "Llama 3": Step(preset("llama3_debug", models.Llama3CausalLM), f"{SILU} dropout", change=lora),
    "Qwen 3": Step(preset("qwen3_debug", models.Qwen3CausalLM), SILU),
    "Qwen 3 embedder": Step(public(models.Qwen3TextEmbedder), TEXT.replace("gelu", "silu")),
}


@pytest.mark.parametrize("label", STEPS)
def test_a_training_step_stays_on_the_device(kernels, monkeypatch, label: str) -> None:
    step = STEPS[label]
    model = outlined(step.make)
    step.change(model)
    know_seeds(model)
    model.compile(training.AdamW(1e-3, clip_norm=1.0), **step.settings)
    matched: list[Any] = []
    if label == "EoMT":  # reads the costs of all matchings at once, on the host

        def on_host(cost: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
            matched.append(cost.device.type)
            return torch.zeros_like(valid, dtype=torch.int32)

        monkeypatch.setattr(set_criterion_torch, "on_host", on_host)
    kmodels.reset_decisions()
    logs = steps(model, on_device(batch_of(model, packed=step.packed)))
    assert all(x.is_cuda and x.shape == () for x in logs.values())
    assert matched == ["cuda"] * (2 * (label == "EoMT"))
    overrides, declined = paths()
    assert overrides == set(step.overrides.split())
    assert declined == {op: {reason} for op, reason in step.declined.items()}
    assert kernels == set(step.kernels.split())


NO_CAP = {"attention": {"scaled_dot_product_attention has no soft cap"}}
GENERATED = {
    "gemma2_debug": (TEXT.replace("attention", ""), NO_CAP),
    "gemma3_debug": (TEXT, {}),
    "gemma4_moe_debug": (f"{TEXT} grouped_dense", {}),
}


@pytest.mark.parametrize("name", GENERATED)
def test_a_step_of_generate_stays_on_the_device(kernels, name: str) -> None:
    model = outlined(preset(name))
    model.compile(sampler="top_p")
    loop = Loop(model.backbone, model.generator.sampler, 2, 8, 24, jit_compile=False)
    prompts, lengths = np.zeros((2, 8), "int32"), np.array([8, 5], "int32")
    draws = np.zeros((4, 2), "float32")
    tokens = loop.start(prompts, lengths, draws[0])
    tokens = loop.step(0, tokens, draws[1])
    kmodels.reset_decisions()
    with without_copies():
        tokens = loop.step(1, loop.step(0, tokens, draws[2]), draws[3])
    assert tokens.is_cuda and tokens.shape == (2,)
    overrides, declined = GENERATED[name]
    assert paths() == (set(overrides.split()), declined)


# === All sizes ===

SIZES = [
    (family.tasks[0], name)
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
@pytest.mark.parametrize(("cls", "name"), SIZES, ids=[name for _, name in SIZES])
def test_a_step_of_each_size_stays_on_the_device(kernels, cls: Any, name: str) -> None:
    more = {"num_classes": 10} if cls is models.ViTImageClassifier else {}
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
        # Backward passes run in a thread that sends it by CUDA's own kernel.
        (WaitsForDevice, NotImplementedError), "from cpu to cuda|from the 'CUDA' backend",
    ),
}  # fmt: skip


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
