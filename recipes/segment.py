"""Train a Vision Transformer for semantic segmentation: a class for each pixel.

    python recipes/segment.py

trains on rendered scenes, textured shapes of four classes on a ground (1,920 images of 48x48), to
a mean IoU of 0.88 on held-out ones, and draws them with predictions in predictions.png: 2 minutes
of CPU time on torch, 10 minutes on a busy machine. Another example:

    python recipes/segment.py --weights PATH --data folder:PATH \\
        --image-size 448 --crop 0.25 --flip --tune head \\
        --learning-rate 1e-3 --precision mixed_bfloat16

This is the linear evaluation of DINOv2: only batch norm and one dense layer on the patches are
trained. With --tune lora the backbone has adapters. With --head eomt queries in the last blocks
predict masks: 0.93 on the same scenes. The data folder has images/ and masks/, whose PNGs hold
class numbers; 255 marks unlabeled pixels. --recipe vit_segment_dinov3 has the settings of DINOv3's
authors for ADE20K.

The backend is KERAS_BACKEND's: jax, torch or tensorflow. All flags: --help.
"""

import sys
from dataclasses import dataclass
from typing import Any

from kmodels.runs import recipe
from kmodels.runs.recipe import flag


@dataclass(frozen=True)
class Settings(recipe.Common):
    preset: str = flag("vit_micro_patch4_48", "architecture: a registered name or a directory")
    weights: str | None = flag(None, "start from the weights (and architecture) of this path")
    data: str = flag("scenes", "scenes[:N] | folder:DIR with images/ and masks/")
    image_size: int | None = flag(None, "height and width in pixels; default: the preset's")
    ignore: int = flag(255, "value of unlabeled pixels")
    reduce_labels: bool = flag(False, "0 is unlabeled, and classes in files begin with 1")
    head: str = flag(
        "linear", "linear layer on patches, or EoMT queries", choices=("linear", "eomt")
    )
    queries: int = flag(
        16, "with --head eomt: largest number of segments per image", needs=("head", "eomt")
    )
    query_blocks: int = flag(
        2, "with --head eomt: number of last blocks with queries", needs=("head", "eomt")
    )
    upscale: int = flag(
        1, "with --head eomt: how often the patch grid is doubled", needs=("head", "eomt")
    )
    points: int = flag(256, "with --head eomt: pixels per mask in the loss", needs=("head", "eomt"))
    tune: str = flag("all", "trained weights", choices=("all", "head", "lora"))
    rank: int = flag(8, "LoRA rank, with --tune lora", needs=("tune", "lora"))
    epochs: int = flag(10, "passes over the training images", small=1)
    batch_size: int = flag(32, "images per step, over all devices")
    # Optimizer
    learning_rate: float | None = flag(
        None, "highest learning rate; default: 3e-3, for all --weights 3e-4"
    )
    schedule: str = flag(
        "cosine",
        "learning rate after the warm-up; one_cycle is DINOv3's",
        choices=("cosine", "linear", "constant", "one_cycle"),
    )
    warmup: float = flag(0.1, "share of the steps (below 1) or number of steps of the warm-up")
    warmup_from: float | None = flag(None, "learning rate of the first step of the warm-up")
    weight_decay: float = flag(0.05, "decoupled weight decay of matrices")
    decay_vectors: bool = flag(False, "weight decay of biases and norms too")
    corrected_epsilon: bool = flag(False, "add epsilon as torch does")
    layer_decay: float | None = flag(
        None, "learning-rate factor per block, from the head down; default: for all --weights 0.75"
    )
    clip_norm: float = flag(1.0, "gradient clipping: largest global norm; 0 for no limit")
    accumulate: int = flag(1, "gradient accumulation: batches per update")
    ema: float | None = flag(None, "decay of a moving average of the weights (EMA), e.g. 0.999")
    # Regularization and augmentation
    batch_norm: bool = flag(
        True,
        "batch norm in the head; not over a torch or TensorFlow mesh",
        needs=("head", "linear"),
    )
    head_dropout: float = flag(0.0, "dropout rate before the last layer", needs=("head", "linear"))
    channel_dropout: float = flag(
        0.0, "rate of dropping channels before the batch norm", needs=("head", "linear")
    )
    count_ignored: bool = flag(
        False, "divide the loss by all pixels, also unlabeled ones", needs=("head", "linear")
    )
    drop_path: float | None = flag(None, "stochastic depth rate of the last block")
    flip: bool = flag(True, "flip images horizontally at random")
    crop: float | None = flag(
        None, "random resized crop of at least this share of the area, e.g. 0.25"
    )
    scale: str | None = flag(
        None, "LOW,HIGH: random scale of the shorter side before a crop, e.g. 0.5,2"
    )
    distort: bool = flag(False, "change brightness, contrast, saturation and hue at random")
    slide: bool = flag(False, "evaluate in overlapping windows of images in their aspect ratio")


FROM_SCRATCH = {"learning_rate": 3e-3}
PRETRAINED = {"learning_rate": 3e-4, "layer_decay": 0.75}
# Settings that a resumed run must share with the one it continues.
FIXED = (
    *("preset", "weights", "data", "image_size", "ignore", "tune", "rank", "batch_size"),
    *("accumulate", "batch_norm", "seed", "head", "queries", "query_blocks", "upscale", "points"),
    *("reduce_labels", "channel_dropout", "slide"),
)


def check(settings: Settings) -> tuple[float, float] | None:
    """Returns the range of --scale.

    Raises:
        InputError: for flags that do not fit together.
    """
    if settings.scale is None:
        return None
    try:
        low, high = map(float, settings.scale.split(","))
    except ValueError:
        message = f"--scale is {settings.scale}; give two numbers such as 0.5,2"
        raise recipe.InputError(message) from None
    if settings.ignore != 255:
        raise recipe.InputError(
            f"--scale pads with 255, and --ignore is {settings.ignore}; leave one of them out"
        )
    return low, high


def train(settings: Settings, folder: recipe.Folder) -> None:
    recipe.at_least(settings, epochs=1, image_size=1, clip_norm=0, rank=1, batch_size=1, warmup=0)
    scale = check(settings)
    from kmodels import training
    from kmodels.data import MaskLoader, open_masks
    from kmodels.models import (
        EoMTImageSegmenter,
        ViTBackbone,
        ViTImageSegmenter,
        ViTImageSegmenterPreprocessor,
    )
    from kmodels.runs import results

    recipe.prepare(settings)
    rates = PRETRAINED if settings.weights and settings.tune == "all" else FROM_SCRATCH
    settings = recipe.filled(settings, folder, **rates)

    # === Data ===
    recipe.working(f"reading the data: {settings.data}")
    origin = settings.weights or settings.preset
    named = ViTBackbone.presets.get(origin)
    config = named or ViTBackbone.from_preset(origin, load_weights=False).config.to_dict()
    height, width, channels = config["image_shape"]
    size = (settings.image_size or height, settings.image_size or width)
    data = open_masks(
        settings.data,
        image_size=size,
        seed=settings.seed,
        reduce_labels=settings.reduce_labels,
        ignore_class=settings.ignore,
    )

    # === Model ===
    recipe.working(f"building {origin}")
    overrides = recipe.given(drop_path_rate=settings.drop_path)
    total = settings.steps or settings.epochs * (len(data.train) // settings.batch_size)
    if settings.head == "linear":
        cls = ViTImageSegmenter
        overrides |= {
            "use_batch_norm": settings.batch_norm,
            "dropout": settings.head_dropout,
            "channel_dropout": settings.channel_dropout,
        }
    else:
        cls = EoMTImageSegmenter
        overrides |= {
            "num_queries": settings.queries,
            "num_blocks": settings.query_blocks,
            "num_upscale_blocks": settings.upscale,
            "train_num_points": settings.points,
            "annealing_steps": max(total, 1),
        }
    model = cls.from_preset(
        origin,
        dtype=settings.precision,
        num_classes=data.num_classes,
        class_names=data.class_names,
        image_shape=(*size, channels),
        ignore_class=settings.ignore,
        **overrides,
    )
    if settings.tune == "lora":
        model.backbone.enable_lora(settings.rank, targets="all-linear")
    if settings.tune == "head":
        model.backbone.trainable = False
    preprocessor = model.preprocessor or ViTImageSegmenterPreprocessor(size, data.mean, data.std)
    if settings.slide:
        preprocessor = ViTImageSegmenterPreprocessor(
            size,
            preprocessor.mean,
            preprocessor.std,
            preprocessor.interpolation,
            preprocessor.antialias,
            aspect_ratio="slide",
        )
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
    order: dict[str, Any] = {"shuffle": True, "seed": settings.seed, "drop_last": True}
    order |= {"scale": scale, "distort": settings.distort}
    augment = {"flip": settings.flip, "crop": settings.crop}
    loader = MaskLoader(data.train, settings.batch_size, **augment, **order, **common)
    validation, test = (
        training.WholeBatches(MaskLoader(part, settings.batch_size, **common)) if part else None
        for part in (data.validation, data.test)
    )

    # === Optimizer and loss ===
    warmup = round(settings.warmup * (total if settings.warmup < 1 else 1))
    schedule = training.WarmupSchedule(
        settings.learning_rate, total, warmup, settings.schedule, start=settings.warmup_from
    )
    optimizer = training.AdamW(
        schedule,
        weight_decay=settings.weight_decay,
        decay_vectors=settings.decay_vectors,
        corrected_epsilon=settings.corrected_epsilon,
        layer_decay=settings.layer_decay,
        clip_norm=settings.clip_norm or None,
        accumulate=settings.accumulate,
        ema=settings.ema,
    )
    loss = None  # EoMT has its own loss of matched masks.
    if settings.head == "linear":
        loss = training.PixelCrossentropy(settings.ignore, count_ignored=settings.count_ignored)
    metric = training.MeanIoU(data.num_classes, ignore_class=settings.ignore)
    model = recipe.parallelize(model)
    model.compile(optimizer, loss, metrics=None, weighted_metrics=[metric])

    # === Training ===
    best = "val_mean_iou" if validation else None
    facts = results.image_facts(settings.data, data)
    recipe.introduce(folder, model, facts, steps=total, steps_per_epoch=len(loader), best=best)
    runner = recipe.fit(folder, model, loader, validation, schedule, FIXED, best=best)

    # === Results ===
    results.report_masks(folder, model, data, runner, validation, test, preprocessor)


def main(argv: list[str] | None = None) -> int:
    return recipe.main("segment", Settings, train, argv, __doc__)


if __name__ == "__main__":
    sys.exit(main())
