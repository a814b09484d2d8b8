"""What do a LoRA step's time and memory come to beside keras-hub and transformers with PEFT?

    python benchmarks/gemma_lora.py WEIGHTS [--shapes 270m|small|e2b] [--backends torch,jax]

Needs an environment with all of them. WEIGHTS is a directory of transformers; it is made with
random weights if it is not there: with the shapes of Gemma 3 270M (18 blocks of width 640,
vocabulary 262,144), those of a small Gemma 1 that its head dominates (6 blocks of width 512,
vocabulary 256,000), or the widths of Gemma 4 E2B in 4 blocks, of which two share keys and values
and have an MLP of twice the width; its config.json says widths by layer in keras-hub's words too,
which reads no others. A step is rank 4 on query and value, SGD, batch 2, rows of `length` and three
quarters of it, padded on the right, each system's own loss and weighted accuracy through its own
`fit` (transformers: a plain loop, attention by SDPA, eager and with `--compiled` compiled too).
`--loss-on responses` weighs the second half of each row alone. The source tree of another revision
takes part as `kmodels_before` with KMODELS_BEFORE=TREE. `--systems` with `floor` adds the products
of floor.py, which no code can leave out, and `floor_over` has their time over each system's.
`kmodels_positions` is kmodels with its loss divided by positions instead of learnt tokens.

Each system runs in a process of its own on one thread, where the other backends' frameworks cannot
be imported, since Keras would load them; what compiles does so from scratch. The systems of a
backend take steps in turn. Time is CPU time, the median of the rounds, in seconds; memory is the
peak of the process, in MiB. Ratios are kmodels over the peer: below 1 kmodels wins. Losses are per
weighted position, before any step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
from vit_peers import BEFORE
from vit_peers.child import hide_others

BATCH, RANK, RATE = 2, 4, 5e-5
WARM = 2  # steps that compile and fill caches
PRELOAD = Path(__file__).parents[1] / "tests"


def import_transformers() -> Any:
    """transformers, beside a CPU build of torch too."""
    sys.path.insert(0, str(PRELOAD))
    from torchvision_cpu import define_torchvision_operators  # pyright: ignore[reportMissingImports]

    define_torchvision_operators()
    import transformers

    return transformers


def make_weights(folder: Path, shapes: str) -> None:
    """Random weights as transformers writes them."""
    import torch

    transformers = import_transformers()
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    if shapes == "270m":
        config = transformers.Gemma3TextConfig(
            vocab_size=262144,
            hidden_size=640,
            intermediate_size=2048,
            num_hidden_layers=18,
            head_dim=256,
            sliding_window=512,
            query_pre_attn_scalar=256,
            **heads,
        )
        model = transformers.Gemma3ForCausalLM(config)
    elif shapes == "small":
        config = transformers.GemmaConfig(
            vocab_size=256000,
            hidden_size=512,
            intermediate_size=2048,
            num_hidden_layers=6,
            head_dim=128,
            **heads,
        )
        model = transformers.GemmaForCausalLM(config)
    else:
        kinds = ["sliding_attention", "full_attention"] * 2
        config = transformers.Gemma4TextConfig(
            vocab_size=262144,
            vocab_size_per_layer_input=262144,
            hidden_size=1536,
            intermediate_size=6144,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=1,
            head_dim=256,
            per_layer_config={i: {"head_dim": 512} for i in (1, 3)},
            hidden_size_per_layer_input=256,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            layer_types=kinds,
            sliding_window=512,
            final_logit_softcapping=30.0,
        )
        model = transformers.Gemma4ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    if shapes == "e2b":
        path = folder / "config.json"
        said = json.loads(path.read_text())
        path.write_text(json.dumps({**said, "global_head_dim": 512}, indent=2))


def batch(length: int, loss_on: str, vocabulary: int) -> dict:
    """Token ids, mask, labels and weights, (BATCH, length)."""
    import numpy as np

    rng = np.random.default_rng(0)
    tokens = rng.integers(3, vocabulary, (BATCH, length + 1)).astype("int32")
    mask = np.ones((BATCH, length), "int32")
    mask[1, length * 3 // 4 :] = 0
    tokens[:, :-1][mask == 0] = 0
    weights = np.zeros((BATCH, length), "float32")
    weights[:, :-1] = mask[:, 1:]  # a position counts where its target is a token
    if loss_on == "responses":
        for row, count in enumerate(mask.sum(1)):
            weights[row, : count // 2] = 0
    return {"tokens": tokens[:, :-1], "mask": mask, "labels": tokens[:, 1:], "weights": weights}


def keras_step(system: str, weights: str, dtype: str, data: dict) -> Callable[[], tuple]:
    """Makes a step of kmodels or keras-hub through `fit`; it returns (seconds, loss)."""
    import numpy as np

    if system.startswith("kmodels"):
        from kmodels.models import GemmaCausalLM as Task
    else:
        import keras_hub

        kind = json.loads((Path(weights) / "config.json").read_text())["model_type"]
        names = {"gemma3_text": "Gemma3CausalLM", "gemma4_text": "Gemma4CausalLM"}
        Task = getattr(keras_hub.models, names.get(kind, "GemmaCausalLM"))
    model = Task.from_preset(weights, preprocessor=None, dtype=dtype)
    model.backbone.enable_lora(RANK)
    x = {"token_ids": data["tokens"], "padding_mask": data["mask"]}
    if "position_ids" in getattr(model.backbone.input, "keys", tuple)():  # keras-hub's Gemma 4
        x["position_ids"] = np.tile(np.arange(data["mask"].shape[1], dtype="int32"), (BATCH, 1))
    more = {"loss_normalization": "positions"} if system == "kmodels_positions" else {}
    return fit_step(model, x, data, **more)


def fit_step(model, x: dict, data: dict, **more: str) -> Callable[[], tuple]:
    """Makes a step of a Keras model through `fit`; it returns (seconds, loss)."""
    import keras

    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(RATE),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
        **more,
    )
    # A mean over positions, unless it is one over learnt tokens.
    per_token = getattr(model, "loss_normalization", "positions") == "tokens"
    scale = 1.0 if per_token else data["weights"].size / data["weights"].sum()

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.begun = time.process_time()

        def on_train_batch_end(self, batch, logs: Any = None):
            self.loss = float(logs["loss"]) * scale  # which waits for the step
            self.seconds = time.process_time() - self.begun

    watch = Watch()

    def step() -> tuple[float, float]:  # an epoch of one step, so that the loss is that of the step
        options = {"batch_size": len(data["labels"]), "verbose": 0, "callbacks": [watch]}
        model.fit(x, data["labels"], sample_weight=data["weights"], **options)
        return watch.seconds, watch.loss

    return step


def transformers_step(system: str, weights: str, dtype: str, data: dict) -> Callable[[], tuple]:
    """Makes a step of transformers with PEFT; it returns (seconds, loss)."""
    import torch

    transformers = import_transformers()
    import peft

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        weights, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    settings = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(model, settings)
    model.train()
    run = torch.compile(model) if system == "transformers_compiled" else model
    tensors = {name: torch.from_numpy(array) for name, array in data.items()}
    labels = torch.where(tensors["weights"] > 0, tensors["labels"].long(), -100)
    given = {
        "input_ids": tensors["tokens"].long(),
        "attention_mask": tensors["mask"],
        "shift_labels": labels,
        "labels": labels,
    }
    return loop_step(model, run, given)


def loop_step(model, run: Callable, given: dict) -> Callable[[], tuple]:
    """Makes a step of a plain loop; it returns (seconds, loss)."""
    import torch

    chosen = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(chosen, RATE)

    def step() -> tuple[float, float]:
        begun = time.process_time()
        loss = run(**given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - begun, loss.item()

    return step


def serve(system: str, weights: str, dtype: str, length: int, loss_on: str) -> None:
    """A child's side: for each line that comes in, a step, and a line about it."""
    hide_others(os.environ["KERAS_BACKEND"])
    config = json.loads((Path(weights) / "config.json").read_text())
    data = batch(length, loss_on, config["vocab_size"])
    make = transformers_step if system.startswith("transformers") else keras_step
    step = make(system, weights, dtype, data)
    answer(step)


def answer(step: Callable[[], tuple]) -> None:
    """Takes a step for each line that comes in, and prints a line about it."""
    for _ in sys.stdin:
        seconds, loss = step()
        peak = record.status("VmHWM") / 2**20
        print(json.dumps({"step_s": seconds, "loss": float(loss), "peak_mb": peak}), flush=True)


class Child:
    """A system in a process of its own, which a script serves."""

    def __init__(self, backend: str, arguments: list, script: str = __file__):
        environment = {**os.environ, **record.ONE_THREAD, "KERAS_BACKEND": backend}
        environment["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
        if arguments[0] == "kmodels_before":
            environment["PYTHONPATH"] = str(Path(str(BEFORE)) / "src")
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, script, "--child", json.dumps(arguments)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.stdin: Any = self.process.stdin
        self.stdout: Any = self.process.stdout
        self.arguments, self.rows = arguments, []

    def step(self) -> None:
        """One step; what came before its line is the system's own printing."""
        self.stdin.write("\n")
        self.stdin.flush()
        for line in self.stdout:
            if line.startswith('{"step_s"'):
                self.rows.append(json.loads(line))
                return
        self.log.seek(0)
        text = self.log.read().decode(errors="replace")
        raise SystemExit(f"{self.arguments} failed:\n{text[-3000:]}")

    def result(self) -> dict:
        """The median after the first steps; ends the process."""
        self.stdin.close()
        self.process.wait()
        times = [row["step_s"] for row in self.rows[WARM:]]
        return {
            "step_s": round(statistics.median(times), 3),
            "step_s_range": [round(min(times), 3), round(max(times), 3)],
            "first_step_s": round(self.rows[0]["step_s"], 1),
            "peak_mb": round(self.rows[-1]["peak_mb"]),
            "first_loss": round(self.rows[0]["loss"], 5),
        }


def compare(backend: str, arguments: list, options: argparse.Namespace) -> dict:
    """Steps of all systems of a backend in turn, or of those chosen; what came of each."""
    chosen, rounds, shapes = options.systems, options.rounds, options.shapes
    systems = ["kmodels", *(["kmodels_before"] if BEFORE else []), "keras_hub"]
    if backend == "torch":
        systems += ["transformers", *(["transformers_compiled"] if options.compiled else [])]
    systems += ["kmodels_positions"] if "kmodels_positions" in chosen else []
    systems = [system for system in systems if not chosen or system in chosen]
    children = {system: Child(backend, [system, *arguments]) for system in systems}
    if "floor" in chosen:
        _, dtype, length, _ = arguments
        child = ["floor", shapes, dtype, length]
        children["floor"] = Child(backend, child, str(Path(__file__).with_name("floor.py")))
    found = take_turns(children, rounds)
    for name in ("peak_mb", "first_loss"):  # which say nothing of products alone
        found.get("floor", {}).pop(name, None)
    return found


def take_turns(children: dict[str, Child], rounds: int) -> dict:
    """Steps of all children; what came of each."""
    for child in children.values():  # compile one after the other, then take turns
        for _ in range(WARM):
            child.step()
    for turn in range(rounds):
        order = list(children.values())
        for child in order[turn % len(order) :] + order[: turn % len(order)]:
            child.step()
    return {system: child.result() for system, child in children.items()}


def ratios(found: dict, others: dict) -> dict:
    """Time and peak of kmodels over each peer; of another backend's peers the peak alone."""
    ours = found["kmodels"]
    result = {}
    for system, theirs in {**others, **found}.items():
        if system == "kmodels":
            continue
        if system == "floor":
            floor = theirs["step_s"]
            steps = {name: row for name, row in found.items() if name != "floor"}
            result["floor_over"] = {k: round(floor / v["step_s"], 3) for k, v in steps.items()}
            continue
        result[f"over_{system}"] = {"peak": round(ours["peak_mb"] / theirs["peak_mb"], 3)}
        if system in found:
            result[f"over_{system}"]["time"] = round(ours["step_s"] / theirs["step_s"], 3)
    return result


def write(options: argparse.Namespace, rows: list[dict]) -> None:
    """Writes the rows that there are into benchmarks/results."""
    label = "_".join(
        [options.shapes, str(options.length), options.dtypes.replace(",", "-")]
        + (["revisions"] if options.systems == ["kmodels", "kmodels_before"] else [])
        + (["floor"] if "floor" in options.systems else [])
        + (["positions"] if "kmodels_positions" in options.systems else [])
        + (["responses"] if options.loss_on == "responses" else [])
        + ([options.backends.replace(",", "-")] if options.backends.count(",") < 2 else [])
    )
    record.write(
        f"gemma_lora_{label}_cpu",
        __doc__,
        ("keras", "keras-hub", "transformers", "peft", "torch", "jax", "tensorflow"),
        clock="process CPU",
        threads=1,
        shapes=options.shapes,
        loss_on=options.loss_on,
        rounds=options.rounds,
        rows=rows,
    )


def main() -> None:
    parser = record.flags(__doc__)
    parser.add_argument("weights", type=Path, nargs="?")
    parser.add_argument("--backends", default="torch,jax,tensorflow")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--shapes", default="270m", choices=("270m", "small", "e2b"))
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--loss-on", default="all", choices=("all", "responses"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--systems", nargs="*", default=[], help="kmodels and some others")
    parser.add_argument("--compiled", action="store_true", help="transformers compiled, too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(*json.loads(options.child))
        return
    if not options.weights.is_dir():
        make_weights(options.weights, options.shapes)
    rows = []
    for dtype in options.dtypes.split(","):
        others: dict = {}
        for backend in options.backends.split(","):
            arguments = [str(options.weights), dtype, options.length, options.loss_on]
            found = compare(backend, arguments, options)
            losses = [row["first_loss"] for name, row in found.items() if name != "floor"]
            rows.append({"dtype": dtype, "backend": backend, "length": options.length})
            rows[-1] |= {"loss_spread": round(max(losses) - min(losses), 5)}
            rows[-1] |= {**found, **ratios(found, others)}
            others |= {name: row for name, row in found.items() if name.startswith("transformers")}
            print(json.dumps(rows[-1]), flush=True)
            if options.write:  # what is there, should the rest be stopped
                write(options, rows)


if __name__ == "__main__":
    main()
