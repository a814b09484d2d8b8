"""What do a LoRA step's time and memory come to on texts with images, beside transformers and PEFT?

    python benchmarks/image_text_lora.py WEIGHTS [--dtypes bfloat16] [--systems kmodels ...]

Needs an environment with kmodels, torch, transformers and PEFT. WEIGHTS is a directory of
transformers; it is made with random weights if it is not there: the widths of Gemma 3 4B, in 4
blocks of text and 4 of vision, and one image of 896 pixels, which takes 256 tokens. A step is rank
4 on query and value of both halves, SGD, batch 1, an image and a text of 64 tokens behind it, whose
tokens count. kmodels goes through `fit`; transformers is a plain loop, with eager attention and
with SDPA.

Processes, clock, rounds and ratios are those of gemma_lora.py. `--systems kmodels floor` takes
turns with the products of kmodels' step alone, see floor.py.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import record
from gemma_lora import (
    RANK,
    Child,
    answer,
    fit_step,
    import_transformers,
    loop_step,
    ratios,
    take_turns,
)
from vit_peers.child import hide_others

IMAGE, SIZE, TOKENS, TEXT = 262_144, 896, 256, 64
SYSTEMS = ("kmodels", "transformers_eager", "transformers_sdpa")
FLOOR = Path(__file__).with_name("floor.py")


def make_weights(folder: Path) -> None:
    """Random weights as transformers writes them."""
    import torch

    transformers = import_transformers()
    torch.manual_seed(0)
    text = {
        **{"vocab_size": 262_208, "hidden_size": 2560, "intermediate_size": 10_240},
        **{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4},
        **{"head_dim": 256, "sliding_window": 1024, "query_pre_attn_scalar": 256},
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    }
    vision = {
        **{"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 4},
        **{"intermediate_size": 4304, "num_attention_heads": 16, "image_size": SIZE},
        **{"patch_size": 14, "vision_use_head": False},
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    model = transformers.Gemma3ForConditionalGeneration(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def batch() -> dict:
    """Token ids, labels, weights and an image, of one row."""
    import numpy as np

    rng = np.random.default_rng(0)
    tokens = rng.integers(3, 255_000, (1, 2 + TOKENS + TEXT + 1)).astype("int32")
    tokens[0, 1], tokens[0, 2 : 2 + TOKENS] = 255_999, IMAGE
    weights = np.zeros((1, tokens.shape[1] - 1), "float32")
    weights[:, 2 + TOKENS :] = 1
    image = rng.normal(0, 0.5, (1, 1, SIZE, SIZE, 3)).astype("float32")
    labels = np.where(tokens[:, 1:] == IMAGE, 0, tokens[:, 1:])
    return {"tokens": tokens[:, :-1], "labels": labels, "weights": weights, "image": image}


def kmodels_step(weights: str, dtype: str, data: dict) -> Callable[[], tuple]:
    """Makes a step of kmodels through `fit`; it returns (seconds, loss)."""
    import numpy as np

    from kmodels.models import Gemma3ImageTextLM

    model = Gemma3ImageTextLM.from_preset(weights, preprocessor=None, dtype=dtype)
    model.backbone.enable_lora(RANK, targets=["query", "value"])
    x = {
        "token_ids": data["tokens"],
        "padding_mask": np.ones_like(data["tokens"]),
        "images": data["image"],
        "vision_mask": (data["tokens"] == IMAGE).astype("int32"),
    }
    return fit_step(model, x, data)


def transformers_step(attention: str, weights: str, dtype: str, data: dict) -> Callable[[], tuple]:
    """Makes a step of transformers with PEFT; it returns (seconds, loss)."""
    import torch

    transformers = import_transformers()
    import peft

    torch.set_num_threads(1)
    model = transformers.Gemma3ForConditionalGeneration.from_pretrained(
        weights, dtype=getattr(torch, dtype), attn_implementation=attention
    )
    settings = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(model, settings)
    model.train()
    ids = torch.from_numpy(data["tokens"]).long()
    counts = torch.from_numpy(data["weights"]) > 0
    # Transformers takes labels of the tokens themselves and moves them.
    labels = torch.full_like(ids, -100)
    labels[:, 1:][counts[:, :-1]] = ids[:, 1:][counts[:, :-1]]
    pixels = torch.from_numpy(data["image"][0]).permute(0, 3, 1, 2).to(getattr(torch, dtype))
    given = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (ids == IMAGE).long(),
        "pixel_values": pixels,
        "labels": labels,
    }
    return loop_step(model, model, given)


def serve(system: str, weights: str, dtype: str) -> None:
    """A child's side: for each line that comes in, a step, and a line about it."""
    hide_others(os.environ["KERAS_BACKEND"])
    data = batch()
    # The last position has no token behind it in transformers' row.
    data["weights"][:, -1] = 0
    if system == "kmodels":
        step = kmodels_step(weights, dtype, data)
    else:
        step = transformers_step(system.removeprefix("transformers_"), weights, dtype, data)
    answer(step)


def compare(systems: list[str], weights: str, dtype: str, rounds: int) -> dict:
    """Steps of systems in turn; what came of each."""
    children = {
        system: Child("torch", [system, weights, dtype], __file__)
        for system in systems
        if system != "floor"
    }
    if "floor" in systems:
        children["floor"] = Child("torch", ["floor", "image_text", dtype, TEXT - 1], str(FLOOR))
    found = take_turns(children, rounds)
    for name in ("peak_mb", "first_loss"):  # which say nothing of products alone
        found.get("floor", {}).pop(name, None)
    return found


def main() -> None:
    parser = record.flags(__doc__)
    parser.add_argument("weights", type=Path, nargs="?")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--systems", nargs="+", choices=(*SYSTEMS, "floor"), default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(*json.loads(options.child))
        return
    if not options.weights.is_dir():
        make_weights(options.weights)
    rows = []
    for dtype in options.dtypes.split(","):
        found = compare(options.systems, str(options.weights), dtype, options.rounds)
        losses = [row["first_loss"] for row in found.values() if "first_loss" in row]
        rows.append({"dtype": dtype, "backend": "torch", "loss_spread": max(losses) - min(losses)})
        rows[-1] |= found
        if "kmodels" in found:
            rows[-1] |= ratios(found, {})
        print(json.dumps(rows[-1]), flush=True)
    if options.write:
        label = options.dtypes.replace(",", "-")
        record.write(
            f"image_text_lora_{label}_torch_cpu",
            __doc__,
            ("keras", "transformers", "peft", "torch"),
            clock="process CPU",
            threads=1,
            rounds=options.rounds,
            rows=rows,
        )


if __name__ == "__main__":
    main()
