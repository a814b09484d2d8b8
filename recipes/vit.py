"""Train a Vision Transformer to classify images.

    python recipes/vit.py

trains on handwritten digits (1,437 images of 8x8): on JAX with two CPU cores within a minute, to
a validation accuracy of 0.97 or 0.98, depending on the processor, and a test accuracy of 0.98.
Other examples:

    python recipes/vit.py --preset vit_micro_patch7_28 \\
        --data idx:PATH/fashion-mnist --epochs 42 --batch-size 128 \\
        --learning-rate 1.5e-3 --pad 2 --drop-path 0.1 \\
        --precision mixed_bfloat16
            # 33 minutes on torch, two CPU cores: validation 0.914, test 0.913
    python recipes/vit.py --preset vit_small_patch16_224 --data folder:PATH \\
        --weights PATH --mixup 0.2 --rand-augment 2,9 \\
        --precision mixed_bfloat16
    python recipes/vit.py --recipe list
        # published settings, such as --recipe vit_s16_i1k

The backend is KERAS_BACKEND's: jax, torch or tensorflow. All flags: --help.
"""

import re
import sys
from dataclasses import dataclass
from typing import Any

from kmodels.runs import recipe
from kmodels.runs.recipe import flag

PIXELS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5,) * 3, (0.5,) * 3),
}


@dataclass(frozen=True)
class Settings(recipe.Common):
    preset: str = flag("vit_micro_patch2_8", "architecture: a registered name or a directory")
    weights: str | None = flag(None, "start from the weights (and architecture) of this path")
    data: str = flag("digits", "digits | synthetic[:N] | idx:DIR | folder:DIR_OR_ZIP | npz:FILE")
    image_size: int | None = flag(None, "height and width in pixels; default: the preset's")
    skip_bad: bool = flag(False, "skip unreadable images and list them")
    epochs: int = flag(50, "passes over the training images", small=2)
    batch_size: int = flag(32, "images per step, over all devices")
    remat: str = flag(
        "none",
        "recompute activations in the backward pass to save memory (gradient checkpointing)",
        choices=("none", "block", "attention", "mlp"),
    )
    # Optimizer
    optimizer: str = flag(
        "adamw", "sgd has a momentum of 0.9", choices=("adamw", "sgd", "lamb", "muon")
    )
    learning_rate: float | None = flag(
        None, "highest learning rate; default: 3e-3, with --weights 3e-4"
    )
    schedule: str = flag(
        "cosine",
        "learning rate after the warm-up; epochs is DeiT's cosine, which changes once an epoch",
        choices=("cosine", "linear", "constant", "epochs"),
    )
    warmup: float = flag(0.1, "share of the steps used for learning-rate warm-up, or their number")
    warmup_from: float | None = flag(None, "learning rate of the first step of the warm-up")
    final_rate: float = flag(0.0, "learning rate after the last step")
    weight_decay: float = flag(0.05, "decoupled weight decay of matrices")
    layer_decay: float | None = flag(
        None, "learning-rate factor per block, from the head down; default: with --weights 0.75"
    )
    corrected_epsilon: bool = flag(
        False, "adamw: add epsilon to the corrected root, as torch and optax do"
    )
    clip_norm: float = flag(1.0, "gradient clipping: largest global norm; 0 for no limit")
    accumulate: int = flag(1, "gradient accumulation: batches per update")
    ema: float | None = flag(None, "decay of a moving average of the weights (EMA), e.g. 0.999")
    non_finite: str = flag(
        "stop",
        "what to do when the loss or a gradient is NaN or infinite",
        choices=("stop", "skip"),
    )
    # Initialization
    positions: str = flag(
        "learned", "position embedding; sincos is fixed", choices=("learned", "sincos")
    )
    kernel_std: float | None = flag(
        None, "standard deviation of the blocks' initial kernels; default: Glorot"
    )
    layer_scale: float | None = flag(None, "initial layer scale; default: the preset's")
    # Regularization and augmentation
    loss: str = flag(
        "softmax",
        "cross-entropy, or binary cross-entropy of each class of a mixed image",
        choices=("softmax", "binary"),
    )
    label_smoothing: float = flag(
        0.1, "label smoothing: share of each label that is spread over all classes"
    )
    dropout: float | None = flag(None, "dropout rate in the blocks; default: the preset's")
    drop_path: float | None = flag(
        None, "stochastic depth rate of the last block; default: the preset's"
    )
    drop_path_constant: bool = flag(
        False, "the same stochastic depth rate in all blocks", needs=("drop_path",)
    )
    patch_drop: float | None = flag(None, "share of patches dropped in training")
    token_merging: int | None = flag(None, "similar tokens merged in each block (ToMe)")
    head_std: float | None = flag(
        None, "give the head new weights of this standard deviation; MAE's is 2e-5"
    )
    pooled_norm: bool = flag(
        False, "classify the normalized mean of the patches, without the final norm, as MAE does"
    )
    head_dropout: float | None = flag(
        None, "dropout rate before the classifier; default: the preset's"
    )
    flip: bool = flag(False, "flip images horizontally at random")
    pad: int = flag(0, "pad by this number of pixels, then crop at random")
    crop: float | None = flag(
        None, "random resized crop of at least this share of the area, e.g. 0.25"
    )
    three_augment: float | None = flag(
        None, "3-Augment of DeiT III with color jitter of this strength, e.g. 0.3"
    )
    rand_augment: str | None = flag(
        None, "RandAugment: operations, magnitude and optionally its deviation, e.g. 2,9,0.5"
    )
    rand_augment_kind: str = flag(
        "timm",
        "whose operations RandAugment has",
        choices=("timm", "big_vision"),
        needs=("rand_augment",),
    )
    erasing: float = flag(0.0, "probability of random erasing")
    erasing_noise: bool = flag(
        False, "erase with noise instead of the mean color", needs=("erasing",)
    )
    mixup: float = flag(0.0, "alpha of MixUp")
    cutmix: float = flag(0.0, "alpha of CutMix")
    repeats: int = flag(1, "repeated augmentation: copies of each image in an epoch")
    normalize: str | None = flag(
        None,
        "mean and deviation of pixels; default: the checkpoint's, or the data's",
        choices=tuple(PIXELS),
    )
    interpolation: str | None = flag(
        None, "of resizing; default: the checkpoint's", choices=("bilinear", "bicubic")
    )
    aliased: bool = flag(False, "no antialiasing when images are made smaller")
    eval_crop: float | None = flag(
        None, "side of the center crop in evaluation, as a share of the shorter side, e.g. 0.875"
    )
    ignore_memory_check: bool = flag(False, "start even if the estimate exceeds the memory")


FROM_SCRATCH = {"learning_rate": 3e-3}
# A rate of 3e-3 for all blocks destroys pretrained features (docs/tasks/fine_tune_vit.md).
PRETRAINED = {"learning_rate": 3e-4, "layer_decay": 0.75}
# Settings that a resumed run must share with the one it continues.
FIXED = (
    *("preset", "weights", "data", "image_size", "batch_size", "accumulate", "seed"),
    *("positions", "kernel_std", "layer_scale", "head_std", "pooled_norm"),
)


def train(settings: Settings, folder: recipe.Folder) -> None:
    recipe.at_least(settings, epochs=1, image_size=1, clip_norm=0, warmup=0, head_std=0)
    recipe.check_fractions(settings, "label_smoothing")
    if settings.weights and (settings.kernel_std or settings.positions == "sincos"):
        raise recipe.InputError(
            "--kernel-std and --positions are not for --weights; leave them out"
        )
    if settings.kernel_std is not None and not settings.kernel_std > 0:
        raise recipe.InputError(f"--kernel-std is {settings.kernel_std}; give a number above 0")
    if settings.eval_crop is not None and not 0 < settings.eval_crop <= 1:
        raise recipe.InputError(f"--eval-crop is {settings.eval_crop}; give a share up to 1")
    import keras

    from kmodels import training
    from kmodels.data import Augment, ImageLoader, open_dataset
    from kmodels.layers import rematerialize
    from kmodels.models import ViTBackbone, ViTImageClassifier, ViTImageClassifierPreprocessor
    from kmodels.runs import results
    from kmodels.tools import plan

    recipe.prepare(settings)
    rates = PRETRAINED if settings.weights else FROM_SCRATCH
    settings = recipe.filled(settings, folder, **rates)

    # === Data ===
    recipe.working(f"reading the data: {settings.data}")
    origin = settings.weights or settings.preset
    named = ViTBackbone.presets.get(origin)
    config = named or ViTBackbone.from_preset(origin, load_weights=False).config.to_dict()
    shape = tuple(config["image_shape"])
    if settings.image_size:
        shape = (settings.image_size, settings.image_size, shape[-1])
    data = open_dataset(
        settings.data, image_size=shape[:2], seed=settings.seed, skip_bad=settings.skip_bad
    )
    if named:
        shape = (*shape[:2], data.image_shape[-1])
    for file, reason in data.skipped:
        recipe.say(f"skipped {file}: {reason}")
    if data.skipped:
        recipe.say(f"{len(data.skipped)} images skipped")

    # === Model ===
    recipe.working(f"building {origin}")
    own_head = settings.evaluate and settings.weights and not folder.has_checkpoints
    overrides = recipe.given(
        num_classes=None if own_head else data.num_classes,
        dropout_rate=settings.dropout,
        attention_dropout=settings.dropout,
        drop_path_rate=settings.drop_path,
        drop_path_constant=settings.drop_path_constant or None,
        patch_drop_rate=settings.patch_drop,
        token_merging=settings.token_merging,
        layer_scale=settings.layer_scale,
        dropout=settings.head_dropout,
    )
    setup = plan.Setup(
        settings.batch_size,
        precision=settings.precision,
        remat=settings.remat,
        optimizer="momentum" if settings.optimizer == "sgd" else "adamw",
        accumulate=settings.accumulate,
        ema=bool(settings.ema),
    )
    sizes = {"image_shape": shape, **overrides}
    if not settings.ignore_memory_check:
        estimate = plan.Plan(origin, setup, overrides=sizes)
        plan.check(estimate, Settings, "--ignore-memory-check")
    labels = {} if own_head else {"class_names": data.class_names, "problem_type": None}
    model = ViTImageClassifier.from_preset(origin, dtype=settings.precision, **sizes, **labels)
    if model.class_names not in (None, list(data.class_names)):
        recipe.say(
            f"class names of the model ({', '.join(model.class_names[:5])}, ...) and of the data "
            f"({', '.join(data.class_names[:5])}, ...) differ; classes are matched by number"
        )
    if settings.pooled_norm and not own_head:
        model = with_pooled_norm(model)
    if settings.head_std is not None and not own_head:
        start_head(model, settings.head_std)
    if settings.kernel_std is not None:
        start_kernels(model, settings.kernel_std, settings.seed)
    if settings.positions == "sincos":
        fix_positions(model)
    rematerialize(model.backbone, settings.remat)
    preprocessor = model.preprocessor or ViTImageClassifierPreprocessor(
        shape[:2], data.mean, data.std
    )
    if settings.normalize or settings.interpolation or settings.eval_crop or settings.aliased:
        mean, std = PIXELS.get(settings.normalize or "", (preprocessor.mean, preprocessor.std))
        crop = settings.eval_crop
        preprocessor = ViTImageClassifierPreprocessor(
            shape[:2],
            mean,
            std,
            settings.interpolation or preprocessor.interpolation,
            antialias=not settings.aliased,
            resize_size=int(min(shape[:2]) / crop) if crop else None,
            rounds_center=bool(crop),
        )
    model.preprocessor = None  # The loaders normalize, after augmentation.

    # === Batches ===
    binary = settings.loss == "binary"
    one_hot = settings.mixup or settings.cutmix or settings.label_smoothing or binary
    common = {
        "image_size": shape[:2],
        "channels": shape[-1],
        "mean": preprocessor.mean,
        "std": preprocessor.std,
        "resizing": preprocessor.resizing,
        "one_hot": data.num_classes if one_hot else None,
        "workers": settings.workers,
    }
    augment = Augment(
        flip=settings.flip,
        crop_padding=0 if settings.crop else settings.pad,
        random_resized_crop=(settings.crop, 1.0) if settings.crop else None,
        three_augment=settings.three_augment,
        rand_augment=recipe.numbers(settings, "rand_augment", 2, 3),
        rand_augment_kind=settings.rand_augment_kind,
        erasing=settings.erasing,
        erasing_noise=settings.erasing_noise,
        mixup=settings.mixup,
        cutmix=settings.cutmix,
        num_classes=data.num_classes,
    )
    order = {"shuffle": True, "seed": settings.seed, "drop_last": True}
    order["repeats"] = settings.repeats
    loader = ImageLoader(data.train, settings.batch_size, augment=augment, **order, **common)
    validation, test = (
        training.WholeBatches(ImageLoader(part, settings.batch_size, **common)) if part else None
        for part in (data.validation, data.test)
    )

    # === Optimizer and loss ===
    total = settings.steps or settings.epochs * len(loader)
    warmup = round(settings.warmup * (total if settings.warmup < 1 else 1))
    by_epoch = settings.schedule == "epochs"
    schedule = training.WarmupSchedule(
        settings.learning_rate,
        total,
        warmup,
        "cosine" if by_epoch else settings.schedule,
        settings.final_rate,
        settings.warmup_from,
        len(loader) if by_epoch else None,
    )
    kinds = {"sgd": training.MomentumSGD, "lamb": training.Lamb, "muon": training.Muon}
    if settings.corrected_epsilon and settings.optimizer != "adamw":
        recipe.say(f"--corrected-epsilon has no effect with --optimizer {settings.optimizer}")
    adamw = {"corrected_epsilon": settings.corrected_epsilon}
    optimizer = kinds.get(settings.optimizer, training.AdamW)(
        schedule,
        **(adamw if settings.optimizer == "adamw" else {}),
        weight_decay=settings.weight_decay,
        layer_decay=settings.layer_decay,
        clip_norm=settings.clip_norm or None,
        accumulate=settings.accumulate,
        ema=settings.ema,
        skip_non_finite=settings.non_finite == "skip",
    )
    if binary:
        loss = training.MixedBinaryCrossentropy(label_smoothing=settings.label_smoothing)
    elif one_hot:
        loss = keras.losses.CategoricalCrossentropy(True, settings.label_smoothing)
    else:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = recipe.parallelize(model)
    model.compile(optimizer, loss, weighted_metrics=["accuracy"])

    # === Training ===
    best = "val_accuracy" if validation else None
    facts = results.image_facts(settings.data, data)
    recipe.introduce(folder, model, facts, steps=total, steps_per_epoch=len(loader), best=best)
    runner = None
    if not own_head:
        runner = recipe.fit(folder, model, loader, validation, schedule, FIXED, best=best)

    # === Results ===
    results.report_classes(folder, model, data, runner, validation, test, preprocessor)


def start_head(model: Any, deviation: float) -> None:
    """Gives the classifier new weights with a standard deviation, and biases of zero."""
    from keras import ops

    for name in ("logits", "distillation_logits")[: 1 + (model.pooling == "distilled")]:
        layer = model.get_layer(name)
        new = layer.kernel_initializer(layer.kernel.shape, layer.kernel.dtype)
        layer.kernel.assign(new * (deviation / ops.std(new)))
        if layer.bias is not None:
            layer.bias.assign(ops.zeros(layer.bias.shape))


def with_pooled_norm(model: Any) -> Any:
    """Returns a classifier of the same blocks, with a new norm after pooling instead of before."""
    from kmodels.models import ViTImageClassifier

    # MAE's fine-tuning has this epsilon, Hugging Face's files of its encoder another.
    fields = {**model.backbone.config.to_dict(), "final_norm": False, "layer_norm_epsilon": 1e-6}
    backbone = type(model.backbone)(**fields, dtype=model.backbone.dtype_policy)
    values = {variable.path: variable for variable in model.backbone.variables}
    for variable in backbone.variables:
        variable.assign(values[variable.path])
    head = {**model.settings, "pooling": "gap", "pooled_norm": True}
    return ViTImageClassifier(backbone, preprocessor=model.preprocessor, **head)


def start_kernels(model: Any, deviation: float, seed: int) -> None:
    """Gives the class token and the kernels of the blocks normal values, as in DeiT III."""
    import keras

    for number, variable in enumerate(model.backbone.trainable_variables):
        if re.search(r"block_\d+/.*kernel$|class_token$", variable.path):
            normal = keras.initializers.TruncatedNormal(stddev=deviation, seed=seed + number)
            variable.assign(normal(variable.shape, variable.dtype))


def fix_positions(model: Any) -> None:
    """Sets the positions to big_vision's sines and cosines, which are not trained."""
    import numpy as np

    table, grid = model.backbone.get_layer("tokens").position_embedding, model.backbone.config.grid
    if table.shape[-1] % 4:
        raise recipe.InputError(f"--positions sincos needs a width of 4 n, not {table.shape[-1]}")
    frequencies = 10_000.0 ** -np.linspace(0, 1, table.shape[-1] // 4)
    row, column = (axis.reshape(-1, 1) * frequencies for axis in np.indices(grid))
    values = np.concatenate([np.sin(column), np.cos(column), np.sin(row), np.cos(row)], axis=1)
    table.assign(np.pad(values, ((table.shape[1] - len(values), 0), (0, 0)))[None])
    table.trainable = False


def main(argv: list[str] | None = None) -> int:
    return recipe.main("vit", Settings, train, argv, __doc__)


if __name__ == "__main__":
    sys.exit(main())
