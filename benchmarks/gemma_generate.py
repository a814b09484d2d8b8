"""How long does a generated token take, next to transformers (torch) and keras-hub (all backends)?

    KERAS_BACKEND=torch python benchmarks/gemma_generate.py [--write] [--new 64] [--rounds 5]

Greedy, float32, one prompt of 40 tokens, one thread, random weights; a model of the width of
Gemma 3 270M with 6 layers and 32,000 words (torch, against transformers' Gemma 3) or the same as a
Gemma 1 (against keras-hub). Peers are interleaved; times are medians of calls after the first,
which compiles.
"""

import argparse
import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.models import GemmaBackbone, GemmaCausalLM
from kmodels.models.gemma.presets import GEMMA_3

BACKEND = keras.backend.backend()
RESULTS = Path(__file__).parent / "results"
SIZES = {
    "vocabulary_size": 32_000,
    "num_layers": 6,
    "num_query_heads": 4,
    "num_key_value_heads": 1,
    "hidden_dim": 640,
    "head_dim": 256,
}
MLP = 2048
PROMPT = 40


def transformers_peer(new: int, ids: np.ndarray) -> dict[str, Callable[[], Any]]:
    import sys

    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from torchvision_cpu import define_torchvision_operators

    define_torchvision_operators()
    import transformers

    torch.set_num_threads(1)
    config = transformers.Gemma3TextConfig(
        vocab_size=SIZES["vocabulary_size"],
        hidden_size=SIZES["hidden_dim"],
        intermediate_size=MLP,
        num_hidden_layers=SIZES["num_layers"],
        num_attention_heads=SIZES["num_query_heads"],
        num_key_value_heads=SIZES["num_key_value_heads"],
        head_dim=SIZES["head_dim"],
        sliding_window=512,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    prompt = torch.as_tensor(ids.astype("int64"))

    def run(cache: str) -> Any:
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation=cache,
        )

    return {f"transformers_{cache}": lambda cache=cache: run(cache) for cache in ("static",)}


def keras_hub_peer(inputs: dict[str, np.ndarray]) -> dict[str, Callable[[], Any]]:
    import keras_hub

    backbone = keras_hub.models.GemmaBackbone(**SIZES, intermediate_dim=2 * MLP)
    model = keras_hub.models.GemmaCausalLM(backbone=backbone, preprocessor=None)
    model.compile(sampler="greedy")

    def run() -> Any:
        return model.generate({k: v.copy() for k, v in inputs.items()}, stop_token_ids=None)

    return {"keras_hub": run}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results")
    arguments = parser.parse_args()
    ids = np.random.default_rng(0).integers(3, SIZES["vocabulary_size"], (1, PROMPT))
    room = ((0, 0), (0, arguments.new))
    inputs = {
        "token_ids": np.pad(ids.astype("int32"), room),
        "padding_mask": np.pad(np.ones((1, PROMPT), "int32"), room),
    }
    if BACKEND == "torch":
        fields = {**SIZES, **GEMMA_3, "intermediate_dim": MLP, "sliding_window_size": 512}
        peers = transformers_peer(arguments.new, ids)
    else:
        fields = {**SIZES, "intermediate_dim": 2 * MLP}
        peers = keras_hub_peer(inputs)
    model = GemmaCausalLM(GemmaBackbone(**fields))
    runs = {"kmodels": lambda: model.generate(inputs, stop_token_ids=None), **peers}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.rounds + 1):
        for name, run in runs.items():
            begun = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begun)
    rows = {
        name: {
            "first_s": round(values[0], 2),
            "ms_per_token": round(1e3 * statistics.median(values[1:]) / arguments.new, 2),
            "best_ms_per_token": round(1e3 * min(values[1:]) / arguments.new, 2),
        }
        for name, values in times.items()
    }
    print(json.dumps(rows, indent=1))
    if arguments.write:
        names = ("keras", BACKEND, "transformers" if BACKEND == "torch" else "keras-hub")
        content = {
            "question": "How long does a generated token take?",
            "backend": BACKEND,
            "device": platform.processor() or platform.machine(),
            "versions": {name: importlib.metadata.version(name) for name in names},
            "new_tokens": arguments.new,
            "rows": rows,
        }
        date = time.strftime("%Y-%m-%d")
        target = RESULTS / f"gemma_generate_{BACKEND}_cpu_{date}.json"
        target.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
