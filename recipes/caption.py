"""Fine-tune a Gemma 3 with its vision encoder on images with texts.

    python recipes/caption.py  # a small model learns to read numbers, offline
        # two CPU cores, busy machine: 5 minutes on torch, 4 on TensorFlow,
        # 9 on JAX; 98.5, 98.5 and 99.5 % of held-out numbers are correct
    python recipes/caption.py --weights DIR --data FOLDER_OR_FILE.jsonl \\
        --precision bfloat16 --rank 8 --learning-rate 2e-4 --batch-size 4

FOLDER holds images with captions (metadata.jsonl or metadata.csv with file_name and text, or a
text file next to each image); a line of FILE.jsonl holds images with text, prompts and responses,
or messages. With --rank, the halves of --train get LoRA adapters; otherwise all of their weights
are trained. The run's directory gets result.json, predictions.png and the model.

The backend is KERAS_BACKEND's: jax, torch or tensorflow. All flags: --help.
"""

import math
import sys
from dataclasses import dataclass
from typing import Any

from kmodels.runs import recipe
from kmodels.runs.recipe import flag

HALVES = {"text": r"block_\d+/.*", "vision": r"vision_encoder/block_\d+/.*"}


@dataclass(frozen=True)
class Settings(recipe.Common):
    preset: str = flag(
        "gemma3_vision_debug", "architecture of the demonstration", needs=("weights", None)
    )
    weights: str | None = flag(None, "a Hugging Face directory or a saved directory")
    data: str | None = flag(
        None, "a folder or a .jsonl file; default: rendered numbers of three digits"
    )
    workers: int = flag(0, "with --on: processes that train", needs=("on",))
    skip_bad: bool = flag(False, "skip bad records and count them", needs=("data",))
    held_out: float = flag(0.1, "share of records (or numbers) held out for evaluation")
    images: int = flag(18, "training images of each number", small=1, needs=("data", None))
    sequence_length: int = flag(40, "tokens per row, image tokens included")
    train: str = flag("all", "trained half of the model", choices=("all", "text", "vision"))
    rank: int = flag(0, "LoRA rank; 0 trains all weights")
    alpha: float | None = flag(None, "LoRA alpha; default: the rank (scale 1)", needs=("rank",))
    # Optimizer
    precision: str = flag("float32", "policy", choices=("float32", "bfloat16", "mixed_bfloat16"))
    batch_size: int = flag(64, "rows per step, over all devices")
    epochs: int = flag(6, "passes over the training rows", small=1)
    learning_rate: float | None = flag(
        None,
        "highest learning rate; default: 3e-3, with --weights by the width of the model, a tenth "
        "of it without --rank",
    )
    schedule: str = flag(
        "cosine", "learning rate after the warm-up", choices=("cosine", "linear", "constant")
    )
    warmup: float = flag(0.05, "share of the steps used for learning-rate warm-up")
    weight_decay: float = flag(0.01, "decoupled weight decay of matrices")
    clip_norm: float = flag(1.0, "gradient clipping: largest global norm; 0 for no limit")
    accumulate: int = flag(1, "gradient accumulation: batches per update")
    loss_normalization: str = flag(
        "tokens",
        "divisor of the loss of an update: its learnt tokens, its positions, or its examples",
        choices=("tokens", "positions", "examples"),
    )
    # Output
    answers: int = flag(200, "held-out records answered at the end", small=8)
    answer_tokens: int = flag(8, "longest answer in tokens")


# Settings that a resumed run must share with the one it continues.
FIXED = (
    *("preset", "weights", "data", "images", "held_out", "sequence_length", "train", "rank"),
    *("alpha", "batch_size", "accumulate", "loss_normalization", "seed"),
)
# The demonstration's model is larger than the preset, which is made for tests.
TEXT: dict[str, Any] = {
    **{"num_layers": 2, "hidden_dim": 64, "intermediate_dim": 128, "head_dim": 16},
    "sliding_window_size": 64,
}
VISION = {
    **{"image_size": 32, "patch_size": 4, "pool_size": 2, "num_layers": 3},
    **{"num_heads": 4, "hidden_dim": 64, "intermediate_dim": 128},
}


def train(settings: Settings, folder: recipe.Folder) -> None:
    recipe.at_least(settings, epochs=1, rank=0, clip_norm=0, answers=1, answer_tokens=1, images=1)
    recipe.check_fractions(settings, "warmup", "held_out")
    import keras

    from kmodels import training
    from kmodels.runs import plots, results
    from kmodels.text import RecordLoader
    from kmodels.tools.plan import recommend

    recipe.prepare(settings)
    if (settings.weights is None) != (settings.data is None):
        raise recipe.InputError(
            "--weights and --data belong together; give both, or neither for the demonstration"
        )

    # === Data and model ===
    source = settings.data or "rendered numbers of three digits"
    recipe.working(f"reading the data: {source}")
    trained_on, held_out, skipped = (
        rendered(settings) if settings.data is None else records(settings)
    )
    if skipped:
        recipe.say(f"skipped {len(skipped)} bad records, the first: {skipped[0]}")
    recipe.working("building the model")
    origin: Any = settings.weights or folder.path / "base"
    if settings.weights is None and settings.rank and not (origin / "config.json").is_file():
        recipe.parallelize(demonstration(settings)).save_to_preset(origin)
    if settings.weights is None and not settings.rank:
        model = demonstration(settings)
    else:
        model = load(origin, settings)
    model.preprocessor.sequence_length = settings.sequence_length
    trained = choose_trained(model, settings)
    rate = 3e-3
    if settings.weights:
        rate = recommend.learning_rate(model.backbone).value * (1 if settings.rank else 0.1)
    settings = recipe.filled(settings, folder, learning_rate=rate)

    # === Batches ===
    order = {"shuffle": True, "seed": settings.seed}
    loader = RecordLoader(trained_on, model.preprocessor, settings.batch_size, **order)
    validation = RecordLoader(held_out, model.preprocessor, settings.batch_size)
    total = settings.steps or settings.epochs * len(loader)
    facts = {
        "source": source,
        "unit": "records",
        "train": len(trained_on),
        "validation": len(held_out),
        "details": f"{trained} of {model.count_params():,} parameters are trained",
    }
    best = "val_loss"
    recipe.introduce(folder, model, facts, steps=total, steps_per_epoch=len(loader), best=best)

    # === Training ===
    warmup = round(settings.warmup * total)
    schedule = training.WarmupSchedule(settings.learning_rate, total, warmup, settings.schedule)
    model = recipe.parallelize(model)
    model.compile(
        optimizer=training.AdamW(
            schedule,
            weight_decay=settings.weight_decay,
            clip_norm=settings.clip_norm or None,
            accumulate=settings.accumulate,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        loss_normalization=settings.loss_normalization,
    )
    runner = recipe.fit(folder, model, loader, validation, schedule, FIXED, best=best)

    # === Results ===
    questions = held_out[: settings.answers]
    if not recipe.can_generate(model):
        recipe.say("no answers: generate needs all weights, and each process holds a part of them")
        questions = []
    recipe.working(f"answering {len(questions)} held-out records")
    replies = answers(model, questions, settings)
    expected = [answer(record) for record in questions]
    recipe.working(None)
    metrics = dict(runner.metrics) if runner else {}
    if questions:
        right = sum(a == b for a, b in zip(replies, expected, strict=True)) / len(questions)
        recipe.say(f"{right:.1%} of {len(questions)} held-out answers match exactly")
        metrics["exact_match"] = right
    content = results.result(folder, model, metrics, runner)
    content |= {"examples": len(trained_on), "skipped": len(skipped)}
    content["captions"] = [
        {"said": a, "wanted": b} for a, b in zip(replies[:8], expected[:8], strict=True)
    ]
    if runner is None:
        folder.write_json("evaluation.json", content)
        return
    plots.curves(folder.path / "curves.png", runner.history.rows)
    if questions:
        images = first_images(model, questions[:32])
        plots.captions(folder.path / "predictions.png", images, replies[:32], expected[:32])
    adapter = folder.path / "adapter"
    if settings.rank:
        model.save_adapter(adapter)
    if not settings.rank or recipe.can_merge(model, origin, adapter):
        if settings.rank:
            model.merge_lora()
        results.save_model(folder, model, content["metrics"])
    folder.write_json("result.json", content)


def rendered(settings: Settings) -> tuple[list[Any], list[Any], list[str]]:
    """Returns images of numbers; held-out numbers do not occur in training."""
    import numpy as np

    from kmodels.data import rendered_numbers

    rng = np.random.default_rng(settings.seed)
    numbers = rng.permutation(1000)
    count = max(round(settings.held_out * len(numbers)), 1)

    def render(numbers: Any) -> list[Any]:
        return [
            {"images": [image], "prompts": "<start_of_image>", "responses": f"{number:03d}"}
            for image, number in zip(rendered_numbers(numbers, rng), numbers, strict=True)
        ]

    trained_on = render(np.repeat(numbers[count:], settings.images))
    return trained_on, render(np.repeat(numbers[:count], 2)), []


def records(settings: Settings) -> tuple[list[Any], list[Any], list[str]]:
    """Returns the user's records, split by the seed."""
    from kmodels.data import order
    from kmodels.text import read_records

    assert settings.data is not None  # The demonstration has its own records.
    read = read_records(settings.data, skip_bad=settings.skip_bad)
    if len(read.rows) < 2:
        raise recipe.InputError(
            f"the data has {len(read.rows)} record; give at least 2, one of them to hold out"
        )
    indices = order(len(read.rows), settings.seed, 0)
    count = min(max(round(settings.held_out * len(indices)), 1), len(indices) - 1)
    parts = (sorted(indices[count:]), sorted(indices[:count]))
    trained_on, held_out = ([read.rows[i] for i in part] for part in parts)
    return trained_on, held_out, read.skipped


def demonstration(settings: Settings) -> Any:
    """Returns a small model with random weights and a tokenizer of digits."""
    from kmodels.models import (
        Gemma3ImageConverter,
        Gemma3ImageTextLM,
        Gemma3ImageTextLMPreprocessor,
    )
    from kmodels.text.training import IMAGES, train_tokenizer

    tokenizer = train_tokenizer(["0 1 2 3 4 5 6 7 8 9"], special_tokens=IMAGES)
    side = VISION["image_size"]
    preprocessor = Gemma3ImageTextLMPreprocessor(
        tokenizer,
        Gemma3ImageConverter((side, side)),
        num_vision_tokens_per_image=(side // VISION["patch_size"] // VISION["pool_size"]) ** 2,
        loss_on="responses",
    )
    return Gemma3ImageTextLM.from_preset(
        settings.preset,
        dtype=settings.precision,
        vocabulary_size=tokenizer.vocabulary_size(),
        image_token_id=preprocessor.image_token_id,
        preprocessor=preprocessor,
        vision_encoder=VISION,
        **TEXT,
    )


def load(path: Any, settings: Settings) -> Any:
    """Returns the user's model, or the base of the demonstration's adapters."""
    from kmodels.models import Gemma3ImageTextLM

    model = Gemma3ImageTextLM.from_preset(path, dtype=settings.precision)
    if model.preprocessor is None:
        raise recipe.InputError(
            f"{path} holds no tokenizer; put tokenizer.json next to the weights"
        )
    return model


def choose_trained(model: Any, settings: Settings) -> str:
    """Freezes or adapts layers by --train and --rank; returns the number of trained parameters."""
    targets = [x for half, x in HALVES.items() if settings.train in ("all", half)]
    if settings.rank:
        model.backbone.enable_lora(rank=settings.rank, alpha=settings.alpha, targets=targets)
    elif settings.train != "all":
        for layer in model.backbone.layers:
            layer.trainable = (layer.name == "vision_encoder") == (settings.train == "vision")
    return f"{sum(math.prod(variable.shape) for variable in model.trainable_variables):,}"


def answer(record: Any) -> str:
    """Returns the expected answer of a record."""
    if "messages" in record:
        return " ".join(str(record["messages"][-1]["content"]).split())
    return " ".join(str(record.get("responses") or record.get("text")).split())


def answers(model: Any, questions: list[Any], settings: Settings) -> list[str]:
    """Returns the replies of the model, computed batch by batch."""
    replies: list[str] = []
    for start in range(0, len(questions), settings.batch_size):
        rows = questions[start : start + settings.batch_size]
        length = settings.sequence_length + settings.answer_tokens
        replies += model.generate(rows, max_length=length, strip_prompt=True)
    return [" ".join(text.split()) for text in replies]


def first_images(model: Any, records: list[Any]) -> list[Any]:
    """Returns the preprocessed first image of each record, scaled to 0..1."""
    pixels = model.preprocessor.generate_preprocess(records)["images"]
    low, high = pixels.min(), pixels.max()
    return [(row[0] - low) / (high - low) for row in pixels]


def main(argv: list[str] | None = None) -> int:
    return recipe.main("caption", Settings, train, argv, __doc__)


if __name__ == "__main__":
    sys.exit(main())
