"""Train an image and a text tower on captions, then classify by class names (zero-shot).

    python recipes/zero_shot.py

makes captions from the class names of the training images by templates, trains both towers with a
contrastive loss, and assigns each held-out image the class with the most similar texts.

    python recipes/zero_shot.py --data idx:PATH/fashion-mnist
        # one epoch, 54,000 images, two CPU cores, busy machine: 2 minutes
        # on torch, 3 on TensorFlow, 5 on JAX; test accuracy 0.841, 0.844,
        # 0.841, with one template instead of five 0.839, 0.843, 0.839

With the sigmoid loss of SigLIP instead of CLIP's softmax:

    python recipes/zero_shot.py --data idx:PATH/fashion-mnist \\
        --preset siglip_micro_patch7_28

The backend is KERAS_BACKEND's: jax, torch or tensorflow. All flags: --help.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kmodels.runs import recipe
from kmodels.runs.recipe import flag

TEMPLATES = (
    "a photo of a {}.",
    "a small grey image of a {}.",
    "one {} on a black background.",
    "this is a {}.",
    "a {} as a shop shows it.",
)
VOCABULARY = 512


@dataclass(frozen=True)
class Settings(recipe.Common):
    preset: str = flag("clip_micro_patch7_28", "architecture, such as siglip_micro_patch7_28")
    data: str = flag("digits", "digits | synthetic[:N] | idx:DIR | folder:DIR_OR_ZIP | npz:FILE")
    epochs: int = flag(1, "passes over the training images", small=1)
    batch_size: int = flag(128, "pairs per step, over all devices")
    # Optimizer
    learning_rate: float = flag(1e-3, "highest learning rate")
    schedule: str = flag(
        "cosine", "learning rate after the warm-up", choices=("cosine", "linear", "constant")
    )
    warmup: float = flag(0.1, "share of the steps used for learning-rate warm-up")
    weight_decay: float = flag(0.05, "decoupled weight decay of matrices")
    clip_norm: float = flag(1.0, "gradient clipping: largest global norm; 0 for no limit")


# Settings that a resumed run must share with the one it continues.
FIXED = ("preset", "data", "batch_size", "seed")


def pairs(texts: Any, seed: int, source: Any, batch_size: int, **settings: Any) -> Any:
    """Returns a loader of images, each with one of the texts of its class.

    Args:
        texts: inputs of the text tower by name, (classes, templates, tokens) each.
        seed: seed of the order and of the choice of texts.
        source: labelled images.
        batch_size: pairs per batch.
        **settings: of `ImageLoader`.
    """
    import numpy as np

    from kmodels.data import ImageLoader

    class Pairs(ImageLoader):
        def __getitem__(self, index: int) -> Any:
            images, labels = super().__getitem__(index)
            rng = np.random.default_rng([seed, self.epoch, index + self.skip])
            templates = rng.integers(len(TEMPLATES), size=len(labels))
            inputs = {name: x[labels, templates] for name, x in texts.items()}
            return {"images": images, **inputs}, np.zeros(len(labels), "int32")

    return Pairs(source, batch_size, shuffle=True, seed=seed, drop_last=True, **settings)


def plain(names: Sequence[str]) -> list[str]:
    """Returns class names for use in a sentence: lower case, without / and _."""
    return [name.lower().replace("/", " or ").replace("_", " ") for name in names]


def train(settings: Settings, folder: recipe.Folder) -> None:
    recipe.at_least(settings, epochs=1, clip_norm=0)
    recipe.check_fractions(settings, "warmup")
    import numpy as np

    from kmodels import training
    from kmodels.data import open_dataset
    from kmodels.models import ImageTextPreprocessor, ImageTextSimilarity
    from kmodels.runs import plots, results
    from kmodels.text.training import train_tokenizer

    recipe.prepare(settings)

    # === Data ===
    recipe.working(f"reading the data: {settings.data}")
    if settings.preset not in ImageTextSimilarity.presets:
        raise recipe.InputError(f"--preset is {settings.preset!r}; give a preset with two towers")
    fields = ImageTextSimilarity.presets[settings.preset]
    height, width, _ = fields["vision_encoder"]["image_shape"]
    data = open_dataset(settings.data, image_size=(height, width), seed=settings.seed)
    assert data.test is not None  # split off if missing
    names = plain(data.class_names)
    captions = [template.replace("{}", name) for name in names for template in TEMPLATES]

    # === Model ===
    recipe.working(f"building {settings.preset}")
    tokenizer = train_tokenizer(captions, VOCABULARY)
    is_clip = fields.get("projection_dim") is not None
    preprocessor = ImageTextPreprocessor(
        tokenizer,
        "clip" if is_clip else "siglip",
        image_size=(height, width),
        mean=data.mean,
        std=data.std,
        sequence_length=fields["text_encoder"]["max_sequence_length"],
    )
    text = {**fields["text_encoder"], "vocabulary_size": tokenizer.vocabulary_size()}
    if is_clip:
        text["end_token_id"] = tokenizer.end_token_id
    shape = (height, width, data.image_shape[-1])
    model = ImageTextSimilarity.from_preset(
        settings.preset,
        dtype=settings.precision,
        vision_encoder={**fields["vision_encoder"], "image_shape": shape},
        text_encoder=text,
    )

    # === Training ===
    rows = preprocessor(captions)
    texts = {name: x.reshape(len(names), len(TEMPLATES), -1) for name, x in rows.items()}
    images = preprocessor.image_preprocessor
    loader = pairs(
        texts,
        settings.seed,
        data.train,
        settings.batch_size,
        image_size=(height, width),
        channels=shape[-1],
        mean=images.mean,
        std=images.std,
        resizing=images.resizing,
        workers=settings.workers,
    )
    total = settings.steps or settings.epochs * len(loader)
    warmup = round(settings.warmup * total)
    schedule = training.WarmupSchedule(settings.learning_rate, total, warmup, settings.schedule)
    optimizer = training.AdamW(
        schedule, weight_decay=settings.weight_decay, clip_norm=settings.clip_norm or None
    )
    model = recipe.parallelize(model)
    model.compile(optimizer)
    facts = results.image_facts(settings.data, data)
    steps = 0 if settings.evaluate else total
    recipe.introduce(folder, model, facts, steps=steps, steps_per_epoch=len(loader))
    runner = None
    if settings.evaluate:
        training.restore_newest(folder.path / "checkpoints", model)
    else:
        options = recipe.run_options(settings, FIXED)
        runner = training.Runner(model, folder.path, loader, None, schedule, **options)
        folder.write_config()
        runner.run()

    # === Results ===
    recipe.working("classifying held-out images by class names")
    model.preprocessor = preprocessor
    pixels, labels = data.test.batch(np.arange(len(data.test)))
    metrics = dict(runner.metrics) if runner else {}
    for name, templates in (("", TEMPLATES), ("_of_one_template", TEMPLATES[:1])):
        classes = model.classify(pixels, names, templates, batch_size=256).argmax(axis=1)
        metrics[f"test_accuracy{name}"] = float((classes == labels).mean())
    recipe.working(None)
    recipe.say_metrics(metrics)
    content = results.result(folder, model, metrics, runner)
    if runner is None:
        folder.write_json("evaluation.json", content)
        return
    recipe.working("saving the model")
    plots.curves(folder.path / "curves.png", runner.history.rows)
    results.save_model(folder, model, content["metrics"])
    folder.write_json("result.json", content)


def main(argv: list[str] | None = None) -> int:
    return recipe.main("zero_shot", Settings, train, argv, __doc__)


if __name__ == "__main__":
    sys.exit(main())
