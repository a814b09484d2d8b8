"""Fine-tune Gemma with LoRA on your own instructions.

    python recipes/gemma_lora.py  # a demonstration, offline, in minutes
    python recipes/gemma_lora.py --weights DIR_OR_GGUF --data FILE.jsonl
    python recipes/gemma_lora.py --weights DIR --data CHATS.jsonl \\
        --rank 64 --rslora --sequence-length 1024 --accumulate 4

A line of FILE.jsonl holds instruction, context and response (or input and output), prompts and
responses, messages with role and content, or text. The run's directory gets result.json with losses
and samples before and after, the adapter in PEFT's format, and the merged model.

Precision, loss, length of rows, packing and learning rate are chosen from the device, the data and
the model, and printed with their reasons, unless a flag sets them.

The backend is KERAS_BACKEND's: jax, torch or tensorflow. All flags: --help.
"""

import math
import sys
from dataclasses import asdict, dataclass
from typing import Any

from kmodels.runs import recipe
from kmodels.runs.recipe import flag


@dataclass(frozen=True)
class Settings(recipe.Common):
    preset: str = flag(
        "gemma3_debug",
        "architecture of the demonstration, which --weights replace",
        needs=("weights", None),
    )
    weights: str | None = flag(None, "a Hugging Face directory, a .gguf file or a saved directory")
    data: str | None = flag(None, "a .jsonl file; default: instructions that come with kmodels")
    workers: int = flag(0, "with --on: processes that train", needs=("on",))
    skip_bad: bool = flag(False, "skip bad lines and count them", needs=("data",))
    held_out: float = flag(0.1, "share of records held out for evaluation")
    # Text
    template: str = flag(
        "auto",
        "auto (chat template for messages, else instruction) | chat_template | instruction | "
        "alpaca | gemma | gemma4, or your own text",
    )
    loss_on: str = flag(
        "auto",
        "tokens in the loss; auto: of responses, if all records have one",
        choices=("auto", "all", "responses"),
    )
    sequence_length: int | None = flag(
        None, "tokens per row; default: 99 of 100 examples fit, at most 2048", small=64
    )
    pack: bool | None = flag(
        None, "pack several examples into each row; default: if that saves a tenth of the rows"
    )
    # LoRA
    rank: int = flag(16, "LoRA rank")
    alpha: float | None = flag(32.0, "LoRA alpha, divided by the rank")
    targets: str = flag("all-linear", "layers with adapters: names or patterns, or all-linear")
    lora_dropout: float = flag(0.0, "LoRA dropout")
    rslora: bool = flag(False, "rank-stabilized LoRA: divide alpha by the root of the rank")
    dora: bool = flag(False, "DoRA: train magnitude and direction separately")
    quantize: str | None = flag(
        None, "quantize the frozen base weights (QLoRA)", choices=("int8", "int4", "nf4", "fp4")
    )
    quantized: bool = flag(False, "keep kernels that a GGUF file has quantized, as base weights")
    remat: str = flag(
        "none",
        "recompute activations in the backward pass to save memory (gradient checkpointing)",
        choices=("none", "block", "attention", "mlp"),
    )
    # Optimizer
    precision: str = flag(
        "auto",
        "policy; auto: bfloat16 on accelerators, float32 on CPUs",
        choices=("auto", "float32", "bfloat16", "mixed_bfloat16"),
    )
    batch_size: int = flag(8, "rows per step, over all devices")
    epochs: int = flag(3, "passes over the training rows", small=1)
    learning_rate: float | None = flag(
        None, "highest learning rate; default: by the width of the model"
    )
    schedule: str = flag(
        "cosine", "learning rate after the warm-up", choices=("cosine", "linear", "constant")
    )
    warmup: float = flag(0.05, "share of the steps used for learning-rate warm-up")
    weight_decay: float = flag(0.0, "decoupled weight decay of the adapters")
    clip_norm: float = flag(1.0, "gradient clipping: largest global norm; 0 for no limit")
    accumulate: int = flag(1, "gradient accumulation: batches per update")
    loss_normalization: str = flag(
        "tokens",
        "divisor of the loss of an update: its learnt tokens, its positions, or its examples",
        choices=("tokens", "positions", "examples"),
    )
    non_finite: str = flag(
        "stop",
        "what to do when the loss or a gradient is NaN or infinite",
        choices=("stop", "skip"),
    )
    # Output
    ignore_memory_check: bool = flag(False, "start even if the estimate exceeds the memory")
    samples: int = flag(3, "held-out prompts answered before and after training", small=1)
    sample_tokens: int = flag(48, "longest answer in tokens", small=4, needs=("samples",))
    export: bool = flag(
        False, "also write the merged model for transformers", needs=("quantize", None)
    )
    first_steps: int = flag(
        120, "training steps of the demonstration's base model", small=2, needs=("weights", None)
    )


# Settings that a resumed run must share with the one it continues; its checkpoint has a hash of the
# base weights.
FIXED = (
    *("preset", "data", "held_out", "template", "loss_on", "sequence_length", "pack", "rank"),
    *("alpha", "targets", "rslora", "dora", "quantize", "batch_size", "accumulate", "seed"),
    *("loss_normalization", "first_steps"),
)
# The demonstration's base model is wider than the preset, which is made for tests.
DEMO = {"num_layers": 4, "hidden_dim": 128, "intermediate_dim": 384, "head_dim": 32}
VOCABULARY = 1024
BASE_LENGTH = 128
# Longer prompts are cut when the model answers samples.
LONGEST_PROMPT = 2048


def train(settings: Settings, folder: recipe.Folder) -> None:
    recipe.at_least(settings, epochs=1, clip_norm=0, samples=0, sample_tokens=1, first_steps=1)
    recipe.check_fractions(settings, "warmup", "held_out")
    import keras

    from kmodels import training
    from kmodels.layers import rematerialize
    from kmodels.lora import LoraSettings
    from kmodels.runs import plots, results
    from kmodels.text import TextLoader, demo, read_records
    from kmodels.tools.plan import recommend

    recipe.prepare(settings)
    if settings.weights is None:
        recipe.say("demonstration: trains a small Gemma here, without Google's weights")

    # === Data ===
    source = settings.data or "instructions that come with kmodels"
    recipe.working(f"reading the data: {source}")
    if settings.data is None:
        rows, skipped = demo.instructions().rows[550:], []
    else:
        records = read_records(settings.data, skip_bad=settings.skip_bad)
        rows, skipped = records.rows, records.skipped
    if skipped:
        recipe.say(f"skipped {len(skipped)} bad lines, the first: {skipped[0]}")
    trained_on, held_out = split(rows, settings.held_out, settings.seed)

    # === Model ===
    lora = LoraSettings(
        settings.rank,
        alpha=settings.alpha,
        dropout=settings.lora_dropout,
        targets=settings.targets.split(","),
        rslora=settings.rslora,
        dora=settings.dora,
    )
    optimizer(settings, settings.learning_rate or 1.0)  # Raises for wrong values.
    if settings.weights is None:
        origin = folder.path / "base"
        if not (origin / "config.json").is_file():
            first_training(settings).save_to_preset(origin)
    else:
        origin = settings.weights
    kind = recipe.causal_lm_of(origin)
    recipe.working("tokenizing the examples")
    text = kind.preprocessor_class.from_preset(origin, template=settings.template)
    choices = recommend.chosen(settings, trained_on, text)
    settings = recipe.filled(settings, folder, **{c.name: c.value for c in choices})
    recipe.working("estimating the memory of a step")
    check_memory(settings, lora)
    recipe.working(f"reading the weights of {settings.weights or 'the demonstration'}")
    model = kind.from_preset(origin, settings.precision, quantized=settings.quantized or None)
    text = model.preprocessor
    text.sequence_length, text.loss_on = settings.sequence_length, settings.loss_on
    text.template = settings.template
    if settings.learning_rate is None:
        choices.append(recommend.learning_rate(model.backbone))
        settings = recipe.filled(settings, folder, learning_rate=choices[-1].value)
    if choices:
        facts = {f"--{c.name.replace('_', '-')}": f"{c.value}: {c.reason}" for c in choices}
        recipe.say_facts("chosen settings", facts)

    # === Batches ===
    recipe.working("tokenizing the examples")
    make = text.pack if settings.pack else text
    loader = TextLoader(make(trained_on), settings.batch_size, shuffle=True, seed=settings.seed)
    validation = TextLoader(make(held_out), settings.batch_size)
    filled = float(loader.inputs["padding_mask"].mean())
    total = settings.steps or settings.epochs * len(loader)
    facts = {
        "source": source,
        "unit": "examples",
        "train": len(trained_on),
        "validation": len(held_out),
        "details": f"{loader.count} rows of {settings.sequence_length} tokens, {filled:.0%} filled;"
        f" {text.cut}",
    }
    best = "val_loss"
    recipe.introduce(folder, model, facts, steps=total, steps_per_epoch=len(loader), best=best)

    # === LoRA ===
    prompts = held_out[: settings.samples]
    if prompts and not recipe.can_generate(model):
        recipe.say("no samples: generate needs all weights, and each process holds a part of them")
        prompts = []
    recipe.working(f"answering {len(prompts)} samples before the training")
    before = {"answers": answers(model, prompts, settings)}
    if settings.quantize:
        recipe.working(f"quantizing the frozen weights to {settings.quantize}")
        model.backbone.quantize(settings.quantize)
    model.enable_lora(**asdict(lora))
    rematerialize(model.backbone, settings.remat)
    recipe.working(None)
    recipe.say(f"LoRA trains {trained(model)}")

    # === Optimizer and loss ===
    warmup = round(settings.warmup * total)
    schedule = training.WarmupSchedule(settings.learning_rate, total, warmup, settings.schedule)
    model = recipe.parallelize(model)
    model.compile(
        optimizer=optimizer(settings, schedule),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        loss_normalization=settings.loss_normalization,
    )
    recipe.working("evaluating before the training")
    before |= evaluate(model, validation)
    recipe.working(None)
    recipe.say(f"before: loss {before['loss']:.4f}  accuracy {before['accuracy']:.4f}")

    # === Training ===
    runner = recipe.fit(
        folder, model, loader, validation, schedule, FIXED, best=best, origin=str(origin)
    )

    # === Results ===
    recipe.working("evaluating after the training")
    after = evaluate(model, validation)
    metrics = runner.metrics if runner else {f"val_{name}": value for name, value in after.items()}
    recipe.working(f"answering {len(prompts)} samples after the training")
    after |= {"answers": answers(model, prompts, settings)}
    recipe.working(None)
    recipe.say(f"after:  loss {after['loss']:.4f}  accuracy {after['accuracy']:.4f}")
    for record, old, new in zip(prompts, before["answers"], after["answers"], strict=True):
        replies = {"before": one_line(old), "after": one_line(new)}
        recipe.say_facts(f"\n{recipe_prompt(record)}", replies, fold=True)
    content = results.result(folder, model, metrics, runner)
    content |= {
        "before": before,
        "after": after,
        "examples": len(trained_on),
        "rows": loader.count,
        "filled": round(filled, 4),
        "tokens_to_learn": loader.tokens,
        "skipped": len(skipped),
        "cut": vars(text.cut),
        "samples": [
            {"prompt": recipe_prompt(record), "before": old, "after": new}
            for record, old, new in zip(prompts, before["answers"], after["answers"], strict=True)
        ],
    }
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
        if settings.export:
            model.export_to_transformers(folder.path / "transformers")
    folder.write_json("result.json", content)


def optimizer(settings: Settings, learning_rate: Any) -> Any:
    """Returns the optimizer of the adapters."""
    from kmodels import training

    return training.AdamW(
        learning_rate,
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm or None,
        accumulate=settings.accumulate,
        skip_non_finite=settings.non_finite == "skip",
    )


def check_memory(settings: Settings, lora: Any) -> None:
    """Raises InputError if a step needs clearly more memory than is available."""
    from kmodels.tools import plan
    from kmodels.tools.plan import recommend

    if settings.ignore_memory_check:
        return
    estimate = plan.Plan(
        settings.weights or settings.preset,
        recommend.setup_of(settings, lora),
        overrides={"quantized": settings.quantized or None}
        if settings.weights
        else demo_size(settings),
    )
    plan.check(estimate, Settings, "--ignore-memory-check")


def demo_size(settings: Settings) -> dict[str, Any]:
    """Returns the sizes of the demonstration, whose preset is made for tests."""
    return DEMO if settings.preset == Settings.preset else {}


def split(rows: list[Any], share: float, seed: int) -> tuple[list[Any], list[Any]]:
    """Splits records by the seed into training and held-out ones."""
    from kmodels.data import order

    if len(rows) < 2:
        raise recipe.InputError(
            f"the data has {len(rows)} record; give at least 2, one of them to hold out"
        )
    count = min(max(round(share * len(rows)), 1), len(rows) - 1)
    indices = order(len(rows), seed, 0)
    return [rows[i] for i in sorted(indices[count:])], [rows[i] for i in sorted(indices[:count])]


def first_training(settings: Settings) -> Any:
    """Returns a small Gemma with its tokenizer, trained on texts that come with kmodels."""
    from kmodels.models import GemmaCausalLM, GemmaCausalLMPreprocessor
    from kmodels.text import demo
    from kmodels.text.training import train_tokenizer

    # LoRA trains on the other half of the instructions.
    texts = demo.texts() + [demo.plain(row) for row in demo.instructions().rows[:550]]
    text = GemmaCausalLMPreprocessor(
        train_tokenizer(texts, VOCABULARY), BASE_LENGTH, template=settings.template
    )
    model = GemmaCausalLM.from_preset(
        settings.preset,
        vocabulary_size=text.tokenizer.vocabulary_size(),
        preprocessor=text,
        **demo_size(settings),
    )
    return recipe.train_base(model, texts, settings.first_steps, settings.seed)


def evaluate(model: Any, batches: Any) -> dict[str, Any]:
    """Returns loss, accuracy and perplexity of the tokens in the loss."""
    logs = model.evaluate(batches, return_dict=True, verbose=0)
    return {name: float(value) for name, value in logs.items() if name != "step_loss"}


def answers(model: Any, records: list[Any], settings: Settings) -> list[str]:
    """Returns the replies of the model to the records."""
    if not records:
        return []
    text = model.preprocessor
    prompts = text.generate_preprocess(records, sequence_length=LONGEST_PROMPT)["padding_mask"]
    longest = int(prompts.sum(axis=-1).max()) + settings.sample_tokens
    return model.generate(records, max_length=longest, strip_prompt=True)


def one_line(text: str) -> str:
    """Returns an answer in one line; "(nothing)" if it is empty."""
    return " ".join(text.split()) or "(nothing)"


def trained(model: Any) -> str:
    """Returns the numbers of adapter and frozen parameters in words."""
    adapters = sum(math.prod(variable.shape) for variable in model.trainable_weights)
    return f"{adapters:,} parameters; {model.count_params() - adapters:,} are frozen"


def recipe_prompt(record: dict[str, Any]) -> str:
    """Returns the prompt of a record in one line."""
    text = record.get("instruction") or record.get("prompts") or record.get("text")
    text = text or str(record["messages"][0].get("content", ""))
    return " ".join(text.split())[:200]


def main(argv: list[str] | None = None) -> int:
    return recipe.main("gemma_lora", Settings, train, argv, __doc__)


if __name__ == "__main__":
    sys.exit(main())
