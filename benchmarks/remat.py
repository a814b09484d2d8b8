"""What does computing again in place of keeping save, and cost, in a step of a ViT?

    python benchmarks/remat.py [--backends torch,torch_mmap,jax,jax_in_order,tensorflow] [--depth 4]
        [--modes none,mlp,attention,block] [--precision float32] [--dropout 0.1] [--write]

ViT-S/16 at 224 pixels, batch 8, AdamW, through `fit`, on one thread. Each mode is a process of its
own, `--rounds` times in turn; a figure is the median over the rounds. `peak` is the most memory
from the first step on, `steps` from the second on, when compiling is over (VmHWM); both in MiB,
above what the process held before the model was built, and `planned` is what `kmodels plan`
foretells of `peak`. `cpu_s` is the CPU time of a step, the median over the steps after the second.
`jax_in_order` has XLA's flag that keeps its scheduler on a CPU from starting all that it can, and
`torch_mmap` an environment in which glibc gives what is free back to the system.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import record

QUESTION = "What does computing again in place of keeping save, and cost, in a step of a ViT?"
PRESET, IMAGE, BATCH, STEPS = "vit_small_patch16_224", 224, 8, 6
IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
# name -> (backend, environment)
BACKENDS = {
    "torch": ("torch", {}),
    "torch_mmap": ("torch", {"MALLOC_MMAP_THRESHOLD_": "1048576"}),
    "jax": ("jax", {}),
    "jax_in_order": ("jax", {"XLA_FLAGS": f"{ONE_THREAD} {IN_ORDER}"}),
    "tensorflow": ("tensorflow", {}),
}
MIB = 2**20


def measure(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Plans, then trains."""
    import keras
    import numpy as np

    from kmodels import training
    from kmodels.layers import remat
    from kmodels.models import ViTImageClassifier
    from kmodels.tools.plan import Plan, Setup

    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)

    sizes = {
        "num_layers": options.depth,
        "dropout_rate": options.dropout,
        "attention_dropout": options.dropout,
    }
    setup = Setup(BATCH, precision=options.precision, remat=mode)
    planned = Plan(PRESET, setup, overrides=sizes).bytes
    base = record.status("VmRSS")
    task = ViTImageClassifier.from_preset(PRESET, dtype=options.precision, **sizes)
    remat.rematerialize(task.backbone, mode)
    task.compile(training.AdamW(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    images = rng.standard_normal((BATCH * STEPS, IMAGE, IMAGE, 3), "float32")
    labels = rng.integers(0, 1000, len(images)).astype("int32")
    times, peaks = [], []

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            assert logs is not None and np.isfinite(float(logs["loss"]))  # waits for the step
            times.append(time.process_time())
            if batch == 0:
                peaks.append(record.status("VmHWM"))
                Path("/proc/self/clear_refs").write_text("5")

    Path("/proc/self/clear_refs").write_text("5")
    task.fit(images, labels, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[Steps()])
    peaks.append(record.status("VmHWM"))
    return {
        "planned": round(planned / MIB),
        "peak": round((max(peaks) - base) / MIB),
        "steps": round((peaks[-1] - base) / MIB),
        "cpu_s": round(statistics.median(np.diff(times[1:])), 4),
    }


def child(name: str, mode: str, arguments: list[str]) -> dict[str, Any]:
    backend, own = BACKENDS[name]
    environment = {"XLA_FLAGS": ONE_THREAD, "JAX_PLATFORMS": "cpu", **own}
    return record.child(__file__, backend, *arguments, "--child", mode, **environment)


def main() -> None:
    parser = record.flags(QUESTION)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--modes", default="none,mlp,attention,block")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options)))
        return
    rows = []
    for name in options.backends.split(","):
        found: dict[str, list[dict[str, Any]]] = {}
        for _ in range(options.rounds):
            for mode in options.modes.split(","):
                found.setdefault(mode, []).append(child(name, mode, sys.argv[1:]))
        for mode, rounds in found.items():
            row = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
            rows.append({"backend": name, "mode": mode, **row})
            print(json.dumps(rows[-1]), flush=True)
    if options.write:
        used = sorted({BACKENDS[row["backend"]][0] for row in rows})
        record.write(
            f"remat_{'-'.join(used)}_{options.precision}_cpu",
            QUESTION,
            ("keras", *used),
            threads=1,
            depth=options.depth,
            precision=options.precision,
            dropout=options.dropout,
            rounds=options.rounds,
            rows=rows,
        )


if __name__ == "__main__":
    main()
