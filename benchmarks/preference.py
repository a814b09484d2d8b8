"""What do a DPO step's time and memory come to beside a supervised step, logits, and TRL?

    python benchmarks/preference.py WEIGHTS [--backends torch,jax,tensorflow] [--write]

WEIGHTS is a directory of transformers, made by gemma_lora.py with the shapes of Gemma 3 270M if it
is not there (vocabulary 262,144). A step has 2 pairs of 256 tokens in bfloat16, whose second half
is the answer; rank 4 on query and value, SGD. The systems of a backend, which take steps in turn:

- dpo: the loss of recipes/prefer.py through `TrainStep.fit`
- logits: the same with a log-softmax of all logits, as recipes/dpo.py had it
- sft: the next token of the same four rows through `fit`, with the same weights
- trl: TRL's DPO loss on transformers with PEFT in a plain loop, on torch. PYTHONPATH has its
  folder, see tests/write_trl_losses.py

Each runs in a process of its own on one thread. Time is CPU time, the median of the rounds, in
seconds. `step_mb` is the peak of resident memory above what the process held before its first step,
`peak_mb` that of the process, in MiB. Ratios are dpo over each: below 1 dpo wins. The losses of
dpo, logits and trl before any step are log 2.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import record
from gemma_lora import RANK, RATE, Child, import_transformers, make_weights, take_turns
from vit_peers.child import hide_others

PAIRS, LENGTH, BETA = 2, 256, 0.1


def batch(vocabulary: int) -> tuple:
    """Token ids and weights of the next tokens, (PAIRS, 2, LENGTH + 1) and (PAIRS, 2, LENGTH)."""
    import numpy as np

    rng = np.random.default_rng(0)
    tokens = rng.integers(3, vocabulary, (PAIRS, 2, LENGTH + 1)).astype("int32")
    tokens[:, 1, : LENGTH // 2] = tokens[:, 0, : LENGTH // 2]
    weights = np.zeros((PAIRS, 2, LENGTH), "float32")
    weights[..., LENGTH // 2 - 1 :] = 1
    return tokens, weights


def keras_step(system: str, weights: str) -> Callable[[], tuple]:
    """Makes a step of kmodels; it returns (seconds, loss)."""
    import keras
    import numpy as np

    from kmodels import training
    from kmodels.models import GemmaCausalLM
    from kmodels.runs.recipe import load

    recipe = load("prefer")
    model: Any = GemmaCausalLM.from_preset(weights, preprocessor=None, dtype="bfloat16")
    model.enable_lora(RANK)
    tokens, learnt = batch(model.backbone.vocabulary_size)
    inputs = {"token_ids": tokens[..., :-1], "padding_mask": np.ones_like(tokens[..., :-1])}
    labels = tokens[..., 1:]
    optimizer = keras.optimizers.SGD(RATE)
    if system == "sft":
        inputs, labels, learnt = keras.tree.map_structure(
            lambda x: x.reshape(-1, LENGTH), (inputs, labels, learnt)
        )
        model.compile(optimizer)
    else:
        if system == "logits":
            type(model).log_probs = of_logits
        loss = recipe.pair_loss(training.PreferenceLoss(beta=BETA))
        model = training.TrainStep(model, loss)
        metrics = [keras.metrics.Mean(name=name) for name in recipe.OF_PAIRS]
        model.compile(optimizer, metrics=metrics)

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.begun = time.process_time()

        def on_train_batch_end(self, batch, logs: Any = None):
            self.loss = float(logs["loss"])  # which waits for the step
            self.seconds = time.process_time() - self.begun

    watch = Watch()

    def step() -> tuple[float, float]:
        options = {"batch_size": len(labels), "verbose": 0, "callbacks": [watch]}
        model.fit(inputs, labels, sample_weight=learnt, **options)
        return watch.seconds, watch.loss

    return step


def of_logits(model, x, y, sample_weight, training=False):
    """`CausalLM.log_probs` by a log-softmax."""
    from keras import ops

    rows = ops.log_softmax(ops.cast(model(x, training=training), "float32"))
    return ops.take_along_axis(rows, y[..., None], axis=-1)[..., 0] * sample_weight


def trl_step(weights: str) -> Callable[[], tuple]:
    """Makes a step of TRL's loss; it returns (seconds, loss)."""
    import torch

    transformers = import_transformers()
    import peft
    from trl import DPOTrainer  # pyright: ignore[reportMissingImports]
    from trl.trainer.utils import add_fused_lm_head  # pyright: ignore[reportMissingImports]

    from write_trl_losses import trainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        weights, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    tokens, _ = batch(model.config.vocab_size)
    # The fields that its trainer asks for.
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    settings = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(model, settings)
    model.train()
    this = trainer(
        ref_model=None,
        precompute_ref_logps=False,
        beta=BETA,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        ld_alpha=None,
        use_weighting=False,
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        f_divergence_type="reverse_kl",
        _tp_size=1,
    )
    this.model, this.accelerator.unwrap_model = model, lambda model: model
    # Chosen answers come first.
    ids = torch.from_numpy(tokens.swapaxes(0, 1).reshape(-1, LENGTH + 1)).long()
    answers = torch.zeros_like(ids)
    answers[:, LENGTH // 2 :] = 1
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": answers}
    chosen = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(chosen, RATE)

    def step() -> tuple[float, float]:
        begun = time.process_time()
        loss = DPOTrainer._compute_loss(this, model, inputs, False)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - begun, loss.item()

    return step


def serve(system: str, weights: str) -> None:
    """A child's side: for each line that comes in, a step, and a line about it."""
    hide_others(os.environ["KERAS_BACKEND"])
    step = trl_step(weights) if system == "trl" else keras_step(system, weights)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of reading the weights
    before = record.status("VmRSS") / 2**20
    for _ in sys.stdin:
        seconds, loss = step()
        peak = record.status("VmHWM") / 2**20
        row = {"step_s": seconds, "loss": loss, "peak_mb": peak, "step_mb": peak - before}
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = record.flags(__doc__)
    parser.add_argument("weights", type=Path, nargs="?")
    parser.add_argument("--backends", default="torch,jax,tensorflow")
    parser.add_argument("--systems", nargs="*", default=["dpo", "logits", "sft", "trl"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(*json.loads(options.child))
        return
    if not options.weights.is_dir():
        make_weights(options.weights, "270m")
    rows = []
    for backend in options.backends.split(","):
        systems = [x for x in options.systems if x != "trl" or backend == "torch"]
        arguments = str(options.weights)
        children = {x: Child(backend, [x, arguments], __file__) for x in systems}
        found = take_turns(children, options.rounds)
        for system, child in children.items():
            found[system]["step_mb"] = round(child.rows[-1]["step_mb"])
        rows.append({"backend": backend, **found})
        for name, row in found.items():
            if name != "dpo":
                rows[-1][f"over_{name}"] = {
                    key: round(found["dpo"][key] / row[key], 3)
                    for key in ("step_s", "step_mb", "peak_mb")
                }
        print(json.dumps(rows[-1]), flush=True)
    if options.write:
        record.write(
            "preference_cpu",
            __doc__,
            ("keras", "transformers", "peft", "trl", "torch", "jax", "tensorflow"),
            clock="process CPU",
            threads=1,
            pairs=PAIRS,
            length=LENGTH,
            rounds=options.rounds,
            rows=rows,
        )


if __name__ == "__main__":
    main()
