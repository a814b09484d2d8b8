"""What does an assistant save of the CPU time of a token, at best, and cost at worst?

    KERAS_BACKEND=torch python benchmarks/gemma_assisted.py [--peer] [--write]

A Gemma 3 of 145M parameters (24 blocks of width 640, vocabulary 16,384, random weights) is assisted
by one of its first two blocks, 22M. What the other blocks of the large one add is zero, so the
drafts are all right, and it takes as long as with any other weights. The wrong assistant has the
sign of its last norm turned. Greedy, one prompt of 40 tokens, one thread, five drafts. All systems
run in one process, interleaved; times are CPU time of a call, medians of the rounds after the
first, over that without an assistant. `--peer` has transformers do the same (on torch).
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import record

os.environ |= record.ONE_THREAD

import keras
import numpy as np
from gemma_lora import import_transformers

from kmodels.models import GemmaBackbone, GemmaCausalLM
from kmodels.models.gemma.presets import GEMMA_3

BACKEND = keras.backend.backend()
PROMPT, DRAFTS, VOCABULARY = 40, 5, 16384
BLOCKS, FIRST = 24, 2
ASSISTANTS = ("none", "right", "wrong")
Run = Callable[[], list[int]]


def make_models(dtype: str) -> dict[str, GemmaCausalLM]:
    """Returns the model, as "none", and its assistants."""
    found = {}
    for name in ASSISTANTS:
        keras.utils.set_random_seed(0)
        backbone: Any = GemmaBackbone(
            VOCABULARY, BLOCKS if name == "none" else FIRST, 4, 1, 640, 2048, 256, dtype, **GEMMA_3
        )
        for block in backbone.blocks[FIRST:]:
            for part in (block.attention.output_dense, block.mlp.down):
                part.kernel.assign(np.zeros(part.kernel.shape))
        if name == "wrong":  # a norm multiplies by 1 + scale
            backbone.final_norm.scale.assign(np.full(backbone.final_norm.scale.shape, -2.0))
        found[name] = GemmaCausalLM(backbone)
    return found


def kmodels_runs(
    models: dict[str, GemmaCausalLM], options: argparse.Namespace, ids: np.ndarray
) -> dict[str, Run]:
    """Returns how kmodels continues the prompt with each assistant."""
    model = models["none"]

    def run(**drafts: Any) -> list[int]:
        settings = {"max_new_tokens": options.new, "stop_token_ids": None}
        return model.generate(ids, **settings, **drafts)["token_ids"][0].tolist()

    def with_drafts(name: str) -> Run:
        drafts = {"assistant": models[name], "num_assistant_tokens": DRAFTS}
        return lambda: run(**drafts)

    return {"none": run, **{name: with_drafts(name) for name in ASSISTANTS[1:]}}


def transformers_runs(
    models: dict[str, GemmaCausalLM], options: argparse.Namespace, ids: np.ndarray
) -> dict[str, Run]:
    """Returns how transformers continues the prompt with each assistant."""
    import torch

    transformers = import_transformers()
    torch.set_num_threads(1)
    loaded: dict[str, Any] = {}
    for name, model in models.items():
        with tempfile.TemporaryDirectory() as folder:
            model.export_to_transformers(folder)
            loaded[name] = transformers.Gemma3ForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
            ).eval()
    prompt = torch.from_numpy(ids.astype("int64"))

    def run(assistant: Any) -> list[int]:
        if assistant is not None:
            config = assistant.generation_config
            config.num_assistant_tokens = DRAFTS
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0
        rows = loaded["none"].generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=options.new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            assistant_model=assistant,
        )
        return rows[0].tolist()

    held = {name: None if name == "none" else loaded[name] for name in ASSISTANTS}
    return {name: (lambda assistant=assistant: run(assistant)) for name, assistant in held.items()}


def main() -> None:
    """Runs the rounds, prints the figures and writes them."""
    parser = record.flags(__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--new", type=int, default=31)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", action="store_true", help="transformers too")
    options = parser.parse_args()
    models = make_models(options.dtype)
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (1, PROMPT)).astype("int32")
    systems = {"kmodels": kmodels_runs(models, options, ids)}
    if options.peer:
        systems["transformers"] = transformers_runs(models, options, ids)
    times: dict[tuple[str, str], list[float]] = {}
    tokens: dict[tuple[str, str], list[int]] = {}
    counts: dict[str, dict[str, int]] = {}
    for _ in range(options.rounds + 1):
        for name in ASSISTANTS:
            for system, its_runs in systems.items():
                begun = time.process_time()
                tokens[system, name] = its_runs[name]()
                times.setdefault((system, name), []).append(time.process_time() - begun)
                if system == "kmodels" and name != "none":
                    counts[name] = vars(models["none"].draft_counts).copy()
    seconds = {key: statistics.median(values[1:]) for key, values in times.items()}
    rows = {
        f"{system}_{name}": {
            "ms_per_token": round(1e3 * value / options.new, 2),
            "over_none": round(value / seconds[system, "none"], 3),
            "same_tokens": tokens[system, name] == tokens["kmodels", "none"],
        }
        for (system, name), value in seconds.items()
    }
    content = {
        "backend": BACKEND,
        "clock": "process CPU",
        "threads": 1,
        "dtype": options.dtype,
        "drafts": DRAFTS,
        "new_tokens": options.new,
        "rounds": options.rounds,
        "counts": counts,
        "rows": rows,
    }
    print(json.dumps(content, indent=1))
    if options.write:
        packages = ("keras", BACKEND, *(("transformers",) if options.peer else ()))
        name = f"gemma_assisted_{BACKEND}_{options.dtype}_cpu"
        record.write(name, __doc__, packages, **content)


if __name__ == "__main__":
    main()
