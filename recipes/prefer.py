"""Fine-tune a language model with LoRA on preferred answers: DPO, IPO, SimPO, ORPO, KTO and others.

    python recipes/prefer.py      # a demonstration, offline, in minutes
    python recipes/prefer.py --weights DIR_OR_GGUF --data FILE.jsonl \\
        --sequence-length 512 --precision bfloat16 --learning-rate 5e-5
    python recipes/prefer.py --method simpo --weights DIR --data FILE

A line of FILE.jsonl holds prompt, chosen and rejected, as texts or as messages with role and
content; for KTO a line may hold prompt, completion and label (true or false). The reference is the
model without its adapters, so it takes no additional memory. The run's directory gets result.json,
report.html, the adapter in PEFT's format, and the merged model.

`pair_loss` and `label_loss` below are the whole training step. The backend is KERAS_BACKEND's: jax,
torch or tensorflow. All flags: --help.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from kmodels.runs import recipe
from kmodels.runs.recipe import flag

METHODS = (
    *("dpo", "ipo", "hinge", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard"),
    *("apo_zero", "apo_down", "discopop", "simpo", "orpo", "cpo"),
)
# Those of single answers with labels.
LABELLED = ("kto", "apo_zero_unpaired")
# The flags that only the losses of one kind have.
OF_PAIR, OF_LABEL = ("method", *METHODS), ("method", *LABELLED)


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
    held_out: float = flag(0.1, "share of records held out for validation")
    template: str = flag(
        "auto",
        "auto (chat template for messages, else instruction) | chat_template | instruction | "
        "alpaca | gemma | gemma4, or your own text",
    )
    sequence_length: int = flag(128, "tokens per row; longer rows are cut")
    # Preferences
    method: str = flag("dpo", f"the loss: {', '.join(METHODS)}; for labels {', '.join(LABELLED)}")
    beta: float | None = flag(
        None, "strength of the penalty for leaving the reference; default: 0.1, for simpo 2"
    )
    label_smoothing: float | None = flag(
        None, "probability that a pair is labeled wrongly", needs=OF_PAIR
    )
    length_normalized: bool = flag(
        False, "divide log-probabilities by the tokens of an answer", needs=OF_PAIR
    )
    margin: float | None = flag(
        None, "simpo: target difference of the rewards; default: 0.5", needs=OF_PAIR
    )
    sft_weight: float | None = flag(
        None,
        "weight of the supervised loss of chosen answers; default: 0, for orpo and cpo 1",
        needs=OF_PAIR,
    )
    reference_free: bool = flag(
        False, "compare log-probabilities without a reference", needs=OF_PAIR
    )
    desirable_weight: float = flag(1.0, "kto: weight of desirable answers", needs=OF_LABEL)
    undesirable_weight: float = flag(1.0, "kto: weight of undesirable answers", needs=OF_LABEL)
    precompute_reference: bool = flag(
        False, "compute the reference's log-probabilities once, before the training"
    )
    # LoRA
    rank: int = flag(8, "LoRA rank")
    alpha: float | None = flag(None, "LoRA alpha; default: the rank (scale 1)")
    lora_dropout: float = flag(0.0, "LoRA dropout")
    targets: str = flag("query,value", "layers with adapters, or all-linear")
    quantize: str | None = flag(
        None, "quantize the frozen base weights (QLoRA)", choices=("int8", "int4", "nf4", "fp4")
    )
    remat: str = flag(
        "none",
        "recompute activations in the backward pass to save memory (gradient checkpointing)",
        choices=("none", "block", "attention", "mlp"),
    )
    # Optimizer
    precision: str = flag("float32", "policy", choices=("float32", "bfloat16", "mixed_bfloat16"))
    batch_size: int = flag(8, "pairs (of labelled data: answers) per step, over all devices")
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
    # Output
    ignore_memory_check: bool = flag(False, "start even if the estimate exceeds the memory")
    samples: int = flag(4, "held-out pairs shown in the report with their rewards", small=1)
    first_steps: int = flag(
        60, "training steps of the demonstration's base model", small=2, needs=("weights", None)
    )


# Settings that a resumed run must share with the one it continues; its checkpoint has a hash of the
# base weights.
FIXED = (
    *("preset", "data", "held_out", "template", "sequence_length", "method", "beta"),
    *("label_smoothing", "margin"),
    *("length_normalized", "sft_weight", "reference_free", "desirable_weight"),
    *("undesirable_weight", "rank", "alpha", "targets", "quantize"),
    *("batch_size", "accumulate", "seed", "first_steps"),
)
VOCABULARY = 512
PAIRS = 200
# The logs of each loss.
OF_PAIRS = ("accuracy", "margin", "chosen_reward", "rejected_reward")
OF_LABELS = ("accuracy", "chosen_reward", "rejected_reward")


def pair_loss(preference: Any) -> Callable[[Any, Any, bool], Any]:
    """Returns the loss of a batch of pairs (pairs, 2, tokens), the chosen answer first.

    Args:
        preference: a `training.PreferenceLoss`.
    """
    from keras import ops

    def loss_fn(model: Any, batch: Any, training: bool) -> Any:
        inputs, labels, weights = batch
        learnt = ops.cast(weights > 0, "float32")
        reference = (None, None)
        if preference.needs_reference:
            reference = ops.unstack(reference_of(model, inputs, labels, learnt), axis=1)
        log_probs = answer_log_probs(model, inputs, labels, learnt, training)
        tokens = ops.sum(learnt, axis=2)
        found = preference(
            *ops.unstack(log_probs, axis=1),
            *reference,
            chosen_tokens=tokens[:, 0],
            rejected_tokens=tokens[:, 1],
        )
        # Those without tokens fill up the batch.
        real = ops.cast(ops.any(tokens > 0, axis=1), "float32")
        margin = found.chosen_reward - found.rejected_reward
        logs = {
            "accuracy": (ops.cast(margin > 0, "float32"), real),
            "margin": (margin, real),
            "chosen_reward": (found.chosen_reward, real),
            "rejected_reward": (found.rejected_reward, real),
        }
        return ops.sum(found.loss * real) / ops.maximum(ops.sum(real), 1.0), logs

    return loss_fn


def label_loss(preference: Any) -> Callable[[Any, Any, bool], Any]:
    """Returns the loss of a batch of answers with labels.

    The batch is (answers, 2, tokens): each answer, then the answer of another record to the same
    prompt, from which the divergence of model and reference is estimated. Without a divergence it
    is (answers, 1, tokens).

    Args:
        preference: a `training.KTOLoss`.
    """
    from keras import ops

    def loss_fn(model: Any, batch: Any, training: bool) -> Any:
        inputs, labels, weights = batch
        desirable, learnt = inputs["desirable"] > 0, ops.cast(weights > 0, "float32")
        reference = reference_of(model, inputs, labels, learnt)
        real = ops.cast(ops.sum(learnt[:, 0], axis=1) > 0, "float32")
        count, divergence = ops.maximum(ops.sum(real), 1.0), None
        if preference.needs_kl:
            others = [part(x, 1) for x in (inputs, labels, learnt)]
            others = ops.stop_gradient(answer_log_probs(model, *others, training=False))[:, 0]
            divergence = ops.sum((others - reference[:, 1]) * real) / count
        answers = [part(x, 0) for x in (inputs, labels, learnt)]
        log_probs = answer_log_probs(model, *answers, training=training)[:, 0]
        found = preference(log_probs, reference[:, 0], desirable, kl=divergence)
        good = real * ops.cast(desirable, "float32")
        logs = {
            "accuracy": (ops.cast((found.reward > 0) == desirable, "float32"), real),
            "chosen_reward": (found.reward, good),
            "rejected_reward": (found.reward, real - good),
        }
        return ops.sum(found.loss * real) / count, logs

    def part(x: Any, i: int) -> Any:
        if isinstance(x, dict):
            return {name: each if each.ndim < 3 else each[:, i : i + 1] for name, each in x.items()}
        return x[:, i : i + 1]

    return loss_fn


# Inputs of a batch that are not inputs of the model.
OURS = ("reference", "desirable", "labels", "learnt")


def answer_log_probs(model: Any, inputs: Any, labels: Any, learnt: Any, training: bool) -> Any:
    """Returns the sums of the log-probabilities of answers, (rows, answers).

    Args:
        model: a `CausalLM`.
        inputs: arrays (rows, answers, ...) by name.
        labels: (rows, answers, tokens).
        learnt: 1 for tokens of an answer, (rows, answers, tokens).
        training: whether dropout drops.
    """
    from keras import ops

    def flat(x: Any) -> Any:
        return ops.reshape(x, (-1, *x.shape[2:]))

    rows = {name: flat(x) for name, x in inputs.items() if name not in OURS}
    log_probs = model.log_probs(rows, flat(labels), flat(learnt), training)
    return ops.sum(ops.reshape(log_probs, ops.shape(labels)), axis=-1)


def reference_of(model: Any, inputs: Any, labels: Any, learnt: Any) -> Any:
    """Returns what `answer_log_probs` is without adapters, with no gradient."""
    from keras import ops

    from kmodels import lora

    if "reference" in inputs:
        return inputs["reference"]
    with lora.disabled(model):
        return ops.stop_gradient(answer_log_probs(model, inputs, labels, learnt, False))


def train(settings: Settings, folder: recipe.Folder) -> None:
    recipe.at_least(settings, epochs=1, clip_norm=0, first_steps=1, samples=0)
    recipe.check_fractions(settings, "warmup", "held_out")
    import keras

    from kmodels import lora, training
    from kmodels.layers import rematerialize
    from kmodels.lora import LoraSettings
    from kmodels.runs import plots, results
    from kmodels.text import TextLoader

    recipe.prepare(settings)
    # TRL's examples/scripts/dpo.py has this rate for adapters of real models.
    rate = 5e-6 if settings.weights else 1e-3
    beta = 2.0 if settings.method == "simpo" else 0.1
    settings = recipe.filled(settings, folder, learning_rate=rate, beta=beta)
    preference = preference_of(settings)

    # === Data ===
    recipe.working(f"reading the data: {settings.data or 'pairs that come with kmodels'}")
    trained_on, held_out = split(read(settings), settings)

    # === Model ===
    origin: Any = settings.weights or folder.path / "base"
    if settings.weights is None and not (origin / "config.json").is_file():
        recipe.say("demonstration: trains a small Gemma here, without Google's weights")
        first_training(settings).save_to_preset(origin)
    adapters = LoraSettings(
        settings.rank,
        alpha=settings.alpha,
        dropout=settings.lora_dropout,
        targets=settings.targets.split(","),
    )
    recipe.working("estimating the memory of a step")
    check_memory(settings, adapters)
    recipe.working(f"reading the weights of {settings.weights or 'the demonstration'}")
    model = recipe.causal_lm_of(origin).from_preset(origin, dtype=settings.precision)
    if model.preprocessor is None:
        raise recipe.InputError(
            f"{origin} holds no tokenizer; put tokenizer.json next to the weights"
        )
    if settings.quantize:
        model.backbone.quantize(settings.quantize)
    model.enable_lora(**asdict(adapters))
    rematerialize(model.backbone, settings.remat)

    # === Batches ===
    recipe.working("tokenizing the answers")
    text = model.preprocessor
    text.sequence_length, text.loss_on = settings.sequence_length, "responses"
    text.template = settings.template
    rows, held_out_rows = encode(settings, text, trained_on), encode(settings, text, held_out)
    if text.cut.dropped:
        recipe.say(f"left out {text.cut.dropped} records without a token of an answer")

    # === Training ===
    loss, names = pair_loss(preference), OF_PAIRS
    if settings.method in LABELLED:
        loss, names = label_loss(preference), OF_LABELS
    step = recipe.parallelize(training.TrainStep(model, loss, output=output))
    if settings.precompute_reference:
        recipe.working("computing the log-probabilities of the reference")
        for part in (rows, held_out_rows):
            with lora.disabled(model):
                part[0]["reference"] = log_probs_of(step, part, settings.batch_size)
    loader = TextLoader(rows, settings.batch_size, shuffle=True, seed=settings.seed)
    validation = TextLoader(held_out_rows, settings.batch_size)
    total = settings.steps or settings.epochs * len(loader)
    warmup = round(settings.warmup * total)
    schedule = training.WarmupSchedule(settings.learning_rate, total, warmup, settings.schedule)
    step.compile(
        training.AdamW(
            schedule,
            weight_decay=0.0,
            clip_norm=settings.clip_norm or None,
            accumulate=settings.accumulate,
        ),
        metrics=[keras.metrics.Mean(name=name) for name in names],
    )
    facts = {
        "source": settings.data or "pairs that come with kmodels",
        "unit": "answers" if settings.method in LABELLED else "pairs",
        "train": len(rows[1]),
        "validation": len(held_out_rows[1]),
        "details": str(text.cut),
    }
    recipe.introduce(
        folder, model, facts, steps=total, steps_per_epoch=len(loader), best="val_loss"
    )
    runner = recipe.fit(
        folder, step, loader, validation, schedule, FIXED, best="val_loss", origin=str(origin)
    )

    # === Results ===
    recipe.working("evaluating")
    logs = step.evaluate(validation, return_dict=True, verbose=0)
    metrics = {f"val_{name}": float(logs[name]) for name in ("loss", *names)}
    metrics = (dict(runner.metrics) if runner else {}) | metrics
    recipe.working(None)
    recipe.say_metrics(metrics)
    content = results.result(folder, model, metrics, runner)
    content["preferences"] = changes(settings, model, step, held_out[: settings.samples])
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


def preference_of(settings: Settings) -> Any:
    """Returns the `PreferenceLoss` or `KTOLoss` of the flags."""
    from kmodels import training

    if settings.method not in (*METHODS, *LABELLED):
        choices = ", ".join((*METHODS, *LABELLED))
        raise recipe.InputError(f"--method is {settings.method!r}; choose one of {choices}")
    of_pairs = {"label_smoothing", "margin", "sft_weight", "length_normalized", "reference_free"}
    if settings.method in LABELLED:
        weights = settings.desirable_weight, settings.undesirable_weight
        return training.KTOLoss(settings.beta, *weights, kind=settings.method)
    loss = training.PreferenceLoss(
        "sigmoid" if settings.method == "dpo" else settings.method,
        settings.beta,
        **{name: getattr(settings, name) for name in of_pairs},
    )
    if settings.precompute_reference and not loss.needs_reference:
        raise recipe.InputError(
            f"--precompute-reference has no meaning: {settings.method} compares without a "
            "reference; leave it out"
        )
    return loss


def check_memory(settings: Settings, lora: Any) -> None:
    """Raises InputError if a step needs clearly more memory than is available."""
    from kmodels.tools import plan

    if settings.ignore_memory_check:
        return
    setup = plan.Setup(
        settings.batch_size * (1 if settings.method in LABELLED else 2),
        settings.sequence_length,
        precision=settings.precision,
        lora=lora,
        quantize=settings.quantize,
        remat=settings.remat,
        accumulate=settings.accumulate,
    )
    estimate = plan.Plan(settings.weights or settings.preset, setup)
    plan.check(estimate, Settings, "--ignore-memory-check")


def output(model: Any, inputs: Any, training: bool) -> Any:
    """Returns `answer_log_probs` of rows whose labels are among the inputs."""
    return answer_log_probs(model, inputs, inputs["labels"], inputs["learnt"], training)


def log_probs_of(step: Any, rows: Any, batch_size: int) -> Any:
    """Returns `answer_log_probs` of all rows, (rows, answers)."""
    import numpy as np

    inputs, labels, weights = rows
    columns = {**inputs, "labels": labels, "learnt": (weights > 0).astype("float32")}
    # A full batch at the end compiles no second program, and is whole on any mesh.
    filled = np.resize(np.arange(len(labels)), -(-len(labels) // batch_size) * batch_size)
    whole = {name: x[filled] for name, x in columns.items()}
    return step.predict(whole, batch_size=batch_size, verbose=0)[: len(labels)]


def changes(settings: Settings, model: Any, step: Any, records: list[Any]) -> list[dict[str, Any]]:
    """Returns prompts with their answers, and how the log-probability of each has changed."""
    from kmodels import lora

    encoded = []
    for record in records:
        try:
            encode(settings, model.preprocessor, [record], mismatched=False)
        except recipe.InputError:  # a record that the training left out too
            continue
        encoded.append(record)
    if not encoded:
        return []
    part = encode(settings, model.preprocessor, encoded, mismatched=False)
    with lora.disabled(model):
        before = log_probs_of(step, part, settings.batch_size)
    after = log_probs_of(step, part, settings.batch_size)
    shown = []
    for record, changed in zip(encoded, after - before, strict=True):
        if settings.method in LABELLED:
            answers = {"desirable" if record["label"] else "undesirable": record["completion"]}
        else:
            answers = {name: record[name] for name in ("chosen", "rejected")}
        shown.append(
            {
                "prompt": recipe.as_text(record["prompt"]),
                "answers": [
                    {"label": name, "text": recipe.as_text(text), "change": round(float(by), 4)}
                    for (name, text), by in zip(answers.items(), changed, strict=True)
                ],
            }
        )
    return shown


def read(settings: Settings) -> list[Any]:
    """Returns records; those of the demonstration reject the answer to another prompt."""
    from kmodels.text import demo, read_labelled, read_pairs

    if settings.data is not None:
        return (read_labelled if settings.method in LABELLED else read_pairs)(settings.data)
    records = demo.instructions().rows[:PAIRS]
    pairs = [
        {
            "prompt": f"{row['instruction']}\n{row['context']}".strip() + "\n",
            "chosen": row["response"],
            "rejected": other["response"],
        }
        for row, other in zip(records, [*records[1:], records[0]], strict=True)
    ]
    if settings.method not in LABELLED:
        return pairs
    return [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for pair in pairs
        for name in ("chosen", "rejected")
    ]


def split(records: list[Any], settings: Settings) -> tuple[list[Any], list[Any]]:
    """Splits the prompts by the seed; returns the records of training and held-out ones."""
    from kmodels.data import order

    by_prompt: dict[str, list[Any]] = {}
    for record in records:
        asked = [record.get(name) for name in ("prompt", "images", "image")]
        by_prompt.setdefault(repr(asked), []).append(record)
    groups = list(by_prompt.values())
    # KTO compares with answers to other prompts.
    least = 2 if settings.method == "kto" else 1
    if len(groups) < 2 * least:
        raise recipe.InputError(
            f"the data has {len(groups)} prompts; give at least {2 * least}, of which {least} will "
            "be held out"
        )
    count = min(max(round(settings.held_out * len(groups)), least), len(groups) - least)
    indices = order(len(groups), settings.seed, 0)
    parts = indices[count:], indices[:count]
    trained_on, held_out = ([row for i in part for row in groups[i]] for part in parts)
    return trained_on, held_out


def encode(settings: Settings, text: Any, records: list[Any], mismatched: bool = True) -> Any:
    """Returns (inputs, labels, weights) of records, each (records, answers, tokens)."""
    from kmodels.text import encode_labelled, encode_pairs

    if settings.method not in LABELLED:
        return encode_pairs(text, records)
    return encode_labelled(text, records, mismatched=mismatched and settings.method == "kto")


def first_training(settings: Settings) -> Any:
    """Returns a small Gemma with its tokenizer, trained on both answers."""
    from kmodels.models import GemmaCausalLM, GemmaCausalLMPreprocessor
    from kmodels.text.training import train_tokenizer

    pairs = read(replace(settings, data=None, method="dpo"))
    texts = [row["prompt"] + row[name] for row in pairs for name in ("chosen", "rejected")]
    text = GemmaCausalLMPreprocessor(train_tokenizer(texts, VOCABULARY), settings.sequence_length)
    model = GemmaCausalLM.from_preset(
        settings.preset, vocabulary_size=text.tokenizer.vocabulary_size(), preprocessor=text
    )
    return recipe.train_base(model, texts, settings.first_steps, settings.seed)


def main(argv: list[str] | None = None) -> int:
    return recipe.main("prefer", Settings, train, argv, __doc__)


if __name__ == "__main__":
    sys.exit(main())
