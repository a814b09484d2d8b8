"""Evaluate the features of a pretrained Vision Transformer.

    python recipes/vit_probe.py --weights PATH --data folder:PATH

classifies the frozen features of a pretrained model (a directory or file of transformers, timm,
big_vision or kmodels) with k nearest neighbours and a linear probe. With

    --tune lora     or     --tune full

the same images also train adapters, or all weights. A table and probe.png show the accuracies.
With --tune grid, DINOv2's linear classifiers are trained on frozen features instead, in one run:
one for each learning rate, on class tokens of the last or the last four blocks, with and without
the mean of the patches. --recipe vit_probe_dinov2 has the settings of its authors.

Without --weights the weights are random, as a baseline for any pretraining.

    python recipes/vit.py --preset vit_micro_patch7_28 \\
        --data idx:PATH/fashion-mnist --epochs 4 --batch-size 128 \\
        --learning-rate 1.5e-3 --precision mixed_bfloat16 --flip \\
        --out runs/fashion
    python recipes/vit_probe.py --weights runs/fashion/model \\
        --data folder:clothing10-s96.zip --flip --tune lora --epochs 5 \\
        --learning-rate 2e-3
            # 4 minutes on torch, one CPU core, 3,781 photographs; test
            # accuracy: neighbours 0.263, linear 0.355, LoRA 0.374; with
            # --tune full --learning-rate 5e-4 all weights 0.390

The backend is KERAS_BACKEND's: jax, torch or tensorflow. All flags: --help.
"""

import sys
from dataclasses import dataclass
from typing import Any

from kmodels.runs import recipe
from kmodels.runs.recipe import flag

# The values of --tune that train the model itself, and those that train anything.
MODEL, TRAINED = ("tune", "lora", "full"), ("tune", "lora", "full", "grid")
RATES = "1e-5,2e-5,5e-5,1e-4,2e-4,5e-4,1e-3,2e-3,5e-3,1e-2,2e-2,5e-2,0.1"


@dataclass(frozen=True)
class Settings(recipe.Common):
    preset: str = flag("vit_micro_patch2_8", "architecture: a registered name or a directory")
    weights: str | None = flag(None, "use the weights (and architecture) of this path")
    data: str = flag("digits", "digits | synthetic[:N] | idx:DIR | folder:DIR_OR_ZIP | npz:FILE")
    image_size: int | None = flag(None, "height and width in pixels; default: the preset's")
    skip_bad: bool = flag(False, "skip unreadable images and list them")
    pooling: str | None = flag(None, "token | gap | token_gap | map; default: the checkpoint's")
    neighbours: int = flag(
        20, "number of neighbours that vote", needs=("tune", "none", "lora", "full")
    )
    tune: str = flag(
        "none",
        "weights to train in addition; grid is DINOv2's classifiers on frozen features",
        choices=("none", "lora", "full", "grid"),
    )
    # With --tune
    rank: int = flag(8, "LoRA rank", needs=("tune", "lora"))
    epochs: int = flag(10, "passes over the training images", small=1, needs=TRAINED)
    steps: int | None = flag(None, "steps in total, instead of epochs", needs=TRAINED)
    batch_size: int = flag(32, "images per step, over all devices")
    learning_rate: float | None = flag(
        None, "highest learning rate; default: 1e-3, for --tune full 1e-4", needs=MODEL
    )
    warmup: float = flag(0.1, "share of the steps used for learning-rate warm-up", needs=MODEL)
    weight_decay: float = flag(0.05, "decoupled weight decay of matrices", needs=MODEL)
    clip_norm: float = flag(
        1.0, "gradient clipping: largest global norm; 0 for no limit", needs=MODEL
    )
    rates: str = flag(
        RATES,
        "with --tune grid: learning rates for every 256 images of a batch",
        needs=("tune", "grid"),
    )
    flip: bool = flag(False, "flip images horizontally at random", needs=TRAINED)
    crop: float | None = flag(
        None, "random resized crop of at least this share of the area, e.g. 0.25", needs=TRAINED
    )
    interpolation: str | None = flag(
        None, "of resizing; default: the checkpoint's", choices=("bilinear", "bicubic")
    )
    eval_crop: float | None = flag(
        None, "side of the center crop in evaluation, as a share of the shorter side, e.g. 0.875"
    )


# Settings that a resumed run must share with the one it continues.
FIXED = (
    *("preset", "weights", "data", "image_size", "pooling", "tune", "rates", "rank"),
    *("batch_size", "seed"),
)


def train(settings: Settings, folder: recipe.Folder) -> None:
    recipe.at_least(settings, epochs=1, image_size=1, clip_norm=0, neighbours=1, rank=1)
    recipe.check_fractions(settings, "warmup")
    rates = [rate * settings.batch_size / 256 for rate in grid_rates(settings)]
    import keras

    from kmodels import training
    from kmodels.data import Augment, ImageLoader, open_dataset
    from kmodels.models import ViTBackbone, ViTImageClassifier, ViTImageClassifierPreprocessor
    from kmodels.runs import plots, probe, results

    if settings.evaluate:
        raise recipe.InputError(
            "--evaluate does not apply: every run ends with an evaluation; leave it out"
        )
    probe.check_installed()
    recipe.prepare(settings)
    rate = 1e-4 if settings.tune == "full" else 1e-3
    settings = recipe.filled(settings, folder, learning_rate=rate)

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
    channels = data.image_shape[-1] if named else channels
    overrides = recipe.given(
        image_shape=(*size, channels), pooling=settings.pooling, dtype=settings.precision
    )

    # === Frozen features ===
    recipe.working(f"building {origin}")
    model = ViTImageClassifier.from_preset(origin, num_classes=0, **overrides)
    preprocessor = model.preprocessor or ViTImageClassifierPreprocessor(size, data.mean, data.std)
    if settings.interpolation or settings.eval_crop:
        preprocessor = ViTImageClassifierPreprocessor(
            size,
            preprocessor.mean,
            preprocessor.std,
            settings.interpolation or preprocessor.interpolation,
            resize_size=int(min(size) / settings.eval_crop) if settings.eval_crop else None,
            rounds_center=bool(settings.eval_crop),
        )
    model.preprocessor = None  # The loaders normalize.
    common = {
        "image_size": size,
        "channels": channels,
        "mean": preprocessor.mean,
        "std": preprocessor.std,
        "resizing": preprocessor.resizing,
        "workers": settings.workers,
    }
    parts = {"train": data.train, "val": data.validation, "test": data.test}
    batches = {
        name: training.WholeBatches(ImageLoader(part, settings.batch_size, **common))
        for name, part in parts.items()
    }
    labels = {name: part.labels for name, part in parts.items()}
    facts = results.image_facts(settings.data, data)
    recipe.introduce(folder, model, facts)
    model = recipe.parallelize(model)
    grid = settings.tune == "grid"
    used = ["test"] if grid else list(parts)  # of the grid's run for the map alone
    recipe.working(f"computing the features of {sum(len(parts[name]) for name in used):,} images")
    features = {name: probe.features(model, batches[name]) for name in used}
    table, strength = {}, 0.0
    if not grid:
        recipe.working("evaluating neighbours and the linear probe")
        table, strength = probe.compare(features, labels, data.num_classes, settings.neighbours)
    metrics = {
        f"{way}_{part}_accuracy": score for way, row in table.items() for part, score in row.items()
    }
    augment = Augment(
        flip=settings.flip,
        random_resized_crop=(settings.crop, 1.0) if settings.crop else None,
        num_classes=data.num_classes,
    )
    order = {"shuffle": True, "seed": settings.seed, "drop_last": True}
    loader = ImageLoader(data.train, settings.batch_size, augment=augment, **order, **common)
    total = settings.steps or settings.epochs * len(loader)
    ways = {
        "knn": f"{settings.neighbours} neighbours",
        "linear": f"linear, C={strength:g}",
        "lora": f"LoRA of rank {settings.rank}",
        "full": "all weights",
    }

    # === Training ===
    if settings.tune == "none":
        folder.write_config()
        content = results.result(folder, model, metrics)
    elif grid:
        heads, names, loss = classifiers(model.backbone, data.num_classes, rates)
        heads = recipe.parallelize(heads)
        schedule = training.WarmupSchedule(1.0, total)
        heads.compile(training.MomentumSGD(schedule), loss)
        recipe.introduce(folder, heads, facts, steps=total, steps_per_epoch=len(loader))
        runner = recipe.fit(folder, heads, loader, None, schedule, FIXED)
        held_out = {
            part: ImageLoader(parts[part], settings.batch_size, **common)
            for part in ("val", "test")
        }
        scores_of = {part: accuracies(heads, batches) for part, batches in held_out.items()}
        best = int(scores_of["val"].argmax())
        ways["grid"] = names[best]
        table["grid"] = {part: float(row[best]) for part, row in scores_of.items()}
        metrics |= {f"grid_{part}_accuracy": score for part, score in table["grid"].items()}
        content = results.result(folder, heads, metrics, runner)
    else:
        outputs = {"class_names": data.class_names, "problem_type": None}
        model = ViTImageClassifier.from_preset(
            origin, num_classes=data.num_classes, **outputs, **overrides
        )
        model.preprocessor = None
        if settings.tune == "lora":
            model.backbone.enable_lora(settings.rank, targets="all-linear")
        warmup = round(settings.warmup * total)
        schedule = training.WarmupSchedule(settings.learning_rate, total, warmup, "cosine")
        optimizer = training.AdamW(
            schedule, weight_decay=settings.weight_decay, clip_norm=settings.clip_norm or None
        )
        model = recipe.parallelize(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, weighted_metrics=["accuracy"])
        epoch = len(loader)
        recipe.introduce(
            folder, model, facts, steps=total, steps_per_epoch=epoch, best="val_accuracy"
        )
        best = "val_accuracy"
        runner = recipe.fit(folder, model, loader, batches["val"], schedule, FIXED, best=best)
        content = results.report_classes(
            folder, model, data, runner, batches["val"], batches["test"], preprocessor
        )
        table[settings.tune] = {x: content["metrics"][f"{x}_accuracy"] for x in ("val", "test")}
        content["metrics"] |= metrics

    # === Results ===
    recipe.working(None)
    content["probe"] = {
        "ways": [{"name": ways[way], **row} for way, row in table.items()],
        "map": probe.component_map(features["test"], labels["test"], data.class_names),
    }
    folder.write_json("result.json", content)
    scores = {ways[way]: row["test"] for way, row in table.items()}
    plots.probe(
        folder.path / "probe.png", scores, features["test"], labels["test"], data.class_names
    )
    recipe.say(f"\n  {'accuracy':24}validation    test", 0)
    for way, row in table.items():
        recipe.say(f"  {ways[way]:24}{row['val']:10.4f}{row['test']:8.4f}", 0)


def grid_rates(settings: Settings) -> list[float]:
    try:
        rates = [float(part) for part in settings.rates.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < float("inf") for rate in rates):
        raise recipe.InputError(
            f"--rates is {settings.rates!r}; give numbers above 0, such as 1e-3,0.1"
        )
    return rates


def classifiers(backbone: Any, classes: int, rates: list[float]) -> tuple[Any, list[str], Any]:
    """Returns the linear classifiers of DINOv2's evaluation as one model.

    Args:
        backbone: a `ViTBackbone`, which is frozen.
        classes: number of classes.
        rates: learning rates; with a rate of 1 of the optimizer each classifier learns at its own.

    Returns:
        The model, images -> logits (B, classifiers, classes); the classifiers' names; the loss.
    """
    import keras
    from keras import ops

    config = backbone.config
    if not config.use_class_token:
        raise recipe.InputError("--tune grid needs a class token; use --tune none")
    backbone.trainable = False
    blocks = [f"block_{i}" for i in range(config.num_layers)][-4:]
    tokens = list(backbone.feature_model(blocks).outputs)
    if config.final_norm:
        tokens = [backbone.get_layer("final_norm")(x) for x in tokens]
    mean = ops.mean(tokens[-1][:, config.num_prefix_tokens :], axis=1)
    logits, names = [], []
    for count in (1, 4):
        for pooled in (False, True):
            parts = [x[:, 0] for x in tokens[-count:]] + [mean] * pooled
            parts = [ops.cast(part, "float32") for part in parts]
            x = ops.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
            name = f"{count}_blocks" + "_mean" * pooled
            dense = keras.layers.Dense(
                len(rates) * classes,
                kernel_initializer=keras.initializers.RandomNormal(stddev=0.01),
                dtype="float32",
                name=name,
            )
            logits.append(ops.reshape(dense(x), (-1, len(rates), classes)))
            names += [f"{name}, rate {rate:.5g}" for rate in rates]

    class Weighted(keras.losses.Loss):
        """The sum of the classifiers' cross-entropies, each times its learning rate."""

        def call(self, y_true: Any, y_pred: Any) -> Any:
            target = ops.one_hot(ops.cast(ops.reshape(y_true, (-1, 1)), "int32"), classes)
            each = -ops.sum(target * ops.log_softmax(y_pred), axis=-1)
            return ops.sum(each * ops.convert_to_tensor(rates * 4, "float32"), axis=1)

    model = keras.Model(backbone.input, ops.concatenate(logits, axis=1), name="grid")
    return model, names, Weighted()


def accuracies(model: Any, loader: Any) -> Any:
    """Returns the accuracy of each classifier on the images of a loader, (classifiers,)."""
    import numpy as np

    rights = 0.0
    for number in range(loader.batches):
        images, labels = loader[number]
        chosen = np.asarray(model.predict_on_batch(images)).argmax(-1)
        rights = rights + (chosen == labels[:, None]).sum(0)
    return rights / loader.samples


def main(argv: list[str] | None = None) -> int:
    return recipe.main("vit_probe", Settings, train, argv, __doc__)


if __name__ == "__main__":
    sys.exit(main())
