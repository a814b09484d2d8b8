"""Are steps of `fit`, of LoRA and of `generate` as fast as in another revision?

    KERAS_BACKEND=jax python benchmarks/steps.py OTHER/src src [--rounds 31] [--write]

Each source, a folder that holds the package, has a process with tiny debug models on one core. The
processes take turns, and the ratio of a round is that of two neighboring turns.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import record
from vit_peers.results import revision

QUESTION = (__doc__ or "").splitlines()[0]
BACKEND = os.environ.get("KERAS_BACKEND", "torch")
KINDS = ("fit", "lora", "generate")
STEPS = 20


def work() -> None:
    """The child: runs the kind of each line of stdin, and answers with its seconds."""
    answers, sys.stdout = sys.stdout, sys.stderr
    import keras
    import numpy as np

    from kmodels.models import Gemma3CausalLM, ViTImageClassifier

    keras.utils.set_random_seed(0)
    vit = ViTImageClassifier.from_preset("vit_debug", num_classes=10)
    vit.compile(optimizer="adamw")
    gemma = Gemma3CausalLM.from_preset("gemma3_debug")
    gemma.backbone.enable_lora(4)
    gemma.compile(optimizer="adamw")
    shape = (32 * STEPS, *vit.backbone.config.image_shape)
    images = np.random.default_rng(0).normal(size=shape).astype("float32")
    classes = np.arange(32 * STEPS) % 10
    ids = (np.arange(4 * STEPS * 65).reshape(-1, 65) * 7) % 200
    run = {
        "fit": lambda: vit.fit(images, classes, batch_size=32, verbose=0),
        "lora": lambda: gemma.fit(ids[:, :-1], ids[:, 1:], batch_size=4, verbose=0),
        "generate": lambda: gemma.generate(ids[:2, :16], max_new_tokens=32, stop_token_ids=None),
    }
    for kind in KINDS * 2:
        run[kind]()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        run[line.strip()]()
        print(time.perf_counter() - begun, file=answers, flush=True)


def begin(source: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, __file__, "--child"],
        env={**os.environ, **record.ONE_THREAD, "PYTHONPATH": str(source)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    ask(child)
    return child


def ask(child: subprocess.Popen[str], kind: str = "") -> str:
    assert child.stdin is not None and child.stdout is not None
    if kind:
        child.stdin.write(f"{kind}\n")
        child.stdin.flush()
    return child.stdout.readline().strip()


def main() -> None:
    if "--child" in sys.argv:
        work()
        return
    parser = record.flags(QUESTION)
    parser.add_argument("sources", type=Path, nargs=2)
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    children = [begin(source.resolve()) for source in options.sources]
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        seconds: tuple[list[float], list[float]] = [], []
        for turn in range(options.rounds):
            for one in (0, 1) if turn % 2 else (1, 0):
                seconds[one].append(float(ask(children[one], kind)))
        ratios = [new / old for old, new in zip(*seconds, strict=True)]
        row: dict[str, Any] = {"kind": kind}
        row["milliseconds"] = [round(1e3 * statistics.median(each), 2) for each in seconds]
        row["ratio"] = round(statistics.median(ratios), 3)
        row["quartiles"] = [round(x, 3) for x in statistics.quantiles(ratios, n=4)[::2]]
        rows.append(row)
        print(BACKEND, row, flush=True)
    for child in children:
        child.kill()
    if options.write:
        record.write(
            f"steps_{BACKEND}_cpu",
            QUESTION,
            ("keras", "numpy", BACKEND),
            unit=f"milliseconds of {STEPS} steps, or of 32 tokens; ratio: second by first",
            revisions=[revision(source.resolve()) for source in options.sources],
            rounds=options.rounds,
            rows=rows,
        )


if __name__ == "__main__":
    main()
