"""Train a small Vision Transformer to imitate a larger one (knowledge distillation).

    python recipes/distill.py

first trains the teacher on handwritten digits, then a student of two blocks. Another example:

    python recipes/distill.py --teacher runs/mine/model --data folder:PATH \\
        --layers 4 --temperature 3 --share 0.9 --precision mixed_bfloat16

The loss is share * T^2 * KL(teacher, student) + (1 - share) * cross-entropy of the labels, with
logits divided by the temperature T in the first part (Hinton et al. 2015); test_loss, and the
losses of --evaluate, are the cross-entropy of the student. `loss_function` below is the whole
training step. The backend is KERAS_BACKEND's: jax, torch or tensorflow. All flags: --help.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kmodels.runs import recipe
from kmodels.runs.recipe import flag


@dataclass(frozen=True)
class Settings(recipe.Common):
    preset: str = flag("vit_micro_patch2_8", "architecture of the student")
    layers: int = flag(2, "blocks of the student")
    teacher: str | None = flag(None, "directory or file of the teacher; default: train one here")
    teacher_preset: str = flag(
        "vit_micro_patch2_8", "architecture of a teacher trained here", needs=("teacher", None)
    )
    teacher_epochs: int = flag(
        20, "epochs of a teacher trained here", small=1, needs=("teacher", None)
    )
    data: str = flag("digits", "digits | synthetic[:N] | idx:DIR | folder:DIR_OR_ZIP | npz:FILE")
    epochs: int = flag(20, "passes over the training images", small=2)
    batch_size: int = flag(32, "images per step, over all devices")
    temperature: float = flag(2.0, "softmax temperature of the distillation loss")
    share: float = flag(0.9, "share of the distillation loss; the labels have the rest")
    # Optimizer
    learning_rate: float = flag(3e-3, "highest learning rate")
    schedule: str = flag(
        "cosine", "learning rate after the warm-up", choices=("cosine", "linear", "constant")
    )
    warmup: float = flag(0.1, "share of the steps used for learning-rate warm-up")
    weight_decay: float = flag(0.05, "decoupled weight decay of matrices")
    clip_norm: float = flag(1.0, "gradient clipping: largest global norm; 0 for no limit")
    accumulate: int = flag(1, "gradient accumulation: batches per update")
    ema: float | None = flag(None, "decay of a moving average of the weights (EMA), e.g. 0.999")


# Settings that a resumed run must share with the one it continues.
FIXED = (
    *("preset", "layers", "teacher", "teacher_preset", "teacher_epochs", "data", "batch_size"),
    *("temperature", "share", "accumulate", "seed"),
)


def loss_function(temperature: float, share: float) -> Callable[[Any, Any, bool], Any]:
    """Returns the loss of a batch; weights of 0 mark rows that fill up the last batch."""
    import keras

    ops, losses = keras.ops, keras.losses

    def loss_fn(models: Any, batch: Any, training: bool) -> Any:
        images, labels, *weights = batch
        logits = models["student"](images, training=training)
        teacher = ops.log_softmax(models["teacher"](images, training=False) / temperature)
        student = ops.log_softmax(logits / temperature)
        soft = ops.sum(ops.exp(teacher) * (teacher - student), axis=-1)
        hard = losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        rows = share * temperature**2 * soft + (1 - share) * hard
        if weights:
            rows = rows * weights[0]
        return ops.mean(rows), {"accuracy": (labels, logits, *weights)}

    return loss_fn


def train(settings: Settings, folder: recipe.Folder) -> None:
    recipe.at_least(settings, epochs=1, teacher_epochs=1, layers=1, clip_norm=0)
    recipe.check_fractions(settings, "warmup")
    if not 0 <= settings.share <= 1 or settings.temperature <= 0:
        raise recipe.InputError(
            f"--share is {settings.share} and --temperature {settings.temperature}; give 0 to 1, "
            "and above 0"
        )
    import keras

    from kmodels import training
    from kmodels.data import ImageLoader, open_dataset
    from kmodels.models import ViTBackbone, ViTImageClassifier, ViTImageClassifierPreprocessor
    from kmodels.runs import results

    recipe.prepare(settings)

    # === Data ===
    recipe.working(f"reading the data: {settings.data}")
    own = folder.path / "teacher"
    origin = settings.teacher or (own if own.is_dir() else settings.teacher_preset)
    shape = tuple(ViTBackbone.from_preset(origin, load_weights=False).config.image_shape)
    data = open_dataset(settings.data, image_size=shape[:2], seed=settings.seed)
    shape = (*shape[:2], data.image_shape[-1])

    # === Models ===
    recipe.working("building teacher and student")
    sizes = {
        "num_classes": data.num_classes,
        "class_names": data.class_names,
        "image_shape": shape,
    }
    if settings.teacher or own.is_dir():
        teacher = ViTImageClassifier.from_preset(origin, dtype=settings.precision)
        if teacher.num_classes != data.num_classes:
            raise recipe.InputError(
                f"the teacher has {teacher.num_classes} classes, the data {data.num_classes}; "
                "give a teacher trained on this data"
            )
    else:
        teacher = ViTImageClassifier.from_preset(origin, dtype=settings.precision, **sizes)
    student = ViTImageClassifier.from_preset(
        settings.preset, dtype=settings.precision, num_layers=settings.layers, **sizes
    )
    preprocessor = teacher.preprocessor or ViTImageClassifierPreprocessor(
        shape[:2], data.mean, data.std
    )
    teacher.preprocessor = student.preprocessor = None  # The loaders normalize.

    # === Batches ===
    common = {
        "image_size": shape[:2],
        "channels": shape[-1],
        "mean": preprocessor.mean,
        "std": preprocessor.std,
        "resizing": preprocessor.resizing,
        "workers": settings.workers,
    }
    order = {"shuffle": True, "seed": settings.seed, "drop_last": True}
    loader = ImageLoader(data.train, settings.batch_size, **order, **common)
    validation, test = (
        training.WholeBatches(ImageLoader(part, settings.batch_size, **common)) if part else None
        for part in (data.validation, data.test)
    )

    # === Teacher ===
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    epochs = settings.teacher_epochs
    rate = training.WarmupSchedule(settings.learning_rate, epochs * len(loader), len(loader))
    teacher, student = recipe.parallelize(teacher), recipe.parallelize(student)
    for model in (teacher, student):
        model.compile(optimizer(settings, rate), loss, weighted_metrics=["accuracy"])
    if not (settings.teacher or own.is_dir()):
        size = f"{teacher.count_params():,} parameters"
        recipe.working(f"training the teacher: {size}, epochs: {epochs}")
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            teacher.fit(loader, shuffle=False, verbose=0)
        teacher.save_to_preset(own)
    facts = results.image_facts(settings.data, data)
    if validation is not None:
        recipe.working("evaluating the teacher")
        logs = teacher.evaluate(validation, return_dict=True, verbose=0)
        accuracy = f"teacher: validation accuracy {logs['accuracy']:.4f}"
        facts["details"] = f"{accuracy}, {teacher.count_params():,} parameters"

    # === Student ===
    total = settings.steps or settings.epochs * len(loader)
    warmup = round(settings.warmup * total)
    schedule = training.WarmupSchedule(settings.learning_rate, total, warmup, settings.schedule)
    step = training.TrainStep(
        {"student": student, "teacher": teacher},
        loss_function(settings.temperature, settings.share),
        train=["student"],
    )
    metric = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    step = recipe.parallelize(step)
    step.compile(optimizer(settings, schedule), metrics=[metric])
    best = "val_accuracy" if validation else None
    recipe.introduce(folder, student, facts, steps=total, steps_per_epoch=len(loader), best=best)
    runner = recipe.fit(folder, step, loader, validation, schedule, FIXED, best=best)

    # === Results ===
    results.report_classes(folder, student, data, runner, validation, test, preprocessor)


def optimizer(settings: Settings, learning_rate: Any) -> Any:
    """Returns an optimizer for the teacher or the student."""
    from kmodels import training

    return training.AdamW(
        learning_rate,
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm or None,
        accumulate=settings.accumulate,
        ema=settings.ema,
    )


def main(argv: list[str] | None = None) -> int:
    return recipe.main("distill", Settings, train, argv, __doc__)


if __name__ == "__main__":
    sys.exit(main())
