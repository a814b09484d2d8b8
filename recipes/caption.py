"""Teach a Gemma 3 with its vision encoder to say what is in an image.

    python recipes/caption.py  # a small model learns to read numbers, offline
        # two CPU cores beside other work: 5 minutes on torch, 4 on
        # TensorFlow, 9 on JAX; 98.5, 98.5 and 99.5 % of the numbers that
        # it never saw are read right
    python recipes/caption.py --weights DIR --data FOLDER_OR_FILE.jsonl \\
        --precision bfloat16 --rank 8 --learning-rate 2e-4 --batch-size 4

FOLDER holds images with captions (metadata.jsonl or metadata.csv with file_name and text, or a
text file beside each image); a line of FILE.jsonl holds images with text, prompts and responses,
or messages. With --rank the halves that --train names get LoRA, else they are trained as a whole.
The run's directory gets result.json, predictions.png and the model.

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
    preset: str = flag("gemma3_vision_debug", "architecture of the demonstration")
    weights: str | None = flag(None, "a Hugging Face directory or a saved directory")
    data: str | None = flag(
        None, "a folder or a .jsonl file; by default rendered numbers of three digits"
    )
    skip_bad: bool = flag(False, "leave bad records out, and count them")
    held_out: float = flag(0.1, "share of the records, or of the numbers, kept for evaluation")
    images: int = flag(18, "images of each number to learn", small=1)
    sequence_length: int = flag(40, "tokens of a row, those of images included")
    train: str = flag("all", "what is trained", choices=("all", "text", "vision"))
    rank: int = flag(0, "LoRA rank; 0 trains all weights")
    alpha: float | None = flag(None, "LoRA alpha; default: the rank (scale 1)")
    # Optimizer
    precision: str = flag("float32", "policy", choices=("float32", "bfloat16", "mixed_bfloat16"))
    batch_size: int = flag(64, "rows per step, over all devices")
    epochs: int = flag(6, "passes over the training rows", small=1)
    learning_rate: float = flag(3e-3, "highest learning rate")
    schedule: str = flag(
        "cosine", "learning rate after the warm-up", choices=("cosine", "linear", "constant")
    )
    warmup: float = flag(0.05, "share of the steps used for learning-rate warm-up")
    weight_decay: float = flag(0.01, "decoupled decay of matrices")
    clip_norm: float = flag(1.0, "largest global norm of the gradients; 0 for no limit")
    accumulate: int = flag(1, "batches whose gradients make one update")
    # What is shown and written
    answers: int = flag(200, "held-out records that the model answers at the end", small=8)
    answer_tokens: int = flag(8, "longest answer")


# Settings that a resumed run must share with the one it continues.
FIXED = (
    *("preset", "data", "images", "held_out", "sequence_length", "train", "rank", "alpha"),
    *("batch_size", "accumulate", "seed"),
)
# The demonstration's model is larger than the preset, which is made for tests.
TEXT = {
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

    recipe.prepare(settings)
    if (settings.weights is None) != (settings.data is None):
        raise recipe.InputError(
            "--weights and --data go together; give both, or neither for the demonstration"
        )

    # === Data and model ===
    source = settings.data or "rendered numbers of three digits"
    recipe.working(f"reading the data: {source}")
    learnt, held_out, skipped = numbers(settings) if settings.data is None else records(settings)
    if skipped:
        recipe.say(f"left out {len(skipped)} bad records, the first: {skipped[0]}")
    recipe.working("building the model")
    origin: Any = settings.weights or folder.path / "base"
    if settings.weights is None and settings.rank and not (origin / "config.json").is_file():
        recipe.parallelize(demonstration(settings)).save_to_preset(origin)
    if settings.weights is None and not settings.rank:
        model = demonstration(settings)
    else:
        model = read(origin, settings)
    model.preprocessor.sequence_length = settings.sequence_length
    chosen = parts(model, settings)

    # === Batches ===
    order = {"shuffle": True, "seed": settings.seed}
    loader = RecordLoader(learnt, model.preprocessor, settings.batch_size, **order)
    validation = RecordLoader(held_out, model.preprocessor, settings.batch_size)
    total = settings.steps or settings.epochs * len(loader)
    facts = {
        "source": source,
        "unit": "records",
        "train": len(learnt),
        "validation": len(held_out),
        "details": f"{chosen} of {model.count_params():,} parameters are trained",
    }
    best, steps = "val_loss", 0 if settings.evaluate else total
    recipe.introduce(folder, model, facts, steps=steps, steps_per_epoch=len(loader), best=best)

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
    )
    runner = None
    if settings.evaluate:
        training.restore_newest(folder.path / "checkpoints", model)
    else:
        options = recipe.run_options(settings, FIXED)
        options["best"] = best
        runner = training.Runner(model, folder.path, loader, validation, schedule, **options)
        folder.write_config()
        runner.run()

    # === Results ===
    asked = held_out[: settings.answers]
    if not recipe.can_generate(model):
        recipe.say("no answers: each process holds a part of the weights, and generate needs all")
        asked = []
    recipe.working(f"answering {len(asked)} held-out records")
    said = answers(model, asked, settings)
    wanted = [answer(record) for record in asked]
    recipe.working(None)
    metrics = dict(runner.metrics) if runner else {}
    if asked:
        right = sum(a == b for a, b in zip(said, wanted, strict=True)) / len(asked)
        recipe.say(f"{right:.1%} of {len(asked)} held-out answers are right, word for word")
        metrics["exact_match"] = right
    content = results.result(
        model,
        recipe=folder.recipe,
        settings=settings,
        metrics=metrics,
        runner=runner,
    )
    content |= {"examples": len(learnt), "skipped": len(skipped)}
    content["captions"] = [
        {"said": a, "wanted": b} for a, b in zip(said[:8], wanted[:8], strict=True)
    ]
    if runner is None:
        folder.write_json("evaluation.json", content)
        return
    plots.curves(folder.path / "curves.png", runner.history.rows)
    if asked:
        plots.captions(
            folder.path / "predictions.png", shown(model, asked[:32]), said[:32], wanted[:32]
        )
    adapter = folder.path / "adapter"
    if settings.rank:
        model.save_adapter(adapter)
    if not settings.rank or recipe.can_merge(model, origin, adapter):
        if settings.rank:
            model.merge_lora()
        model.save_to_preset(folder.path / "model")
    folder.write_json("result.json", content)


def numbers(settings: Settings) -> tuple[list[Any], list[Any], list[str]]:
    """Images of numbers; those held out are of numbers that nobody learns."""
    import numpy as np

    from kmodels.data import rendered_numbers

    rng = np.random.default_rng(settings.seed)
    drawn = rng.permutation(1000)
    count = max(round(settings.held_out * len(drawn)), 1)

    def made(chosen: Any) -> list[Any]:
        pictures = rendered_numbers(chosen, rng)
        return [
            {"images": [picture], "prompts": "<start_of_image>", "responses": f"{n:03d}"}
            for picture, n in zip(pictures, chosen, strict=True)
        ]

    return made(np.repeat(drawn[count:], settings.images)), made(np.repeat(drawn[:count], 2)), []


def records(settings: Settings) -> tuple[list[Any], list[Any], list[str]]:
    """The user's records, split by the seed."""
    from kmodels.data import order
    from kmodels.text import read_records

    found = read_records(settings.data, skip_bad=settings.skip_bad)
    if len(found.rows) < 2:
        raise recipe.InputError(
            f"the data has {len(found.rows)} record; give at least 2, to hold one out"
        )
    chosen = order(len(found.rows), settings.seed, 0)
    count = min(max(round(settings.held_out * len(chosen)), 1), len(chosen) - 1)
    parts = (sorted(chosen[count:]), sorted(chosen[:count]))
    learnt, held_out = ([found.rows[i] for i in part] for part in parts)
    return learnt, held_out, found.skipped


def demonstration(settings: Settings) -> Any:
    """A small model with new weights, and a tokenizer of digits."""
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


def read(path: Any, settings: Settings) -> Any:
    """The user's model, or the base of the demonstration's adapters; it says what it lacks."""
    from kmodels.models import Gemma3ImageTextLM

    model = Gemma3ImageTextLM.from_preset(path, dtype=settings.precision)
    if model.preprocessor is None:
        raise recipe.InputError(f"{path} holds no tokenizer; put tokenizer.json beside the weights")
    return model


def parts(model: Any, settings: Settings) -> str:
    """Freezes or adapts what --train and --rank say; returns how many parameters are left."""
    targets = [x for half, x in HALVES.items() if settings.train in ("all", half)]
    if settings.rank:
        model.backbone.enable_lora(rank=settings.rank, alpha=settings.alpha, targets=targets)
    elif settings.train != "all":
        for layer in model.backbone.layers:
            layer.trainable = (layer.name == "vision_encoder") == (settings.train == "vision")
    return f"{sum(math.prod(variable.shape) for variable in model.trainable_variables):,}"


def answer(record: Any) -> str:
    """What a record wants to be said."""
    if "messages" in record:
        return " ".join(str(record["messages"][-1]["content"]).split())
    return " ".join(str(record.get("responses") or record.get("text")).split())


def answers(model: Any, asked: list[Any], settings: Settings) -> list[str]:
    """What the model says, a batch at a time."""
    found: list[str] = []
    for start in range(0, len(asked), settings.batch_size):
        rows = asked[start : start + settings.batch_size]
        length = settings.sequence_length + settings.answer_tokens
        found += model.generate(rows, max_length=length, strip_prompt=True)
    return [" ".join(text.split()) for text in found]


def shown(model: Any, asked: list[Any]) -> list[Any]:
    """The first image of each record as the model sees it, from 0 to 1."""
    pixels = model.preprocessor.generate_preprocess(asked)["images"]
    low, high = pixels.min(), pixels.max()
    return [(row[0] - low) / (high - low) for row in pixels]


def main(argv: list[str] | None = None) -> int:
    return recipe.main("caption", Settings, train, argv, __doc__)


if __name__ == "__main__":
    sys.exit(main())
