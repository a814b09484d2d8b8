"""What share of a ViT's step is left with patch dropout, and with token merging?

    KERAS_BACKEND=torch python benchmarks/fewer_tokens.py [--depth 12] [--rounds 7] [--write]

ViT-S/16 at 224 pixels, 197 tokens, batch 8, float32, one thread. All variants are in one process,
and each round takes one training step (`train_on_batch`, AdamW) and one `predict_on_batch` of each,
in turn. A figure is the median over the rounds of the CPU time of a call, in seconds, so what else
the machine does counts little; `share` is the median over the rounds of its ratio to the plain
model's call of the same round. Patch dropout does nothing outside of training.
"""

import statistics
import time
from typing import Any

import keras
import numpy as np
import record

from kmodels import training
from kmodels.models import ViTImageClassifier

QUESTION = "What share of a ViT's step is left with patch dropout, and with token merging?"
PRESET, BATCH = "vit_small_patch16_224", 8
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "patch_drop_rate=0.5": {"patch_drop_rate": 0.5},
    "token_merging=8": {"token_merging": 8},
    "token_merging=16": {"token_merging": 16},
}


def calls(fields: dict[str, Any], depth: int) -> dict[str, Any]:
    """A training step and a prediction of one variant."""
    model = ViTImageClassifier.from_preset(PRESET, num_layers=depth, **fields)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(training.AdamW(1e-4), loss)
    rng = np.random.default_rng(0)
    images = rng.standard_normal((BATCH, 224, 224, 3), "float32")
    labels = rng.integers(0, 1000, BATCH).astype("int32")
    found = {"train": lambda: model.train_on_batch(images, labels)}
    if "patch_drop_rate" not in fields:
        found["predict"] = lambda: model.predict_on_batch(images)
    return found


def measure(depth: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of CPU time and shares of each variant's calls."""
    held = {}
    for name, fields in VARIANTS.items():
        held |= {(name, kind): call for kind, call in calls(fields, depth).items()}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in held}
    for turn in range(rounds + 2):  # the first two compile and warm up
        for key, call in held.items():
            begun = time.process_time()
            call()
            if turn >= 2:
                seconds[key].append(time.process_time() - begun)
    rows = []
    for (name, kind), taken in seconds.items():
        plain = seconds["plain", kind]
        shares = [mine / other for mine, other in zip(taken, plain, strict=True)]
        rows.append(
            {
                "variant": name,
                "call": kind,
                "cpu_s": round(statistics.median(taken), 4),
                "share": round(statistics.median(shares), 3),
                "shares": [round(min(shares), 3), round(max(shares), 3)],
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measures, and writes what was found."""
    parser = record.flags(QUESTION)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    backend = keras.backend.backend()
    if backend == "torch":
        import torch

        torch.set_num_threads(1)
    if backend == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    rows = measure(options.depth, options.rounds)
    if options.write:
        record.write(
            f"fewer_tokens_{backend}_cpu",
            QUESTION,
            ("keras", backend),
            preset=PRESET,
            batch=BATCH,
            depth=options.depth,
            rounds=options.rounds,
            precision="float32",
            rows=rows,
        )


if __name__ == "__main__":
    main()
