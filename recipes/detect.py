"""Train a Vision Transformer to detect objects: a class and a box for each.

    python recipes/detect.py

trains on rendered scenes, textured shapes of four classes (1,920 images of
48x48), to an average precision of 0.29 on held-out ones (0.61 at an IoU of
0.5), and draws them with predicted boxes in predictions.png. Another example:

    python recipes/detect.py --weights PATH --data coco:PATH \\
        --image-size 448 --crop 0.3 --tune lora --precision mixed_bfloat16

The data folder has COCO's layout, annotations/*train*.json and the images in
train*/, or that of Roboflow, or one JSON file beside its images. The average
precision is that of pycocotools (pip install 'kmodels[detection]'); without it
only the loss is reported.

The backend is KERAS_BACKEND's: jax, torch or tensorflow. All flags: --help.
"""

import sys
from dataclasses import dataclass

from kmodels.runs import recipe
from kmodels.runs.recipe import flag


@dataclass(frozen=True)
class Settings(recipe.Common):
    preset: str = flag("vit_micro_patch4_48", "architecture: a registered name or a directory")
    weights: str | None = flag(None, "start from the weights (and architecture) of this path")
    data: str = flag("scenes", "scenes[:N] | coco:DIR with images and annotations")
    image_size: int | None = flag(None, "height and width in pixels; default: the preset's")
    queries: int = flag(16, "largest number of objects per image")
    decoder_layers: int = flag(3, "number of blocks of the decoder")
    decoder_dim: int = flag(64, "width of the decoder")
    decoder_heads: int = flag(4, "attention heads of the decoder")
    tune: str = flag("all", "trained weights of the backbone", choices=("all", "head", "lora"))
    rank: int = flag(8, "LoRA rank, with --tune lora", needs=("tune", "lora"))
    epochs: int = flag(20, "passes over the training images", small=1)
    batch_size: int = flag(32, "images per step, over all devices")
    # Optimizer
    learning_rate: float = flag(1e-3, "highest learning rate")
    schedule: str = flag(
        "cosine", "learning rate after the warm-up", choices=("cosine", "linear", "constant")
    )
    warmup: float = flag(0.05, "share of the steps used for learning-rate warm-up")
    weight_decay: float = flag(1e-4, "decoupled weight decay of matrices")
    clip_norm: float = flag(0.1, "gradient clipping: largest global norm; 0 for no limit")
    accumulate: int = flag(1, "gradient accumulation: batches per update")
    ema: float | None = flag(None, "decay of a moving average of the weights (EMA), e.g. 0.999")
    # Regularization and augmentation
    head_dropout: float = flag(0.0, "dropout rate of the decoder")
    drop_path: float | None = flag(None, "stochastic depth rate of the last block")
    flip: bool = flag(True, "flip images horizontally at random")
    crop: float | None = flag(
        None, "random resized crop of at least this share of the area, e.g. 0.25"
    )


# Settings that a resumed run must share with the one it continues.
FIXED = (
    *("preset", "weights", "data", "image_size", "queries", "decoder_layers", "decoder_dim"),
    *("decoder_heads", "tune", "rank", "batch_size", "accumulate", "seed"),
)


def train(settings: Settings, folder: recipe.Folder) -> None:
    recipe.at_least(settings, epochs=1, image_size=1, clip_norm=0, rank=1, batch_size=1)
    recipe.check_fractions(settings, "warmup")
    from kmodels import training
    from kmodels.data import BoxLoader, open_boxes
    from kmodels.models import ViTBackbone, ViTObjectDetector, ViTObjectDetectorPreprocessor
    from kmodels.runs import results

    recipe.prepare(settings)

    # === Data ===
    recipe.working(f"reading the data: {settings.data}")
    origin = settings.weights or settings.preset
    named = ViTBackbone.presets.get(origin)
    config = named or ViTBackbone.from_preset(origin, load_weights=False).config.to_dict()
    height, width, channels = config["image_shape"]
    size = (settings.image_size or height, settings.image_size or width)
    data = open_boxes(settings.data, image_size=size, seed=settings.seed)

    # === Model ===
    recipe.working(f"building {origin}")
    model = ViTObjectDetector.from_preset(
        origin,
        dtype=settings.precision,
        num_classes=data.num_classes,
        class_names=data.class_names,
        image_shape=(*size, channels),
        num_queries=settings.queries,
        num_decoder_layers=settings.decoder_layers,
        decoder_dim=settings.decoder_dim,
        num_decoder_heads=settings.decoder_heads,
        decoder_dropout=settings.head_dropout,
        **recipe.given(drop_path_rate=settings.drop_path),
    )
    if settings.tune == "lora":
        model.backbone.enable_lora(settings.rank, targets="all-linear")
    if settings.tune == "head":
        model.backbone.trainable = False
    preprocessor = model.preprocessor or ViTObjectDetectorPreprocessor(size, data.mean, data.std)
    model.preprocessor = None  # The loaders normalize, after augmentation.

    # === Batches ===
    common = {
        "image_size": size,
        "channels": channels,
        "mean": preprocessor.mean,
        "std": preprocessor.std,
        "resizing": preprocessor.resizing,
        "workers": settings.workers,
    }
    order = {"shuffle": True, "seed": settings.seed, "drop_last": True}
    augment = {"flip": settings.flip, "crop": settings.crop}
    loader = BoxLoader(data.train, settings.batch_size, **augment, **order, **common)
    validation, test = (
        training.WholeBatches(BoxLoader(part, settings.batch_size, **common)) if part else None
        for part in (data.validation, data.test)
    )

    # === Optimizer ===
    total = settings.steps or settings.epochs * len(loader)
    warmup = round(settings.warmup * total)
    schedule = training.WarmupSchedule(settings.learning_rate, total, warmup, settings.schedule)
    optimizer = training.AdamW(
        schedule,
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm or None,
        accumulate=settings.accumulate,
        ema=settings.ema,
    )
    model = recipe.parallelize(model)
    model.compile(optimizer)

    # === Training ===
    best = "val_loss" if validation else None
    facts = results.image_facts(settings.data, data)
    recipe.introduce(folder, model, facts, steps=total, steps_per_epoch=len(loader), best=best)
    runner = recipe.fit(folder, model, loader, validation, schedule, FIXED, best=best)

    # === Results ===
    results.report_boxes(folder, model, data, runner, validation, test, preprocessor)


def main(argv: list[str] | None = None) -> int:
    return recipe.main("detect", Settings, train, argv, __doc__)


if __name__ == "__main__":
    sys.exit(main())
