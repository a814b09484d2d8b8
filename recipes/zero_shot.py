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

A pretrained CLIP or SigLIP brings its tokenizer and its image size:

    python recipes/zero_shot.py --weights PATH --data folder:PATH \\
        --learning-rate 1e-5

--epochs 0 only classifies, and then all images of a folder without parts. With --recipe
siglip2_zero_shot that is the evaluation of SigLIP 2's authors.

The backend is KERAS_BACKEND's: jax, torch or tensorflow. All flags: --help.
"""

import string
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
CHUNK = 256  # images and texts that are encoded at a time


@dataclass(frozen=True)
class Settings(recipe.Common):
    preset: str = flag("clip_micro_patch7_28", "architecture, such as siglip_micro_patch7_28")
    weights: str | None = flag(None, "start from the weights and the tokenizer of this path")
    data: str = flag("digits", "digits | synthetic[:N] | idx:DIR | folder:DIR_OR_ZIP | npz:FILE")
    class_names: str | None = flag(
        None, "file with the name of each class, one per line; default: those of the data"
    )
    templates: str | None = flag(
        None, "texts with {} for a name, separated by |, or a file of one per line"
    )
    canonicalize: bool = flag(
        False, "names and templates in lower case, without punctuation, as SigLIP's authors do"
    )
    epochs: int = flag(1, "passes over the training images; 0 with --weights only classifies")
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
FIXED = ("preset", "weights", "data", "batch_size", "seed")
FIXED += ("class_names", "templates", "canonicalize")
# Flags without effect if nothing is trained.
OF_TRAINING = ("steps", "evaluate", "batch_size", "learning_rate", "schedule", "warmup")
OF_TRAINING += ("weight_decay", "clip_norm", "mesh", "workers", "resume", "checkpoint_every")
OF_TRAINING += ("keep", "log_every", "log_to", "license")


def pairs(
    texts: Any, templates: int, seed: int, source: Any, batch_size: int, **settings: Any
) -> Any:
    """Returns a loader of images, each with one of the texts of its class.

    Args:
        texts: inputs of the text tower by name, (classes, templates, tokens) each.
        templates: number of templates.
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
            chosen = rng.integers(templates, size=len(labels))
            inputs = {name: x[labels, chosen] for name, x in texts.items()}
            return {"images": images, **inputs}, np.zeros(len(labels), "int32")

    return Pairs(source, batch_size, shuffle=True, seed=seed, drop_last=True, **settings)


def plain(names: Sequence[str]) -> list[str]:
    """Returns class names for use in a sentence: lower case, without / and _."""
    return [name.lower().replace("/", " or ").replace("_", " ") for name in names]


def canonical(text: str) -> str:
    """Returns a text in lower case without punctuation, but with the place of the name."""
    drop = str.maketrans("", "", string.punctuation)
    parts = (part.replace("_", " ").translate(drop) for part in text.split("{}"))
    return " ".join("{}".join(parts).lower().split())


def from_scratch(settings: Settings, captions: list[str], data: Any) -> tuple[Any, Any]:
    """Returns a model of --preset and its preprocessor, with a tokenizer of the captions."""
    from kmodels.models import ImageTextPreprocessor, ImageTextSimilarity
    from kmodels.text.training import train_tokenizer

    fields = ImageTextSimilarity.presets[settings.preset]
    height, width, _ = fields["vision_encoder"]["image_shape"]
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
    return model, preprocessor


def train(settings: Settings, folder: recipe.Folder) -> None:
    recipe.at_least(settings, epochs=0 if settings.weights else 1, clip_norm=0)
    recipe.check_fractions(settings, "warmup")
    changed = [name for name in OF_TRAINING if getattr(settings, name) != getattr(Settings, name)]
    if settings.epochs == 0 and changed:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        raise recipe.InputError(f"{flags} has no effect with --epochs 0; leave it out")
    templates = list(TEMPLATES)
    if settings.templates is not None:
        templates = recipe.texts_of("--templates", settings.templates)
    if wrong := [text for text in templates if text.count("{}") != 1]:
        raise recipe.InputError(f"the template {wrong[0]!r} needs one {{}}, for the class name")
    import numpy as np

    from kmodels import training
    from kmodels.data import open_dataset
    from kmodels.models import ImageTextSimilarity
    from kmodels.runs import plots, results

    recipe.prepare(settings)

    # === Data ===
    recipe.working(f"reading the data: {settings.data}")
    if settings.weights is None and settings.preset not in ImageTextSimilarity.presets:
        raise recipe.InputError(f"--preset is {settings.preset!r}; give a preset with two towers")
    origin = settings.weights or settings.preset
    if settings.weights:
        recipe.working(f"building {origin}")
        model = ImageTextSimilarity.from_preset(origin, dtype=settings.precision)
        preprocessor = model.preprocessor
        images = getattr(preprocessor, "image_preprocessor", None)
        if (size := getattr(images, "image_size", None)) is None:
            lacks = "no tokenizer" if preprocessor is None else "no fixed image size (NaFlex)"
            raise recipe.InputError(f"{origin} has {lacks}; give a model with one")
    else:
        size = ImageTextSimilarity.presets[origin]["vision_encoder"]["image_shape"][:2]
    data = open_dataset(
        settings.data,
        image_size=tuple(size),
        seed=settings.seed,
        validation_split=0.1 if settings.epochs else 0.0,
    )
    test = data.test or data.validation or data.train
    names = plain(data.class_names)
    if settings.class_names is not None:
        names = recipe.texts_of("--class-names", settings.class_names)
        if len(names) != data.num_classes:
            raise recipe.InputError(
                f"{settings.class_names} has {len(names)} names for {data.num_classes} classes; "
                "give one line for each"
            )
    if settings.canonicalize:
        names, templates = list(map(canonical, names)), list(map(canonical, templates))
    captions = [template.replace("{}", name) for name in names for template in templates]

    # === Model ===
    if settings.weights is None:
        recipe.working(f"building {origin}")
        model, preprocessor = from_scratch(settings, captions, data)
    images = preprocessor.image_preprocessor
    facts = results.image_facts(settings.data, data)
    runner = None
    if settings.epochs == 0:
        recipe.introduce(folder, model, facts)
        folder.write_config()
    else:
        # === Training ===
        rows = preprocessor(captions)
        texts = {name: x.reshape(len(names), len(templates), -1) for name, x in rows.items()}
        loader = pairs(
            texts,
            len(templates),
            settings.seed,
            data.train,
            settings.batch_size,
            image_size=images.image_size,
            channels=model.backbone.config.vision.image_shape[-1],
            mean=images.mean,
            std=images.std,
            resizing=images.resizing,
            workers=settings.workers,
        )
        model.preprocessor = None  # The loader normalizes, and texts are token ids.
        total = settings.steps or settings.epochs * len(loader)
        warmup = round(settings.warmup * total)
        schedule = training.WarmupSchedule(settings.learning_rate, total, warmup, settings.schedule)
        optimizer = training.AdamW(
            schedule, weight_decay=settings.weight_decay, clip_norm=settings.clip_norm or None
        )
        model = recipe.parallelize(model)
        model.compile(optimizer)
        recipe.introduce(folder, model, facts, steps=total, steps_per_epoch=len(loader))
        runner = recipe.fit(folder, model, loader, None, schedule, FIXED)

    # === Results ===
    recipe.working(f"classifying {len(test):,} images by class names")
    model.preprocessor = preprocessor
    metrics = dict(runner.metrics) if runner else {}
    ways = {"": templates, "_of_one_template": templates[:1]}
    classes = {way: model.class_embeddings(names, own, CHUNK) for way, own in ways.items()}
    right = dict.fromkeys(ways, 0)
    for start in range(0, len(test), CHUNK):
        pixels, labels = test.batch(np.arange(start, min(start + CHUNK, len(test))))
        vectors = model.encode_image(pixels, CHUNK)
        for way, weights in classes.items():
            right[way] += int(((vectors @ weights.T).argmax(axis=1) == labels).sum())
    metrics |= {f"test_accuracy{way}": count / len(test) for way, count in right.items()}
    recipe.working(None)
    recipe.say_metrics(metrics)
    content = results.result(folder, model, metrics, runner)
    if settings.evaluate:
        folder.write_json("evaluation.json", content)
        return
    if runner is not None:
        recipe.working("saving the model")
        plots.curves(folder.path / "curves.png", runner.history.rows)
        results.save_model(folder, model, content["metrics"])
    folder.write_json("result.json", content)


def main(argv: list[str] | None = None) -> int:
    return recipe.main("zero_shot", Settings, train, argv, __doc__)


if __name__ == "__main__":
    sys.exit(main())
