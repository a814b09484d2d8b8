"""Train a Vision Transformer to tell pictures apart.

    python recipes/vit.py                                   # scikit-learn's digits
    python recipes/vit.py --preset vit_micro_patch7_28 --data idx:PATH/fashion-mnist
    python recipes/vit.py --preset vit_small_patch16_224 --data folder:PATH --weights PATH \\
        --layer-decay 0.75 --mixup 0.2 --rand-augment 2,9 --precision mixed_bfloat16

The backend is KERAS_BACKEND's: jax, torch or tensorflow. All flags: --help.
"""

import sys
from dataclasses import dataclass

from kmodels import recipe
from kmodels.recipe import flag


@dataclass(frozen=True)
class Settings:
    preset: str = flag("vit_micro_patch2_8", "architecture: a registered name or a directory")
    weights: str | None = flag(None, "start from the weights (and architecture) of this path")
    data: str = flag("digits", "digits | synthetic[:N] | idx:DIR | folder:DIR_OR_ZIP | npz:FILE")
    image_size: int | None = flag(None, "height and width in pixels; the preset's by default")
    skip_bad: bool = flag(False, "leave unreadable pictures out, and say how many")
    # How long
    epochs: int = flag(40, "passes over the training pictures", small=2)
    steps: int | None = flag(None, "batches in all, instead of epochs")
    batch_size: int = flag(64, "pictures per step, over all devices")
    # Optimizer
    learning_rate: float = flag(2e-3, "highest learning rate")
    schedule: str = flag("cosine", "after warm-up", choices=("cosine", "linear", "constant"))
    warmup: float = flag(0.1, "share of the steps in which the learning rate rises")
    weight_decay: float = flag(0.05, "decoupled decay of matrices")
    layer_decay: float | None = flag(None, "factor of the learning rate from block to block below")
    clip_norm: float | None = flag(1.0, "largest global norm of the gradients; 0 for none")
    accumulate: int = flag(1, "batches whose gradients make one update")
    ema: float | None = flag(None, "momentum of a moving average of the weights, such as 0.999")
    label_smoothing: float = flag(0.1, "share of each label spread over all classes")
    # Regularisation and augmentation
    dropout: float = flag(0.0, "rate within the blocks")
    drop_path: float = flag(0.0, "rate of the last block's stochastic depth")
    head_dropout: float = flag(0.0, "rate in front of the classifier")
    flip: bool = flag(False, "mirror pictures at random")
    pad: int = flag(1, "pad by so many pixels and crop at random")
    crop: float | None = flag(None, "crop at least this share of the area and resize, e.g. 0.25")
    rand_augment: str | None = flag(None, "operations and strength of RandAugment, such as 2,9")
    erasing: float = flag(0.0, "probability of random erasing")
    mixup: float = flag(0.0, "alpha of MixUp")
    cutmix: float = flag(0.0, "alpha of CutMix")
    # Machine
    precision: str = flag("float32", "policy", choices=("float32", "mixed_bfloat16"))
    matmul_precision: str = flag("default", "of matmuls", choices=("highest", "high", "default"))
    memory_fraction: float | None = flag(None, "share of an accelerator's memory to use")
    mesh: str | None = flag(None, "devices, as in data=4 or data=2,model=2")
    workers: int = flag(0, "processes that prepare batches")
    # Run
    seed: int = flag(0, "of first weights, order, augmentation and dropout")
    out: str | None = flag(None, "directory of the run; runs/vit-<time> by default")
    resume: bool = flag(False, "go on from the newest checkpoint in --out")
    evaluate: bool = flag(False, "only evaluate --weights, or the newest checkpoint in --out")
    checkpoint_every: int = flag(0, "steps between checkpoints; 0 makes one per epoch")
    keep: int = flag(2, "newest checkpoints to keep")
    log_every: int = flag(10, "steps between fetching and writing losses")


# What a resumed run must share with the one it continues.
FIXED = ("preset", "weights", "data", "image_size", "batch_size", "accumulate", "seed")


def train(settings: Settings, folder: recipe.Folder) -> None:
    recipe.at_least(settings, epochs=1, steps=1, keep=1, log_every=1, checkpoint_every=0, workers=0)

    import keras

    from kmodels import training
    from kmodels.data import Augment, ImageLoader, open_dataset
    from kmodels.models import ViTBackbone, ViTImageClassifier, ViTImageClassifierPreprocessor
    from kmodels.models.vit import presets, sharding
    from kmodels.training import classification

    recipe.prepare(settings, sharding.LAYOUT)

    # === Data ===
    origin = settings.weights or settings.preset
    named = presets.PRESETS.get(origin)
    if named is None:
        shape = ViTBackbone.from_preset(origin, load_weights=False).config.image_shape
    else:
        shape = named["image_shape"]
    if settings.image_size:
        shape = (settings.image_size, settings.image_size, shape[-1])
    data = open_dataset(
        settings.data, image_size=shape[:2], seed=settings.seed, skip_bad=settings.skip_bad
    )
    if named:
        shape = (*shape[:2], data.image_shape[-1])
    for file, reason in data.skipped:
        print(f"left out {file}: {reason}")

    # === Model ===
    own_head = settings.evaluate and settings.weights
    model = ViTImageClassifier.from_preset(
        origin,
        dtype=settings.precision,
        image_shape=shape,
        dropout_rate=settings.dropout,
        attention_dropout=settings.dropout,
        drop_path_rate=settings.drop_path,
        dropout=settings.head_dropout,
        **({} if own_head else {"num_classes": data.num_classes}),
    )
    preprocessor = model.preprocessor or ViTImageClassifierPreprocessor(
        shape[:2], data.mean, data.std
    )
    model.preprocessor = None  # The loaders normalise, after augmentation of the pixels.
    mixes = settings.mixup > 0 or settings.cutmix > 0
    one_hot = data.num_classes if mixes or settings.label_smoothing else None
    common = {
        "image_size": shape[:2],
        "channels": shape[-1],
        "mean": preprocessor.mean,
        "std": preprocessor.std,
        "one_hot": one_hot,
        "workers": settings.workers,
    }
    augment = Augment(
        flip=settings.flip,
        crop_padding=0 if settings.crop else settings.pad,
        random_resized_crop=(settings.crop, 1.0) if settings.crop else None,
        rand_augment=recipe.numbers(settings, "rand_augment", 2),
        erasing=settings.erasing,
        mixup=settings.mixup,
        cutmix=settings.cutmix,
        num_classes=data.num_classes,
    )
    loader = ImageLoader(
        data.train, settings.batch_size, shuffle=True, seed=settings.seed, augment=augment,
        drop_last=True, **common,
    )  # fmt: skip
    validation, test = (
        training.WholeBatches(ImageLoader(part, settings.batch_size, **common)) if part else None
        for part in (data.validation, data.test)
    )

    # === Optimizer and loss ===
    total = settings.steps or settings.epochs * len(loader)
    schedule = training.WarmupSchedule(
        settings.learning_rate, total, round(settings.warmup * total), settings.schedule
    )
    optimizer = training.AdamW(
        schedule,
        weight_decay=settings.weight_decay,
        layer_decay=settings.layer_decay,
        clip_norm=settings.clip_norm or None,
        accumulate=settings.accumulate,
        ema=settings.ema,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if one_hot:
        loss = keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=settings.label_smoothing
        )
    model.compile(optimizer=optimizer, loss=loss, weighted_metrics=["accuracy"])

    # === Training ===
    runner = None
    if settings.evaluate and not settings.weights:
        training.restore_newest(folder.path / "checkpoints", model)
    elif not settings.evaluate:
        runner = training.Runner(
            model,
            folder.path,
            loader,
            validation,
            schedule=schedule,
            batch_size=settings.batch_size,
            log_every=settings.log_every,
            checkpoint_every=settings.checkpoint_every,
            keep=settings.keep,
            settings={name: getattr(settings, name) for name in FIXED},
            resume=settings.resume,
        )
        folder.write_config()
        runner.run()

    # === Results ===
    classification.report(folder, model, data, runner, validation, test, preprocessor)


def main(argv: list[str] | None = None) -> int:
    return recipe.main("vit", Settings, train, argv, __doc__)


if __name__ == "__main__":
    sys.exit(main())
