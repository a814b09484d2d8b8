"""Pretrain a Vision Transformer without labels by self-distillation (DINO).

    python recipes/dino.py

gives a student two large and some small crops of handwritten digits. The
student learns to predict the outputs of its teacher, a moving average of the
student, for the large crops. Then k nearest neighbours and a linear probe
classify the teacher's frozen features; the same is done with random weights.
Small crops are resized to the size of the images, so they show a smaller part
of an image with as many pixels.

    python recipes/dino.py --preset vit_micro_patch2_8 --image-size 28 \\
        --patch-size 7 --data idx:PATH/fashion-mnist --steps 1500 --flip \\
        --global-crop 0.4,1 --local-crop 0.15,0.5 --probe-images 3000
            # torch, CPU: test accuracy of neighbours 0.619 with random
            # weights and 0.686 after, of the linear probe 0.664 and 0.736
    python recipes/vit.py --weights runs/dino/model \\
        --data idx:PATH/fashion-mnist
            # continues with the encoder and labels

Besides the loss, the logs have two entropies of the teacher's outputs as
shares of the largest possible one: "entropy" of a view, and
"marginal_entropy" of the mean over views. If the first is 1 or the second is
0, the teacher has collapsed: its outputs are the same for all images.
"divergence" is the divergence of the student from the teacher.

The backend is KERAS_BACKEND's: jax, torch or tensorflow. All flags: --help.
"""

import math
import sys
from collections.abc import Callable
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
    epochs: int = flag(30, "passes over the training images", small=2)
    batch_size: int = flag(64, "images per step, over all devices")
    # Views
    local_views: int = flag(2, "small crops of each image, in addition to two large ones")
    global_crop: str = flag("0.6,1", "least and largest share of the area of a large crop")
    local_crop: str = flag("0.4,0.8", "least and largest share of the area of a small crop")
    flip: bool = flag(False, "flip images horizontally at random")
    rand_augment: str | None = flag(
        None, "RandAugment: number of operations and magnitude, e.g. 2,9"
    )
    # Student and teacher
    units: int = flag(128, "number of prototypes (output size of the head)")
    hidden_dim: int = flag(256, "width of the head")
    student_temperature: float = flag(0.1, "softmax temperature of the student")
    teacher_temperature: float = flag(0.02, "softmax temperature of the teacher")
    first_temperature: float | None = flag(
        None, "temperature of the teacher at the first step; default: the final one"
    )
    temperature_warmup: float = flag(
        0.3, "share of the steps until the final temperature", needs=("first_temperature",)
    )
    momentum: float = flag(0.98, "momentum of the teacher at the first step; it rises to 1")
    centering: str = flag(
        "sinkhorn_knopp", "centering of the teacher's logits", choices=("sinkhorn_knopp", "mean")
    )
    center_momentum: float = flag(
        0.9, "momentum of the center, with --centering mean", needs=("centering", "mean")
    )
    # Optimizer
    learning_rate: float = flag(1e-3, "highest learning rate")
    schedule: str = flag(
        "cosine", "learning rate after the warm-up", choices=("cosine", "linear", "constant")
    )
    warmup: float = flag(0.1, "share of the steps used for learning-rate warm-up")
    weight_decay: float = flag(0.04, "decoupled weight decay of matrices")
    clip_norm: float = flag(3.0, "gradient clipping: largest global norm; 0 for no limit")
    # Evaluation of the features
    pooling: str = flag("gap", "features of an image", choices=("gap", "token"))
    probe_images: int = flag(10000, "training images with labels for the probe; 0 for all")
    neighbours: int = flag(20, "number of neighbours that vote")


# Settings that a resumed run must share with the one it continues.
FIXED = (
    *("preset", "weights", "data", "image_size", "patch_size", "batch_size", "seed"),
    *("local_views", "units", "hidden_dim", "pooling", "momentum", "temperature_warmup"),
    "centering",
)
# Large crops, which the teacher gets too.
LARGE = 2


def loss_fn(models: Any, batch: Any, training: bool) -> Any:
    """Returns the DINO loss of a batch, and entropies that reveal a collapse of the teacher."""
    import keras

    ops, views = keras.ops, batch[0]
    shape = tuple(views.shape[2:])

    def logits(model: Any, views: Any, training: bool) -> Any:
        rows = model(ops.reshape(views, (-1, *shape)), training=training)
        return ops.reshape(rows, (-1, views.shape[1], rows.shape[-1]))

    teacher = logits(models["teacher"], views[:, :LARGE], False)
    student = logits(models["student"], views, training)
    loss = ops.mean(models["loss"](student, teacher, training=training))
    logs = models["loss"].entropies(teacher)
    # The cross-entropy is the sum of the teacher's entropy and the divergence.
    logs["divergence"] = loss - logs["entropy"] * math.log(teacher.shape[-1])
    return loss, logs


def momentum(first: float, total: int) -> Callable[[Any], Any]:
    """Returns the teacher's momentum by step: half a cosine from the first value to 1."""
    import keras

    def at(step: Any) -> Any:
        return 1 - (1 - first) * (keras.ops.cos(step * (math.pi / total)) + 1) / 2

    return at


def train(settings: Settings, folder: recipe.Folder) -> None:
    recipe.at_least(
        settings,
        **{"epochs": 1, "image_size": 1, "patch_size": 1, "local_views": 0, "units": 2},
        **{"hidden_dim": 1, "clip_norm": 0, "neighbours": 1, "probe_images": 0},
    )
    recipe.check_fractions(settings, "warmup", "temperature_warmup", "momentum")
    import keras

    from kmodels import training
    from kmodels.data import Augment, ViewLoader, open_dataset
    from kmodels.models import (
        DINOHead,
        ViTBackbone,
        ViTImageClassifier,
        ViTImageClassifierPreprocessor,
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

    # === Models ===
    recipe.working(f"building {origin} twice")

    sizes = recipe.given(image_shape=shape, patch_size=settings.patch_size)

    def build() -> tuple[Any, Any]:
        features = ViTImageClassifier.from_preset(
            origin,
            num_classes=0,
            pooling=settings.pooling,
            dtype=settings.precision,
            **sizes,
        )
        head = DINOHead(
            settings.units, settings.hidden_dim, 64, name="head", dtype=settings.precision
        )
        return features, keras.Model(features.input, head(features.output))

    (_, student), (features, teacher) = build(), build()
    teacher.set_weights(student.get_weights())
    preprocessor = features.preprocessor or ViTImageClassifierPreprocessor(
        size, data.mean, data.std
    )
    features.preprocessor = None  # The loaders normalize, after augmentation.

    # === Batches ===
    common = {
        "image_size": size,
        "channels": shape[-1],
        "mean": preprocessor.mean,
        "std": preprocessor.std,
        "resizing": preprocessor.resizing,
        "workers": settings.workers,
    }
    changes = {
        "flip": settings.flip,
        "rand_augment": recipe.numbers(settings, "rand_augment", 2),
    }
    large, small = (
        Augment(random_resized_crop=recipe.numbers(settings, name, 2), **changes)
        for name in ("global_crop", "local_crop")
    )
    order = {"shuffle": True, "seed": settings.seed, "drop_last": True}
    views = [*[large] * LARGE, *[small] * settings.local_views]
    loader = ViewLoader(data.train, settings.batch_size, views, **order, **common)

    # === Features before ===
    probe = Probe(data, settings.probe_images, settings.batch_size, settings.neighbours, common)
    recipe.working("evaluating neighbours and the linear probe before training")
    before = "given_" if settings.weights else "new_"
    metrics = probe.ask(features, before)

    # === Training ===
    total = settings.steps or settings.epochs * len(loader)
    warmup = round(settings.warmup * total)
    schedule = training.WarmupSchedule(settings.learning_rate, total, warmup, settings.schedule)
    optimizer = training.AdamW(
        schedule, weight_decay=settings.weight_decay, clip_norm=settings.clip_norm or None
    )
    loss = training.DINOLoss(
        settings.units,
        settings.student_temperature,
        settings.teacher_temperature,
        settings.first_temperature or settings.teacher_temperature,
        round(settings.temperature_warmup * total),
        settings.center_momentum,
        settings.centering,
    )
    rule = training.WeightAverage("student", momentum(settings.momentum, total))
    step = training.TrainStep(
        {"student": student, "teacher": teacher, "loss": loss},
        loss_fn,
        train=["student"],
        averages={"teacher": rule},
    )
    step = recipe.parallelize(step)
    step.compile(optimizer)
    facts = results.image_facts(settings.data, data)
    facts["details"] = f"{len(views)} views of each image"
    recipe.introduce(folder, student, facts, steps=total, steps_per_epoch=len(loader))
    runner = recipe.fit(folder, step, loader, None, schedule, FIXED)

    # === Results ===
    recipe.working("evaluating neighbours and the linear probe")
    metrics |= probe.ask(features) | (runner.metrics if runner else {})
    content = results.result(folder, teacher, metrics, runner)
    if runner is None:
        folder.write_json("evaluation.json", content)
    else:
        recipe.working("saving the teacher")
        plots.curves(folder.path / "curves.png", runner.history.rows)
        features.preprocessor = preprocessor
        results.save_model(folder, features, content["metrics"])
        folder.write_json("result.json", content)
        if metrics["entropy"] > 0.99 or metrics["marginal_entropy"] < 0.1:
            recipe.say(
                "the teacher has collapsed: its outputs are the same for all images (entropy "
                f"{metrics['entropy']:.2f}, marginal_entropy {metrics['marginal_entropy']:.2f})"
            )
    recipe.working(None)
    recipe.say(f"\n  {'test accuracy':24}neighbours  linear", 0)
    for name, start in ((before.removesuffix("_"), before), ("pretrained", "")):
        knn, linear = (metrics[f"{start}{way}_test_accuracy"] for way in ("knn", "linear"))
        recipe.say(f"  {name + ' weights':24}{knn:10.4f}{linear:8.4f}", 0)


def main(argv: list[str] | None = None) -> int:
    return recipe.main("dino", Settings, train, argv, __doc__)


if __name__ == "__main__":
    sys.exit(main())
