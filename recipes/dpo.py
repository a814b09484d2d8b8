"""Fine-tune Gemma with LoRA on preferred answers (DPO, Rafailov et al. 2023).

    python recipes/dpo.py         # a demonstration, offline, in minutes
    python recipes/dpo.py --weights DIR_OR_GGUF --data FILE.jsonl \\
        --sequence-length 512 --precision bfloat16 --learning-rate 5e-5 \\
        --beta 0.1

A line of FILE.jsonl holds three texts: prompt, chosen and rejected. The reference is the model
without its adapters, so it takes no additional memory. The run's directory gets result.json, the
adapter in PEFT's format, and the merged model.

`loss_function` below is the whole training step. The backend is KERAS_BACKEND's: jax, torch or
tensorflow. All flags: --help.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kmodels.runs import recipe
from kmodels.runs.recipe import flag


@dataclass(frozen=True)
class Settings(recipe.Common):
    preset: str = flag("gemma3_debug", "architecture of the demonstration, which --weights replace")
    weights: str | None = flag(None, "a Hugging Face directory, a .gguf file or a saved directory")
    data: str | None = flag(None, "a .jsonl file; default: instructions that come with kmodels")
    held_out: float = flag(0.1, "share of pairs held out for validation")
    sequence_length: int = flag(128, "tokens per row; longer rows are cut")
    beta: float = flag(0.1, "DPO beta: strength of the penalty for leaving the reference")
    # LoRA
    rank: int = flag(8, "LoRA rank")
    alpha: float | None = flag(None, "LoRA alpha; default: the rank (scale 1)")
    lora_dropout: float = flag(0.0, "LoRA dropout")
    targets: str = flag("query,value", "layers with adapters, or all-linear")
    # Optimizer
    precision: str = flag("float32", "policy", choices=("float32", "bfloat16", "mixed_bfloat16"))
    batch_size: int = flag(8, "pairs per step, over all devices")
    epochs: int = flag(2, "passes over the training pairs", small=1)
    learning_rate: float | None = flag(
        None, "highest learning rate; default: 1e-3, with --weights 5e-6"
    )
    schedule: str = flag(
        "cosine", "learning rate after the warm-up", choices=("cosine", "linear", "constant")
    )
    warmup: float = flag(0.1, "share of the steps used for learning-rate warm-up")
    clip_norm: float = flag(1.0, "gradient clipping: largest global norm; 0 for no limit")
    accumulate: int = flag(1, "gradient accumulation: batches per update")
    first_steps: int = flag(60, "training steps of the demonstration's base model", small=2)


# Settings that a resumed run must share with the one it continues; its checkpoint has a hash of the
# base weights.
FIXED = (
    *("preset", "data", "sequence_length", "beta", "rank", "alpha", "targets"),
    *("batch_size", "accumulate", "seed"),
)
VOCABULARY = 512
PAIRS = 200


def loss_function(beta: float) -> Callable[[Any, Any, bool], Any]:
    """Returns the DPO loss, -log sigmoid(beta * margin)."""
    import keras

    from kmodels import lora

    ops = keras.ops

    def loss_fn(model: Any, batch: Any, training: bool) -> Any:
        # Chosen and rejected side by side: (pairs, 2, tokens).
        inputs, labels, weights = batch
        flat = {name: ops.reshape(x, (-1, x.shape[-1])) for name, x in inputs.items()}
        in_loss = ops.cast(weights > 0, "float32")

        def log_likelihood(training: bool) -> Any:
            logits = model(flat, training=training)
            rows = ops.log_softmax(ops.cast(logits, "float32"))
            tokens = ops.reshape(labels, (-1, labels.shape[-1], 1))
            scores = ops.take_along_axis(rows, tokens, axis=-1)
            return ops.sum(ops.reshape(scores, ops.shape(labels)) * in_loss, axis=-1)

        with lora.disabled(model):
            reference = ops.stop_gradient(log_likelihood(False))
        change = log_likelihood(training) - reference
        margin = beta * (change[:, 0] - change[:, 1])
        real = ops.cast(
            ops.any(weights > 0, axis=(1, 2)), "float32"
        )  # The others fill up the batch.
        count = ops.maximum(ops.sum(real), 1.0)
        logs = {
            "accuracy": ops.sum(ops.cast(margin > 0, "float32") * real) / count,
            "margin": ops.sum(margin * real) / count,
        }
        return -ops.sum(ops.log_sigmoid(margin) * real) / count, logs

    return loss_fn


def train(settings: Settings, folder: recipe.Folder) -> None:
    recipe.at_least(settings, epochs=1, clip_norm=0, first_steps=1)
    recipe.check_fractions(settings, "warmup", "held_out")
    if settings.beta <= 0:
        raise recipe.InputError(f"--beta is {settings.beta}; give a number above 0, such as 0.1")
    from kmodels import training
    from kmodels.data import order
    from kmodels.runs import plots, results
    from kmodels.text import TextLoader, encode_pairs

    recipe.prepare(settings)
    # TRL's examples/scripts/dpo.py has this rate for adapters of real models.
    rate = 5e-6 if settings.weights else 1e-3
    settings = recipe.filled(settings, folder, learning_rate=rate)

    # === Data ===
    recipe.working(f"reading the data: {settings.data or 'pairs that come with kmodels'}")
    pairs = read_pairs(settings.data)
    count = min(max(round(settings.held_out * len(pairs)), 1), len(pairs) - 1)
    indices = order(len(pairs), settings.seed, 0)
    trained_on, held_out = ([pairs[i] for i in part] for part in (indices[count:], indices[:count]))

    # === Model ===
    origin: Any = settings.weights or folder.path / "base"
    if settings.weights is None and not (origin / "config.json").is_file():
        recipe.say("demonstration: trains a small Gemma here, without Google's weights")
        first_training(settings, pairs).save_to_preset(origin)
    recipe.working(f"reading the weights of {settings.weights or 'the demonstration'}")
    model = recipe.causal_lm_of(origin).from_preset(origin, dtype=settings.precision)
    if model.preprocessor is None:
        raise recipe.InputError(
            f"{origin} holds no tokenizer; put tokenizer.json next to the weights"
        )
    model.enable_lora(
        settings.rank,
        alpha=settings.alpha,
        dropout=settings.lora_dropout,
        targets=settings.targets.split(","),
    )

    # === Batches ===
    recipe.working("tokenizing the pairs")
    text = model.preprocessor
    text.sequence_length, text.loss_on = settings.sequence_length, "responses"
    size, shuffled = settings.batch_size, {"shuffle": True, "seed": settings.seed}
    loader = TextLoader(encode_pairs(text, trained_on), size, **shuffled)
    validation = TextLoader(encode_pairs(text, held_out), size)

    # === Training ===
    total = settings.steps or settings.epochs * len(loader)
    warmup = round(settings.warmup * total)
    schedule = training.WarmupSchedule(settings.learning_rate, total, warmup, settings.schedule)
    step = recipe.parallelize(training.TrainStep(model, loss_function(settings.beta)))
    step.compile(
        training.AdamW(
            schedule,
            weight_decay=0.0,
            clip_norm=settings.clip_norm or None,
            accumulate=settings.accumulate,
        )
    )
    facts = {
        "source": settings.data or "pairs that come with kmodels",
        "unit": "pairs",
        "train": len(trained_on),
        "validation": len(held_out),
        "details": str(text.cut),
    }
    steps = 0 if settings.evaluate else total
    recipe.introduce(
        folder, model, facts, steps=steps, steps_per_epoch=len(loader), best="val_loss"
    )
    runner = None
    if settings.evaluate:
        training.restore_newest(folder.path / "checkpoints", step)
    else:
        options = recipe.run_options(settings, FIXED)
        options |= {"best": "val_loss", "origin": str(origin)}
        runner = training.Runner(step, folder.path, loader, validation, schedule, **options)
        folder.write_config()
        runner.run()

    # === Results ===
    recipe.working("evaluating")
    logs = step.evaluate(validation, return_dict=True, verbose=0)
    metrics = {f"val_{name}": float(logs[name]) for name in ("loss", "accuracy", "margin")}
    metrics = (dict(runner.metrics) if runner else {}) | metrics
    recipe.working(None)
    recipe.say_metrics(metrics)
    content = results.result(folder, model, metrics, runner)
    if runner is None:
        folder.write_json("evaluation.json", content)
        return
    recipe.working("saving the adapter and the merged model")
    plots.curves(folder.path / "curves.png", runner.history.rows)
    adapter = folder.path / "adapter"
    model.save_adapter(adapter)
    if recipe.can_merge(model, origin, adapter):
        model.merge_lora()
        results.save_model(folder, model, content["metrics"])
    folder.write_json("result.json", content)


def read_pairs(path: str | None) -> list[dict[str, str]]:
    """Returns pairs; those of the demonstration reject the answer to another prompt."""
    from kmodels.text import demo
    from kmodels.text import read_pairs as read_file

    if path is not None:
        rows = read_file(path)
    else:
        records = demo.instructions().rows[:PAIRS]
        rows = [
            {
                "prompt": f"{row['instruction']}\n{row['context']}".strip() + "\n",
                "chosen": row["response"],
                "rejected": other["response"],
            }
            for row, other in zip(records, [*records[1:], records[0]], strict=True)
        ]
    if len(rows) < 2:
        raise recipe.InputError(
            f"the data has {len(rows)} pairs; give at least 2, one of them to hold out"
        )
    return rows


def first_training(settings: Settings, pairs: list[dict[str, str]]) -> Any:
    """Returns a small Gemma with its tokenizer, trained on both answers."""
    import keras

    from kmodels import training
    from kmodels.models import GemmaCausalLM, GemmaCausalLMPreprocessor
    from kmodels.text import TextLoader
    from kmodels.text.training import train_tokenizer

    texts = [row["prompt"] + row[name] for row in pairs for name in ("chosen", "rejected")]
    text = GemmaCausalLMPreprocessor(train_tokenizer(texts, VOCABULARY), settings.sequence_length)
    model = GemmaCausalLM.from_preset(
        settings.preset, vocabulary_size=text.tokenizer.vocabulary_size(), preprocessor=text
    )
    loader = TextLoader(text.pack(texts), 16, shuffle=True, seed=settings.seed)
    steps = settings.first_steps
    model = recipe.parallelize(model)
    model.compile(
        optimizer=training.AdamW(training.WarmupSchedule(3e-3, steps, steps // 10), clip_norm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    size = f"{model.count_params():,} parameters, {steps} steps"
    recipe.working(f"training the demonstration's base model: {size}")
    for epoch in range(-(-steps // len(loader))):
        loader.set_epoch(epoch)
        left = min(steps - epoch * len(loader), len(loader))
        model.fit(loader, steps_per_epoch=left, shuffle=False, verbose=0)
    return model


def main(argv: list[str] | None = None) -> int:
    return recipe.main("dpo", Settings, train, argv, __doc__)


if __name__ == "__main__":
    sys.exit(main())
