"""Whole training steps, lowered for GPUs and TPUs without one; collects nothing but on JAX.

Weights and slots are shapes, so a model of any size takes no memory. What XLA would be given is
read: the kernels of attention, and arrays that must not be there.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import pytest

import kmodels
from fake_steps import batch_of
from kmodels import models, training

if keras.backend.backend() != "jax":
    pytest.skip("needs JAX", allow_module_level=True)

import jax
from jax._src.cudnn import fused_attention_stablehlo as fused

from kmodels.core import keras_internals
from kmodels.overrides import attention_jax
from kmodels.overrides.attention_jax import Device
from kmodels.training import step_jax

DEVICES = {"cuda": Device("cuda", (9, 0), cudnn=True), "tpu": Device("tpu")}
BACKENDS = {"cuda": "gpu", "tpu": "tpu"}
FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
SPLASH = "tpu_custom_call"


def shapes_of(arrays: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(tuple(x.shape), x.dtype), arrays)


@dataclass
class Step:
    """A training step, and what is lowered for it.

    Args:
        make: returns the model.
        rows: of a batch.
        length: tokens of a row.
        lora: whether adapters are trained alone.
        packed: whether a row holds several texts.
        calls: custom calls by platform; equal ones of several layers count once.
        declined: reasons of attention by platform.
        settings: arguments of `compile`.
    """

    make: Callable[[], Any]
    rows: int
    length: int
    calls: Mapping[str, Mapping[str, int]]
    declined: Mapping[str, str] = field(default_factory=dict)
    lora: bool = True
    packed: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


def preset(name: str, cls: Any = models.GemmaCausalLM, **more: Any) -> Callable[[], Any]:
    return lambda: cls.from_preset(name, dtype="bfloat16", preprocessor=None, **more)


def traced(step: Step) -> tuple[Any, Any]:
    """The traced step, and the shapes of its arguments."""
    with keras_internals.without_values() as weights:
        model = step.make()
        if step.lora:
            model.enable_lora(rank=4)
    model.compile(training.AdamW(1e-3), **step.settings)
    with keras_internals.without_values() as slots:
        model.optimizer.build(model.trainable_variables)
    for variable in weights:  # read for shapes alone, but a random one would be drawn
        keras_internals.begin_with(variable, jax.numpy.zeros)
    batch = batch_of(model, step.rows, step.length, step.packed)
    keras_internals.symbolic_build(model, lambda: batch)
    for variable in (*weights, *slots):
        keras_internals.give_value(variable, shapes_of(variable))
    kinds = step_jax._variables(model, "train")
    values = tuple(shapes_of([variable.value for variable in kind]) for kind in kinds)
    given = values, shapes_of(batch)
    kmodels.reset_decisions()
    return step_jax.compiled(model, "train").trace(*given), given


def calls(forward: int, backward: int, splash: int) -> dict[str, dict[str, int]]:
    cudnn = {FORWARD: forward, BACKWARD: backward}
    return {
        "cuda": {name: count for name, count in cudnn.items() if count},
        "tpu": {SPLASH: splash} if splash else {},
    }


CLASSES = {
    "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "metrics": ["accuracy"],
}
VIT = models.ViTImageClassifier
NARROW = {"tpu": "a multiple of 64, not"}
STEPS = {
    "ViT": Step(
        preset(
            *("vit_debug", VIT), num_classes=10, use_class_token=False, pooling="gap",
            image_shape=(64, 64, 3),
        ),
        *(2, 0, calls(1, 1, 0), NARROW),
        lora=False,
        settings=CLASSES,
    ),
    "Gemma 2": Step(
        *(preset("gemma2_debug", head_dim=64), 1, 128, calls(0, 0, 6)), {"cuda": "no soft cap"}
    ),
    "Gemma 3": Step(preset("gemma3_debug", head_dim=64), 1, 128, calls(2, 2, 6)),
    "Gemma 3, packed": Step(
        *(preset("gemma3_debug", head_dim=64), 1, 128, calls(0, 0, 6), {"cuda": "no segments"}),
        packed=True,
    ),
    "Gemma 4": Step(preset("gemma4_debug"), 1, 128, calls(2, 2, 0), NARROW),
    "Qwen 3": Step(
        preset("qwen3_debug", models.Qwen3CausalLM), 1, 128, calls(1, 1, 0), NARROW, lora=False
    ),
    "Llama 3": Step(preset("llama3_debug", models.Llama3CausalLM), 1, 128, calls(1, 2, 0), NARROW),
}  # fmt: skip
LARGE = {
    "ViT-B/16": Step(
        preset("vit_base_patch16_224", VIT, num_classes=1000),
        *(8, 0, calls(2, 2, 3), {"tpu": "pays from 128 queries on"}),
        lora=False,
        settings=CLASSES,
    ),
    "Gemma 3 4B": Step(preset("gemma3_4b_text"), 1, 1792, calls(2, 3, 8)),
    "Gemma 4 E2B": Step(preset("gemma4_e2b"), 1, 1792, calls(1, 2, 8), {"cuda": "up to 256 wide"}),
}
LARGE_CASES = [pytest.param(label, marks=pytest.mark.nightly) for label in LARGE]
SHAPE = re.compile(r"tensor<((?:\d+x)+)[a-z]")


@pytest.mark.parametrize("platform", DEVICES)
@pytest.mark.parametrize("label", [*STEPS, *LARGE_CASES])
def test_a_training_step_is_lowered(monkeypatch, label: str, platform: str) -> None:
    step = (STEPS | LARGE)[label]
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(fused, "check_compute_capability", lambda least: True)  # of no device
    monkeypatch.setattr(attention_jax, "device", lambda: DEVICES[platform])
    monkeypatch.setattr(jax, "default_backend", lambda: BACKENDS[platform])
    attention_jax._refused.cache_clear()
    program, (values, _) = traced(step)
    attention_jax._refused.cache_clear()
    text = program.lower(lowering_platforms=(platform,)).as_text()
    found = Counter(re.findall(r"custom_call @([\w$]+)\(", text))
    kernels = {name: n for name, n in found.items() if name in (FORWARD, BACKWARD, SPLASH)}
    assert kernels == step.calls[platform]
    reasons = {reason for reason, n in kmodels.decisions()["attention"].items() if n}
    if platform in step.declined:
        assert all(step.declined[platform] in reason for reason in reasons - {"override"})
    else:
        assert reasons == {"override"}
    shapes = {tuple(map(int, x.split("x")[:-1])) for x in SHAPE.findall(text)}
    if step.length:
        decisions = kmodels.decisions()["linear_cross_entropy"]
        assert {reason for reason, n in decisions.items() if n} == {"override"}
    if step.length >= 1024:  # shorter ones are one tile
        words = max(x.shape[0] for kind in values for x in kind if len(x.shape) == 2)
        assert not any({words, step.rows * step.length} <= {*shape} for shape in shapes)
        assert not any(shape.count(step.length) > 1 for shape in shapes)


def test_memory_of_a_small_step_is_that_of_its_shapes() -> None:
    """On a CPU, where XLA compiles; new weights and slots take the memory of the old ones."""
    program, (values, batch) = traced(STEPS["Gemma 3"])
    memory = program.lower().compile().memory_analysis()

    def size(arrays: Any) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))

    assert memory.argument_size_in_bytes == size(values) + size(batch)
    assert memory.alias_size_in_bytes == size(values)


@pytest.mark.nightly
@pytest.mark.parametrize("label", ["Gemma 3", "Qwen 3"])
def test_temporaries_of_a_step_grow_with_its_tokens(label: str) -> None:
    """Scores of all pairs of tokens would grow fourfold; tiles of keys grow by steps."""

    def temporaries(length: int) -> int:
        program, _ = traced(replace(STEPS[label], length=length))
        return program.lower().compile().memory_analysis().temp_size_in_bytes

    sizes = [temporaries(length) for length in (512, 1024, 2048)]
    assert sizes[1] <= 2.6 * sizes[0] and sizes[2] <= 2.6 * sizes[1], sizes
