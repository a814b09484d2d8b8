"""Pretrain a Vision Transformer without labels as a masked autoencoder (MAE).

    python recipes/mae.py

masks three quarters of the patches of handwritten digits and trains a masked
autoencoder to predict their pixels. Then k nearest neighbours and a linear
probe classify its frozen features; the same is done with random weights.
reconstruction.png shows images, their visible patches and reconstructions.

    python recipes/mae.py --preset vit_micro_patch7_28 --patch-size 4 \\
        --data idx:PATH/fashion-mnist --steps 1500 --batch-size 128 \\
        --decoder-layers 1 --probe-images 3000
            # four epochs, torch, CPU: test accuracy of neighbours 0.587
            # with random weights and 0.768 after, of the linear probe 0.725
            # and 0.805; with all labels a classifier reaches 0.913 in 42
            # epochs
    python recipes/vit.py --weights runs/mae/model \\
        --data idx:PATH/fashion-mnist
            # continues with the encoder and labels
    python recipes/mae.py --preset vit_small_patch16_224 \\
        --data folder:PATH --crop 0.2 --flip --precision mixed_bfloat16

The backend is KERAS_BACKEND's: jax, torch or tensorflow. All flags: --help.
"""

import sys
from dataclasses import dataclass
from typing import Any

from kmodels.runs import recipe
from kmodels.runs.recipe import flag


@dataclass(frozen=True)
class Settings(recipe.Common):
    preset: str = flag("vit_micro_patch2_8", "architecture: a registered name or a directory")
    weights: str | None = flag(None, "start from the weights (and architecture) of this path")
    data: str = flag("digits", "digits | synthetic[:N] | idx:DIR | folder:DIR_OR_ZIP | npz:FILE")
    image_size: int | None = flag(None, "height and width in pixels; default: the preset's")
    patch_size: int | None = flag(None, "side of a patch in pixels; default: the preset's")
    skip_bad: bool = flag(False, "skip unreadable images and list them")
    epochs: int = flag(100, "passes over the training images", small=2)
    batch_size: int = flag(64, "images per step, over all devices")
    # The task
    mask_ratio: float = flag(0.75, "share of masked patches")
    raw_pixels: bool = flag(False, "predict raw pixels instead of pixels normalized per patch")
    decoder_dim: int = flag(64, "width of the decoder")
    decoder_layers: int = flag(2, "blocks of the decoder")
    decoder_heads: int = flag(4, "attention heads of the decoder")
    # Optimizer
    learning_rate: float = flag(2e-3, "highest learning rate")
    schedule: str = flag(
        "cosine", "learning rate after the warm-up", choices=("cosine", "linear", "constant")
    )
    warmup: float = flag(0.1, "share of the steps used for learning-rate warm-up")
    weight_decay: float = flag(0.05, "decoupled weight decay of matrices")
    clip_norm: float = flag(1.0, "gradient clipping: largest global norm; 0 for no limit")
    accumulate: int = flag(1, "gradient accumulation: batches per update")
    # Augmentation
    flip: bool = flag(False, "flip images horizontally at random")
    crop: float | None = flag(
        None, "random resized crop of at least this share of the area, e.g. 0.2"
    )
    # Evaluation of the features
    pooling: str = flag("gap", "features of an image", choices=("gap", "token"))
    probe_images: int = flag(10000, "training images with labels for the probe; 0 for all")
    neighbours: int = flag(20, "number of neighbours that vote")


# Settings that a resumed run must share with the one it continues.
FIXED = (
    *("preset", "weights", "data", "image_size", "patch_size", "batch_size", "accumulate", "seed"),
    *("mask_ratio", "raw_pixels", "decoder_dim", "decoder_layers", "decoder_heads"),
)
# Images in reconstruction.png.
SHOWN = 12


def train(settings: Settings, folder: recipe.Folder) -> None:
    recipe.at_least(
        settings, epochs=1, image_size=1, patch_size=1, clip_norm=0, neighbours=1, probe_images=0
    )
    recipe.check_fractions(settings, "warmup", "mask_ratio")
    from kmodels import training
    from kmodels.data import Augment, ImageLoader, open_dataset
    from kmodels.models import (
        ViTBackbone,
        ViTImageClassifier,
        ViTImageClassifierPreprocessor,
        ViTMAEForPreTraining,
    )
    from kmodels.runs import plots, results
    from kmodels.runs.probe import Probe

    recipe.prepare(settings)

    # === Data ===
    recipe.working(f"reading the data: {settings.data}")
    origin = settings.weights or settings.preset
    named = ViTBackbone.presets.get(origin)
    config = named or ViTBackbone.from_preset(origin, load_weights=False).config.to_dict()
    height, width, channels = config["image_shape"]
    size = (settings.image_size or height, settings.image_size or width)
    data = open_dataset(
        settings.data, image_size=size, seed=settings.seed, skip_bad=settings.skip_bad
    )
    assert data.validation is not None and data.test is not None  # split off if missing
    for file, reason in data.skipped:
        recipe.say(f"skipped {file}: {reason}")
    shape = (*size, data.image_shape[-1] if named else channels)

    # === Model ===
    recipe.working(f"building {origin}")
    sizes = recipe.given(image_shape=shape, patch_size=settings.patch_size)
    model = ViTMAEForPreTraining.from_preset(
        origin,
        dtype=settings.precision,
        mask_ratio=settings.mask_ratio,
        norm_pix_loss=not settings.raw_pixels,
        decoder_hidden_size=settings.decoder_dim,
        decoder_num_hidden_layers=settings.decoder_layers,
        decoder_num_attention_heads=settings.decoder_heads,
        decoder_intermediate_size=4 * settings.decoder_dim,
        **sizes,
    )
    preprocessor = model.preprocessor or ViTImageClassifierPreprocessor(size, data.mean, data.std)
    model.preprocessor = None  # The loaders normalize, after augmentation.

    # === Batches ===
    common = {
        "image_size": size,
        "channels": shape[-1],
        "mean": preprocessor.mean,
        "std": preprocessor.std,
        "resizing": preprocessor.resizing,
        "workers": settings.workers,
    }
    augment = Augment(
        flip=settings.flip,
        random_resized_crop=(settings.crop, 1.0) if settings.crop else None,
    )
    order = {"shuffle": True, "seed": settings.seed, "drop_last": True}
    loader = ImageLoader(data.train, settings.batch_size, augment=augment, **order, **common)
    validation = training.WholeBatches(ImageLoader(data.validation, settings.batch_size, **common))

    # === Features before ===
    features = ViTImageClassifier(model.backbone, num_classes=0, pooling=settings.pooling)
    probe = Probe(data, settings.probe_images, settings.batch_size, settings.neighbours, common)
    recipe.working("evaluating neighbours and the linear probe before training")
    before = "given_" if settings.weights else "new_"
    metrics = probe.ask(features, before)

    # === Training ===
    total = settings.steps or settings.epochs * len(loader)
    warmup = round(settings.warmup * total)
    schedule = training.WarmupSchedule(settings.learning_rate, total, warmup, settings.schedule)
    optimizer = training.AdamW(
        schedule,
        weight_decay=settings.weight_decay,
        beta_2=0.95,
        clip_norm=settings.clip_norm or None,
        accumulate=settings.accumulate,
    )
    step = recipe.parallelize(training.TrainStep(model, model.loss_fn))
    step.compile(optimizer)
    facts = results.image_facts(settings.data, data)
    facts["details"] = f"{model.num_seen} of {model.num_patches} patches are visible"
    recipe.introduce(folder, model, facts, steps=total, steps_per_epoch=len(loader))
    runner = recipe.fit(folder, step, loader, validation, schedule, FIXED)

    # === Results ===
    recipe.working("evaluating neighbours and the linear probe")
    metrics |= probe.ask(features) | (runner.metrics if runner else {})
    content = results.result(folder, model, metrics, runner)
    if runner is None:
        folder.write_json("evaluation.json", content)
    else:
        recipe.working("drawing and saving the model")
        indices = plots.spread(len(data.test), SHOWN)
        draw(folder, model, ImageLoader(data.test, 1, **common), indices, preprocessor)
        plots.curves(folder.path / "curves.png", runner.history.rows)
        model.preprocessor = preprocessor
        results.save_model(folder, model, content["metrics"])
        folder.write_json("result.json", content)
    recipe.working(None)
    recipe.say(f"\n  {'test accuracy':24}neighbours  linear", 0)
    for name, start in ((before.removesuffix("_"), before), ("pretrained", "")):
        knn, linear = (metrics[f"{start}{way}_test_accuracy"] for way in ("knn", "linear"))
        recipe.say(f"  {name + ' weights':24}{knn:10.4f}{linear:8.4f}", 0)


def draw(folder: recipe.Folder, model: Any, loader: Any, indices: Any, preprocessor: Any) -> None:
    """Writes reconstruction.png: images, their visible patches, and reconstructions."""
    import keras
    import numpy as np

    from kmodels.runs import plots

    images = np.concatenate([loader[int(i)][0] for i in indices])
    noise = np.random.default_rng(folder.settings.seed).random((len(images), model.num_patches))
    visible, predicted = model.reconstruct_images(images, noise.astype("float32"))
    rows = [images, *map(keras.ops.convert_to_numpy, (visible, predicted))]
    mean, std = (np.asarray(x, "float32") for x in (preprocessor.mean, preprocessor.std))
    pixels = [np.clip(row * std + mean, 0, 1) for row in rows]
    names = ("image", "visible", "reconstruction")
    plots.rows(folder.path / "reconstruction.png", dict(zip(names, pixels, strict=True)))


def main(argv: list[str] | None = None) -> int:
    return recipe.main("mae", Settings, train, argv, __doc__)


if __name__ == "__main__":
    sys.exit(main())
