"""How long does a generated token take, next to transformers (torch) and keras-hub (jax, tf)?

    KERAS_BACKEND=torch python benchmarks/gemma_generate.py WEIGHTS [--compiled] [--write]

Needs an environment with all three. WEIGHTS is a directory of transformers with the shapes of Gemma
3 270M (18 blocks of width 640, vocabulary 262,144, windows of 512); it is made with random weights
if it is not there. Greedy, one prompt of 40 tokens, one thread. All systems run in one process,
interleaved: in each round each continues the same prompt by `--new` tokens; transformers with its
static cache and SDPA. Times are CPU time of such a call over its tokens, the pass over the prompt
included, medians of the rounds after the first, which compiles. `--compiled` adds what
`torch.compile` makes of both. The ratio is kmodels' best over the peer's: below 1 kmodels wins.
`same_tokens` is how many tokens in a row equal those of kmodels; in bfloat16 near ties part ways.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record

os.environ |= record.ONE_THREAD

import keras
import numpy as np
from gemma_lora import import_transformers, make_weights

from kmodels.models import GemmaCausalLM

BACKEND = keras.backend.backend()
PEER = "transformers" if BACKEND == "torch" else "keras_hub"
PROMPT = 40
Run = Callable[[], list[int]]


def kmodels_run(options: argparse.Namespace, inputs: dict, **settings: Any) -> Run:
    """Continues the prompt by kmodels."""
    model = GemmaCausalLM.from_preset(options.weights, preprocessor=None, dtype=options.dtype)
    model.compile(**settings)
    return lambda: model.generate(inputs, stop_token_ids=None)["token_ids"][0].tolist()


def keras_hub_runs(options: argparse.Namespace, inputs: dict) -> dict[str, Run]:
    """Continues the prompt by keras-hub."""
    from keras_hub.models import Gemma3CausalLM

    model = Gemma3CausalLM.from_preset(str(options.weights), preprocessor=None, dtype=options.dtype)
    model.compile(sampler="greedy")
    # Its generate wants images if it has no preprocessor, of which there may be none.
    inputs = inputs | {"images": np.zeros((1, 0, 1, 1, 3), "float32")}
    return {
        "keras_hub": lambda: model.generate(dict(inputs), stop_token_ids=None)["token_ids"][
            0
        ].tolist()
    }


def transformers_runs(options: argparse.Namespace, ids: np.ndarray) -> dict[str, Run]:
    """Continues the prompt by transformers."""
    import torch

    transformers = import_transformers()
    torch.set_num_threads(1)
    model: Any = transformers.Gemma3ForCausalLM.from_pretrained(
        options.weights, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    ).eval()
    prompt = torch.from_numpy(ids.astype("int64"))

    def run(**settings: Any) -> list[int]:
        rows = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=options.new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation="static",
            **settings,
        )
        return rows[0].tolist()

    if not options.compiled:
        return {"transformers": run}
    config: Any = transformers.CompileConfig(fullgraph=False, mode="default", dynamic=False)
    config._compile_all_devices = True  # it leaves CPUs out otherwise
    return {"transformers": run, "transformers_compiled": lambda: run(compile_config=config)}


def runs(options: argparse.Namespace, ids: np.ndarray) -> dict[str, Run]:
    """Returns all systems by name."""
    room = ((0, 0), (0, options.new))
    inputs = {
        "token_ids": np.pad(ids, room),
        "padding_mask": np.pad(np.ones_like(ids), room),
    }
    if BACKEND != "torch":
        return {"kmodels": kmodels_run(options, inputs), **keras_hub_runs(options, inputs)}
    found = {"kmodels": kmodels_run(options, inputs, jit_compile=False)}
    if options.compiled:
        found["kmodels_compiled"] = kmodels_run(options, inputs, jit_compile=True)
    return {**found, **transformers_runs(options, ids)}


def common_start(a: list[int], b: list[int]) -> int:
    """Returns how many tokens behind the prompt are the same."""
    pairs = list(zip(a, b, strict=True))[PROMPT:]
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def main() -> None:
    """Runs the rounds, prints the figures and writes them."""
    parser = record.flags(__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compiled", action="store_true", help="torch.compile too")
    options = parser.parse_args()
    if not options.weights.is_dir():
        make_weights(options.weights, "270m")
    ids = np.random.default_rng(0).integers(3, 262144, (1, PROMPT)).astype("int32")
    systems = runs(options, ids)
    times: dict[str, list[float]] = {name: [] for name in systems}
    tokens: dict[str, list[int]] = {}
    for _ in range(options.rounds + 1):
        for name, run in systems.items():
            begun = time.process_time()
            tokens[name] = run()
            times[name].append(time.process_time() - begun)
    rows: dict[str, Any] = {
        name: {
            "first_s": round(values[0], 2),
            "ms_per_token": round(1e3 * statistics.median(values[1:]) / options.new, 2),
            "best_ms_per_token": round(1e3 * min(values[1:]) / options.new, 2),
            "same_tokens": common_start(tokens["kmodels"], tokens[name]),
        }
        for name, values in times.items()
    }

    def best(system: str) -> float:
        return min(row["ms_per_token"] for name, row in rows.items() if name.startswith(system))

    ratio = round(best("kmodels") / best(PEER), 3)
    content = {
        "backend": BACKEND,
        "clock": "process CPU",
        "threads": 1,
        "dtype": options.dtype,
        "prompt_tokens": PROMPT,
        "new_tokens": options.new,
        "rounds": options.rounds,
        "rows": rows,
        f"over_{PEER}": ratio,
    }
    print(json.dumps(content, indent=1))
    if options.write:
        packages = ("keras", BACKEND, PEER.replace("_", "-"))
        name = f"gemma_generate_270m_{BACKEND}_{options.dtype}_cpu"
        record.write(name, __doc__, packages, **content)


if __name__ == "__main__":
    main()
