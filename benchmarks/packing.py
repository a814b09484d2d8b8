"""How many more useful tokens per second does packing train, and is each example's loss the same?

    python benchmarks/packing.py DATA.jsonl [--backends torch,jax,tensorflow] [--write]

A small Gemma with LoRA trains through `fit` on the records of DATA, one a row and padded, or
packed, in rows of the same length. Both go in turns within one process per backend, on one thread:
`--rounds` times `--steps` steps of each, after a warm-up. A useful token is one that counts in the
loss. Speed is the median over the steps of useful tokens per second of CPU time. `gain` is packed
over padded; `removed` is the share of the padded rows' positions that packing saves, and `bound`
what the gain would be if time went by positions alone. `loss_difference` is the largest relative
difference of an example's loss alone and packed, over `--examples` of them.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import record

SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_dim": 256,
    "intermediate_dim": 1024,
    "head_dim": 64,
}
VOCABULARY = 4096


def measure(settings: dict) -> dict:
    """Measures both ways in turns."""
    import keras
    import numpy as np

    from kmodels.models import GemmaCausalLM, GemmaCausalLMPreprocessor
    from kmodels.text import TextLoader, demo, read_records
    from kmodels.text.training import train_tokenizer

    rows = read_records(settings["data"]).rows
    tokenizer = train_tokenizer([demo.plain(row) for row in rows], VOCABULARY)
    text = GemmaCausalLMPreprocessor(tokenizer, settings["length"])
    keras.utils.set_random_seed(0)
    model = GemmaCausalLM.from_preset(
        "gemma3_debug",
        vocabulary_size=tokenizer.vocabulary_size(),
        preprocessor=text,
        sliding_window_size=settings["length"] // 2,
        **SIZES,
    )
    differences = compare(model, rows[: settings["examples"]])
    model.enable_lora(4)
    model.compile(optimizer=keras.optimizers.SGD(1e-4))
    ways = {"padded": text(rows), "packed": text.pack(rows)}
    loaders = {
        name: TextLoader(made, settings["batch"], shuffle=True) for name, made in ways.items()
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    clock = DataWaitTimer(keras)
    for turn in range(settings["rounds"] + 1):
        for name, loader in loaders.items():
            steps = min(settings["steps"], len(loader)) if turn else 2
            loader.set_epoch(turn)
            clock.times = []
            useful = [int(np.count_nonzero(loader[step][2])) for step in range(steps)]
            model.fit(
                loader, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[clock.callback]
            )
            if turn:  # the first one compiles
                found[name] += [n / t for n, t in zip(useful, clock.times, strict=True)]
    filled = {name: float(made[0]["padding_mask"].mean()) for name, made in ways.items()}
    speed = {name: statistics.median(values) for name, values in found.items()}
    count = {name: len(made[1]) for name, made in ways.items()}
    return {
        "backend": keras.backend.backend(),
        "records": len(rows),
        "rows": count,
        "filled": {name: round(share, 4) for name, share in filled.items()},
        "useful_tokens_per_s": {name: round(value, 1) for name, value in speed.items()},
        "gain": round(speed["packed"] / speed["padded"], 3),
        "bound": round(filled["packed"] / filled["padded"], 3),
        "removed": round(1 - count["packed"] / count["padded"], 4),
        "loss_difference": float(f"{max(differences):.2e}"),
    }


class DataWaitTimer:
    """CPU time of each step of `fit`."""

    def __init__(self, keras):
        clock = self

        class Watch(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                clock.begun = time.process_time()

            def on_train_batch_end(self, batch, logs: Any = None):
                float(logs["loss"])  # waits for the step
                clock.times.append(time.process_time() - clock.begun)

        self.times: list[float] = []
        self.begun = 0.0
        self.callback = Watch()


def compare(model, rows: list) -> list[float]:
    """Relative difference of each example's loss alone and packed."""
    import numpy as np

    def losses(batch) -> np.ndarray:
        inputs, labels, weights = batch
        logits = np.asarray(model.predict(inputs, batch_size=2, verbose=0), "float64")
        shifted = logits - logits.max(-1, keepdims=True)
        total = np.log(np.exp(shifted).sum(-1))
        right = np.take_along_axis(shifted, labels[..., None], -1)[..., 0]
        return (total - right) * weights

    alone, packed = model.preprocessor(rows), model.preprocessor.pack(rows)
    expected = {}
    for ids, mask, loss in zip(*alone[0].values(), losses(alone), strict=True):
        size = int(mask.sum()) - 1
        expected[tuple(ids[:size])] = loss.sum()
    found = []
    for ids, segments, loss in zip(
        packed[0]["token_ids"], packed[0]["segment_ids"], losses(packed), strict=True
    ):
        for segment in range(1, int(segments.max()) + 1):
            here = segments == segment
            whole = expected.get(tuple(ids[here]))
            if whole is not None:  # two examples cut to one length look alike but for their end
                found.append(abs(loss[here].sum() - whole) / whole)
    return found


def main() -> None:
    parser = record.flags(__doc__)
    parser.add_argument("data", help="a file of JSON lines, as recipes/gemma_lora.py takes")
    parser.add_argument("--backends", default="torch,jax,tensorflow")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--examples", type=int, default=48)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(json.loads(options.child))))
        return
    names = ("data", "length", "batch", "steps", "rounds", "examples")
    settings = {name: getattr(options, name) for name in names}
    rows = []
    for backend in options.backends.split(","):
        words = (settings["data"], "--child", json.dumps(settings))
        rows.append(record.child(__file__, backend, *words))
        print(json.dumps(rows[-1]), flush=True)
    if options.write:
        backends = options.backends.split(",")
        record.write(
            f"packing_{'-'.join(backends)}_cpu",
            __doc__,
            ("keras", "numpy", *backends),
            clock="process CPU",
            threads=1,
            settings={**settings, "data": Path(options.data).name},
            rows=rows,
        )


if __name__ == "__main__":
    main()
