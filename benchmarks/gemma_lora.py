"""What do a LoRA step's time and memory come to beside keras-hub and transformers with PEFT?

    python benchmarks/gemma_lora.py WEIGHTS [--backends torch,jax] [--length 256] [--write]

Needs an environment with all three. WEIGHTS is a directory of transformers with the shapes of Gemma
3 270M (18 blocks of width 640, vocabulary 262,144); it is made with random weights if it is not
there. A step is rank 4 on query and value, SGD, batch 2, rows of `length` and three quarters of it,
padded on the right, each system's own loss and weighted accuracy through its own `fit`
(transformers: a plain loop). Each system runs in a process of its own on one thread. Time is CPU
time, the median of the steps after the first two, in seconds; memory is the peak of the process, in
MiB. Ratios are kmodels over the peer: below 1 kmodels wins. Losses are per weighted position.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
BATCH, RANK, RATE, WARM = 2, 4, 5e-5, 2
PRELOAD = Path(__file__).parents[1] / "tests"


def import_transformers():
    """transformers, beside a CPU build of torch too."""
    sys.path.insert(0, str(PRELOAD))
    from torchvision_cpu import define_torchvision_operators

    define_torchvision_operators()
    import transformers

    return transformers


def make_weights(folder: Path) -> None:
    """A Gemma 3 270M with random weights, as transformers writes it."""
    import torch

    transformers = import_transformers()
    config = transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        query_pre_attn_scalar=256,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def batch(length: int) -> dict:
    """Token ids, mask, labels and weights, (BATCH, length)."""
    import numpy as np

    rng = np.random.default_rng(0)
    tokens = rng.integers(3, 262144, (BATCH, length + 1)).astype("int32")
    mask = np.ones((BATCH, length), "int32")
    mask[1, length * 3 // 4 :] = 0
    tokens[:, :-1][mask == 0] = 0
    weights = np.zeros((BATCH, length), "float32")
    weights[:, :-1] = mask[:, 1:]  # a position counts where its target is a token
    return {"tokens": tokens[:, :-1], "mask": mask, "labels": tokens[:, 1:], "weights": weights}


def keras_steps(system: str, weights: str, dtype: str, length: int, steps: int) -> dict:
    """Steps of kmodels or keras-hub through `fit`."""
    import keras

    if system == "kmodels":
        from kmodels.models import GemmaCausalLM as Task
    else:
        from keras_hub.models import Gemma3CausalLM as Task
    model = Task.from_preset(weights, preprocessor=None, dtype=dtype)
    model.backbone.enable_lora(RANK)
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(RATE),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    data = batch(length)
    scale = data["weights"].size / data["weights"].sum()
    clock = Clock()

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            clock.start()

        def on_train_batch_end(self, batch, logs=None):
            clock.stop(float(logs["loss"]) * scale)

    x = {"token_ids": data["tokens"], "padding_mask": data["mask"]}
    for _ in range(WARM + steps):  # an epoch of one step, so that the loss is that of the step
        model.fit(
            x,
            data["labels"],
            sample_weight=data["weights"],
            batch_size=BATCH,
            verbose=0,
            callbacks=[Watch()],
        )
    return clock.result()


def transformers_steps(weights: str, dtype: str, length: int, steps: int) -> dict:
    """Steps of transformers with PEFT, attention by SDPA, eager."""
    import torch

    transformers = import_transformers()
    import peft

    torch.set_num_threads(1)
    model = transformers.Gemma3ForCausalLM.from_pretrained(
        weights, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    settings = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(model, settings)
    model.train()
    data = {name: torch.from_numpy(array) for name, array in batch(length).items()}
    labels = torch.where(data["weights"] > 0, data["labels"].long(), -100)
    chosen = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(chosen, RATE)
    clock = Clock()
    for _ in range(WARM + steps):
        clock.start()
        loss = model(
            input_ids=data["tokens"].long(),
            attention_mask=data["mask"],
            shift_labels=labels,
            labels=labels,
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.stop(loss.item())
    return clock.result()


class Clock:
    def __init__(self):
        self.times, self.losses = [], []

    def start(self):
        self._begun = time.process_time()

    def stop(self, loss: float):
        self.times.append(time.process_time() - self._begun)
        self.losses.append(float(loss))

    def result(self) -> dict:
        text = Path("/proc/self/status").read_text()
        return {
            "step_s": round(statistics.median(self.times[WARM:]), 3),
            "peak_mb": round(int(text.split("VmHWM:")[1].split()[0]) / 1024),
            "first_loss": round(self.losses[0], 5),
        }


def child(backend: str, arguments: list) -> dict:
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{arguments} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path, nargs="?")
    parser.add_argument("--backends", default="torch,jax,tensorflow")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        system, *rest = json.loads(options.child)
        if system == "transformers":
            print(json.dumps(transformers_steps(*rest)))
        else:
            print(json.dumps(keras_steps(system, *rest)))
        return
    if not options.weights.is_dir():
        make_weights(options.weights)
    rows = []
    for dtype in options.dtypes.split(","):
        for backend in options.backends.split(","):
            systems = ["kmodels", "keras_hub", *(["transformers"] if backend == "torch" else [])]
            found = {}
            for system in systems:
                arguments = [system, str(options.weights), dtype, options.length, options.steps]
                found[system] = child(backend, arguments)
            ours = found["kmodels"]
            ratios = {
                f"over_{system}": {
                    "time": round(ours["step_s"] / theirs["step_s"], 3),
                    "peak": round(ours["peak_mb"] / theirs["peak_mb"], 3),
                }
                for system, theirs in found.items()
                if system != "kmodels"
            }
            rows.append({"dtype": dtype, "backend": backend, "length": options.length})
            rows[-1] |= {**found, **ratios}
            print(json.dumps(rows[-1]), flush=True)
    if options.write:
        date = time.strftime("%Y-%m-%d")
        packages = ("keras", "keras-hub", "transformers", "peft", "torch", "jax", "tensorflow")
        content = {
            "question": __doc__.splitlines()[0],
            "device": platform.processor() or platform.machine(),
            "versions": {name: importlib.metadata.version(name) for name in packages},
            "clock": "process CPU",
            "threads": 1,
            "date": date,
            "rows": rows,
        }
        RESULTS.mkdir(exist_ok=True)
        names = options.backends.replace(",", "-")
        target = RESULTS / f"gemma_lora_{names}_{options.length}_cpu_{date}.json"
        target.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
