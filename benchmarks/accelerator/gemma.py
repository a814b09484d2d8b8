"""Steps of LoRA through `fit`, padded and packed, beside transformers with PEFT.

All systems get the same examples; a token counts where it counts in the loss. `planned_mib` is what
`kmodels plan` foretells for a padded step. Weights are random and drawn on the device.
"""

from functools import cache, partial
from typing import Any

import numpy as np

from accelerator import clock

RATE = 1e-4
PEERS = {"transformers": "transformers", "peft": "peft", "flash_attention_2": "flash_attn"}
PEERS |= {"liger": "liger_kernel"}


def batches(length: int, tokens: int, words: int) -> dict[str, Any]:
    """The rows of a step: examples of an eighth to a half of the length, padded and packed."""
    from kmodels.text import Example, pack, pad

    rng = np.random.default_rng(0)
    rows = max(1, tokens // length)
    sizes = rng.integers(length // 8, length // 2, 12 * rows)
    examples = [
        Example(rng.integers(3, words, size).tolist(), [True] * int(size)) for size in sizes
    ]
    packed = pack(examples, length, 0)
    x, *rest = packed
    packed = ({name: array[:rows] for name, array in x.items()}, *(y[:rows] for y in rest))
    return {"padded": pad(examples[:rows], length, 0), "packed": packed}


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


def peers(model: Any, rank: int) -> dict[str, Any]:
    """Models of transformers with PEFT by name: SDPA, flash where installed, Liger's kernels."""
    if clock.absent(a="transformers", b="peft"):
        return {}
    import peft

    kinds = {"transformers_sdpa": "sdpa"}
    if not clock.absent(x="flash_attn"):
        kinds["transformers_flash"] = "flash_attention_2"
    if clock.on_gpu() and not clock.absent(x="liger_kernel"):
        kinds["transformers_liger"] = kinds.get("transformers_flash", "sdpa")
    settings = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=["q_proj", "v_proj"])

    @cache
    def make(name: str) -> Any:
        base = their_model(model, kinds[name])
        if name.endswith("liger"):
            from liger_kernel.transformers import monkey_patch

            monkey_patch._apply_liger_kernel_to_instance(model=base)
        return peft.get_peft_model(base, settings).train()

    return {name: partial(make, name) for name in kinds}


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns rows for padded and packed steps."""
    import keras

    from kmodels import training
    from kmodels.lora import LoraSettings
    from kmodels.models import GemmaCausalLM
    from kmodels.tools.plan import Plan, Setup

    preset, length, rank = settings["preset"], settings["length"], settings["rank"]
    model = clock.build(GemmaCausalLM, preset, "bfloat16", preprocessor=None)
    data = batches(length, settings["tokens"], model.backbone.config.vocabulary_size)
    others = peers(model, rank) if clock.backend() == "torch" else {}
    model.backbone.enable_lora(rank)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=training.AdamW(RATE), loss=loss)
    planned = Plan(
        preset,
        Setup(
            batch_size=len(data["padded"][1]),
            sequence_length=length,
            precision="bfloat16",
            lora=LoraSettings(rank=rank),
            accelerator=clock.on_gpu(),
        ),
    ).estimate.bytes
    rows: list[dict[str, Any]] = []
    for way, batch in data.items():
        systems = {"kmodels": ours(model, batch)}
        for name, make in others.items():
            systems |= clock.optional(name, lambda n=name, m=make, b=batch: {n: theirs(m(), b)})
        useful = int(np.count_nonzero(batch[2]))
        found = clock.measure(f"{preset} T {length}, {way}", systems, settings["rounds"])
        for row in found:
            if "median_ms" in row:
                row["useful_tokens_per_s"] = round(1e3 * useful / row["median_ms"], 1)
        rows += found
    absent = clock.absent(**PEERS) if clock.backend() == "torch" else []
    held = sum(int(np.prod(v.shape)) * (2 if "16" in v.dtype else 4) for v in model.weights)
    found = {"rows": rows, "absent": absent, "planned_mib": round(planned / clock.MIB)}
    return found | {"weights_mib": round(held / clock.MIB)}
