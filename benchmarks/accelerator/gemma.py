"""Steps of LoRA through `fit`, full, padded and packed, beside transformers with PEFT.

All systems get the same examples; a token counts if it counts in the loss. `planned_mib` is the
estimate of `kmodels plan`. Weights are random and drawn on the device.
"""

from functools import cache, partial
from typing import Any

import numpy as np

from accelerator import clock

RATE = 1e-4
PEERS = {"transformers": "transformers", "peft": "peft", "flash_attention_2": "flash_attn"}
PEERS |= {"liger": "liger_kernel"}


def batch_of(way: str, rows: int, length: int, words: int) -> Any:
    """The rows of a step, of texts of an eighth to a half of the length.

    They are "padded", one in a row, or "packed", several in a row; "full" rows are one long text.
    """
    from kmodels.text import Example, pack, pad

    rng = np.random.default_rng(0)
    sizes = rng.integers(length // 8, length // 2, 12 * rows)
    if way == "full":
        sizes = np.full(rows, length + 1)
    examples = [
        Example(rng.integers(3, words, size).tolist(), [True] * int(size)) for size in sizes
    ]
    if way != "packed":
        return pad(examples[:rows], length, 0)
    x, *rest = pack(examples, length, 0)
    return {name: array[:rows] for name, array in x.items()}, *(y[:rows] for y in rest)


def their_model(model: Any, attention: str) -> Any:
    """The same architecture in transformers, with random weights on the device."""
    import torch

    from torchvision_cpu import define_torchvision_operators

    define_torchvision_operators()
    import transformers

    from kmodels.models.gemma.huggingface import transformers_form

    form = transformers_form(model)[0]
    config = transformers.AutoConfig.for_model(**form)
    with torch.device(clock.place()):
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        )


def ours(model: Any, batch: Any) -> clock.Run:
    x, y, weights = batch
    size = len(y)
    options = {"batch_size": size, "shuffle": False, "verbose": 0}
    return lambda: model.fit(x, y, sample_weight=weights, **options)


def theirs(model: Any, batch: Any) -> clock.Run:
    """A plain step; packed rows are told apart by their positions."""
    import torch

    x, y, weights = batch
    device = clock.place()
    ids = torch.from_numpy(x["token_ids"]).long().to(device)
    labels = torch.from_numpy(np.where(weights > 0, y, -100)).long().to(device)
    inputs: dict[str, Any] = {"input_ids": ids}
    if "positions" in x:
        inputs["position_ids"] = torch.from_numpy(x["positions"]).long().to(device)
    else:
        inputs["attention_mask"] = torch.from_numpy(x["padding_mask"]).to(device)
    chosen = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(chosen, RATE)

    def step() -> Any:
        loss = model(**inputs, labels=labels, shift_labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def peers(model: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Models of transformers with PEFT by name: SDPA, flash if installed, Liger's kernels."""
    if clock.absent(a="transformers", b="peft"):
        return {}
    from torchvision_cpu import define_torchvision_operators

    define_torchvision_operators()
    import peft

    kinds = {"transformers_sdpa": "sdpa"}
    if not clock.absent(x="flash_attn"):
        kinds["transformers_flash"] = "flash_attention_2"
    if settings["liger"] and clock.on_gpu() and not clock.absent(x="liger_kernel"):
        kinds["transformers_liger"] = kinds.get("transformers_flash", "sdpa")
    targets = "all-linear" if settings["targets"] == "all-linear" else ["q_proj", "v_proj"]
    rank = settings["rank"]
    lora = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=targets)

    @cache
    def make(name: str) -> Any:
        base = their_model(model, kinds[name])
        if name.endswith("liger"):
            from liger_kernel.transformers import monkey_patch

            monkey_patch._apply_liger_kernel_to_instance(model=base)
        return peft.get_peft_model(base, lora).train()

    return {name: partial(make, name) for name in kinds}


def run(settings: dict[str, Any]) -> clock.Parts:
    """Yields a row per batch and system."""
    import keras

    from kmodels import training
    from kmodels.lora import LoraSettings
    from kmodels.models import GemmaCausalLM
    from kmodels.tools.plan import Plan, Setup

    preset, rank, targets = settings["preset"], settings["rank"], settings["targets"]
    model = clock.build(GemmaCausalLM, preset, "bfloat16", preprocessor=None)
    others: dict[str, Any] = {}
    if clock.backend() == "torch":
        others = clock.optional("transformers_peft", lambda: peers(model, settings))
    model.backbone.enable_lora(rank, targets=targets)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=training.AdamW(RATE), loss=loss)
    held = sum(int(np.prod(v.shape)) * (2 if "16" in v.dtype else 4) for v in model.weights)
    absent = clock.absent(**PEERS) if clock.backend() == "torch" else []
    yield {"absent": absent, "weights_mib": round(held / clock.MIB)}
    for way, size, length in settings["batches"]:
        batch = batch_of(way, size, length, model.backbone.config.vocabulary_size)
        systems = {"kmodels": ours(model, batch)}
        for name, make in others.items():
            systems |= clock.optional(name, lambda n=name, m=make, b=batch: {n: theirs(m(), b)})
        useful = int(np.count_nonzero(batch[2]))
        setup = Setup(
            batch_size=size,
            sequence_length=length,
            precision="bfloat16",
            lora=LoraSettings(rank=rank, targets=targets),
            packed=way == "packed",
            accelerator=clock.on_gpu(),
        )
        planned = round(Plan(preset, setup).estimate.bytes / clock.MIB)

        def derive(row: dict[str, Any], useful: int = useful, planned: int = planned) -> Any:
            rate = {"useful_tokens_per_s": round(1e3 * useful / row["median_ms"], 1)}
            return rate | ({"planned_mib": planned} if row["system"] == "kmodels" else {})

        case = f"{preset} {size} x {length}, {way}"
        yield from clock.measure(case, systems, settings["rounds"], derive=derive)
