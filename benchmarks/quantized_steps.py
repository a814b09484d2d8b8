"""How long does a step of LoRA take on a base of few bits, and on the base in bfloat16?

    KERAS_BACKEND=torch python benchmarks/quantized_steps.py [--rounds 9] [--write]

Three layers of the widths of Gemma 3 1B, one model for each mode, all in one process: a round takes
one step of each in turn, by `train_on_batch`. Figures are CPU milliseconds of the process, the
median of the rounds; `ratio` is that of a mode over bfloat16.
"""

import json
import statistics
import time
from typing import Any

import keras
import numpy as np
import record

from kmodels import training
from kmodels.models import GemmaCausalLM

BACKEND = keras.backend.backend()
WIDTHS: dict[str, Any] = {
    **{"num_layers": 3, "num_query_heads": 4, "num_key_value_heads": 1, "hidden_dim": 1152},
    **{"intermediate_dim": 6912, "head_dim": 256, "vocabulary_size": 4096},
    "sliding_window_size": 128,
}
MODES = ("bfloat16", "int8", "int4", "nf4")


def made(mode: str) -> GemmaCausalLM:
    model = GemmaCausalLM.from_preset("gemma3_debug", dtype="bfloat16", preprocessor=None, **WIDTHS)
    if mode != "bfloat16":
        model.quantize(mode)
    model.enable_lora(8, targets="all-linear")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(training.AdamW(1e-4), loss)
    return model


def main() -> None:
    parser = record.flags(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512])
    options = parser.parse_args()
    if BACKEND == "torch":
        import torch

        torch.set_num_threads(1)
    models = {mode: made(mode) for mode in MODES}
    rows = []
    for tokens in options.tokens:
        ids = np.random.default_rng(0).integers(3, 4096, (1, tokens)).astype("int32")
        inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        for turn in range(-2, options.rounds):
            for mode, model in models.items():
                begun = time.process_time()
                model.train_on_batch(inputs, ids)
                if turn >= 0:
                    times[mode].append(1e3 * (time.process_time() - begun))
        medians = {mode: statistics.median(values) for mode, values in times.items()}
        for mode, median in medians.items():
            row = {"mode": mode, "tokens": tokens, "ms": round(median, 1)}
            rows.append(row | {"ratio": round(median / medians["bfloat16"], 3)})
            print(json.dumps(rows[-1]), flush=True)
    if options.write:
        content = {"backend": BACKEND, "threads": 1, "rounds": options.rounds, "rows": rows}
        record.write(f"quantized_steps_{BACKEND}_cpu", __doc__, ("keras", BACKEND), **content)


if __name__ == "__main__":
    main()
