"""Whether anything of kmodels on torch waits for the device, which torch itself tells on CUDA.

The tests prove it with a CPU that code takes for CUDA
(`tests/numerics/overrides/test_no_sync_torch.py`); here a device is asked: under its
synchronisation debug mode torch raises where the host would wait.
"""

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from accelerator import clock
from accelerator.pieces import SMALL

FREE, NOT_ASKED = "no synchronisation", "not asked: torch has no CUDA device"


def strict(on: bool) -> None:
    """Has torch raise where something waits, on a device."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("error" if on else "default")


def finding(call: Callable[[], Any]) -> str:
    """Calls twice, the second time strictly; says what waited, and where."""
    try:
        call()
        strict(True)
        call()
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = [f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in frames]
        return f"{clock.one_line(error)} at {' '.join(at[-4:])}"
    finally:
        strict(False)
    return FREE if clock.on_gpu() else NOT_ASKED


def op_calls(few: bool) -> dict[str, Callable[[], Any]]:
    """Forward and backward pass of each case of the tests, and the draws of a seed."""
    import keras
    import torch

    from accelerator.correctness import op_cases
    from kmodels import ops

    found: dict[str, Callable[[], Any]] = {}
    for name, label, arrays, keywords in op_cases(few):
        given = [keras.ops.convert_to_tensor(x, "bfloat16").requires_grad_() for x in arrays]
        held = {
            key: keras.ops.convert_to_tensor(x) if isinstance(x, np.ndarray) else x
            for key, x in keywords.items()
        }

        def call(name: str = name, given: Any = given, held: Any = held) -> None:
            output = getattr(ops, name)(*given, **held)
            output = output[0] if isinstance(output, tuple) else output
            torch.autograd.grad(output.float().sum(), given)

        found[f"{name}: {label}"] = call
    x = keras.ops.ones((2, 64, 4, 64), "bfloat16").requires_grad_()
    seed = keras.random.SeedGenerator(0)
    found["dropout"] = lambda: ops.dropout(x, 0.1, seed)
    found["attention: dropout"] = lambda: ops.attention(x, x, x, dropout=0.1, seed=seed)
    return found


def step_calls() -> dict[str, Callable[[], Any]]:
    """Training steps of a ViT with dropout, and of Gemmas with LoRA and dropout."""
    import keras

    from kmodels import training
    from kmodels.models import GemmaCausalLM, ViTImageClassifier

    rng, found = np.random.default_rng(0), {}

    def step(model: Any, data: Any) -> Callable[[], Any]:
        batch = keras.tree.map_structure(keras.ops.convert_to_tensor, data)
        model.make_train_function()
        model.train()
        return lambda: model.train_function([batch])

    rates = {"dropout_rate": 0.1, "attention_dropout": 0.1, "drop_path_rate": 0.1}
    vit = ViTImageClassifier.from_preset(
        "vit_debug", num_classes=10, dtype="mixed_bfloat16", **rates
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    vit.compile(training.AdamW(1e-3), loss, metrics=["accuracy"])
    images = rng.random((4, *vit.backbone.config.image_shape), "float32")
    found["step of a ViT"] = step(vit, (images, np.arange(4, dtype="int32")))
    presets = ("gemma_debug",) if SMALL else ("gemma_debug", "gemma2_debug", "gemma3_debug")
    for preset in presets:
        gemma = GemmaCausalLM.from_preset(preset, preprocessor=None, dtype="mixed_bfloat16")
        gemma.backbone.enable_lora(rank=4, dropout=0.1)
        gemma.compile(training.AdamW(1e-3))
        ids = rng.integers(1, 100, (2, 24)).astype("int32")
        weights = (np.arange(24) < 20).astype("float32") + np.zeros((2, 1), "float32")
        data = {"token_ids": ids, "padding_mask": (weights > 0).astype("int32")}
        found[f"step of {preset}"] = step(gemma, (data, ids, weights))
    return found


def rows(few: bool) -> Iterator[dict[str, Any]]:
    """Yields a row per call with its finding."""
    calls = {**op_calls(few), **step_calls()}
    for case, call in calls.items():
        yield {"case": case, "system": "synchronisation", "finding": finding(call)}
