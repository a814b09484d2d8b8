"""Settings with timm's names mean what they mean there (docs/start/timm_and_transformers.md)."""

from importlib import import_module

import keras
import numpy as np
import pytest

from kmodels.data import Augment
from kmodels.data.images.augment import CROP_NUMBERS, OPERATIONS, crop_boxes
from kmodels.data.rng import uniforms
from kmodels.layers import DropPath
from kmodels.models import ViTBackbone, ViTImageClassifier
from kmodels.training import SGD, AdamW, WarmupSchedule
from tolerances import tolerance

pytestmark = pytest.mark.needs("timm")

DRAWS = 6000
WIDE, SMALL = (40, 90), (24, 24)


def samples():
    return np.arange(DRAWS)


def our_crops(shape, share):
    boxes = Augment(random_resized_crop=share).boxes(np.tile(shape, (DRAWS, 1)), 0, 0, samples())
    left, top, right, bottom = boxes.T
    return np.stack([top, left, bottom - top, right - left], 1)


def their_crops(shape, share):
    image = import_module("PIL.Image").new("RGB", shape[::-1])
    crop = import_module("timm.data.transforms").RandomResizedCropAndInterpolation
    return [crop.get_params(image, share, (3 / 4, 4 / 3)) for _ in range(DRAWS)]


def our_naflex_crops(shape, share):
    drawn = uniforms(0, "naflex-crop", 0, samples(), CROP_NUMBERS)
    shapes = np.tile(shape, (DRAWS, 1))
    left, top, right, bottom = crop_boxes(drawn, shapes, share, shapes[:, 1] / shapes[:, 0]).T
    return np.stack([top, left, bottom - top, right - left], 1)


def their_naflex_crops(shape, share):
    image = import_module("torch").zeros(3, *shape)
    crop = import_module("timm.data.naflex_transforms").RandomResizedCropToSequence
    return [crop.get_params(image, share, (3 / 4, 4 / 3))[0] for _ in range(DRAWS)]


def erased(images):
    """Shares of the pixels, rows and columns with a zero in images (B, H, W) of ones."""
    zero = np.asarray(images) == 0
    parts = zero.mean((1, 2)), zero.any(2).mean(1), zero.any(1).mean(1), zero[:, 0].any(1)
    return np.stack(parts, 1)


def our_erasing(shape, probability):
    images = np.ones((DRAWS, *shape, 1), "float32")
    Augment(erasing=probability).erase(images, 0, 0, samples())
    return erased(images[..., 0])


def their_erasing(shape, probability):
    torch, erasing = import_module("torch"), import_module("timm.data.random_erasing")
    erase = erasing.RandomErasing(probability, device="cpu")
    return erased(erase(torch.ones(DRAWS, 1, *shape))[:, 0].numpy())


def mixed(images, labels):
    """What stays of the first of each pair, by the label; whether that is true of the pixels."""
    kept, images = np.asarray(labels)[:, 0], np.asarray(images)
    share = images.mean((1, 2))
    return np.stack([kept, np.abs(kept - share) < 1e-5, np.ptp(images, (1, 2)) == 0], 1)


def our_mixing(mixup, cutmix):
    augment = Augment(mixup=mixup, cutmix=cutmix, num_classes=2)
    images = np.zeros((2 * DRAWS, *SMALL, 1), "float32")
    images[::2], labels = 1, np.tile(np.eye(2, dtype="float32"), (DRAWS, 1))
    images, labels = augment.mix(images, labels, 0, 0, samples())
    return mixed(images[::2, ..., 0], labels[::2])


def their_mixing(mixup, cutmix):
    torch, mixing = import_module("torch"), import_module("timm.data.mixup")
    mix = mixing.Mixup(mixup, cutmix, mode="pair", label_smoothing=0.0, num_classes=2)
    images = torch.zeros(2 * DRAWS, 1, *SMALL)
    images[:DRAWS], targets = 1, torch.arange(2).repeat_interleave(DRAWS)
    images, labels = mix(images, targets)
    return mixed(images[:DRAWS, 0].numpy(), labels[:DRAWS].numpy())


def picture():
    """A smooth picture, uint8 (24, 24, 3), whose pixels fill the range."""
    y, x = np.mgrid[:24, :24] / 23
    return np.stack([255 * x * y, 255 * x, 200 - 150 * y], -1).astype("uint8")


def seen(images):
    """Mean and deviation of each picture, and the share of pixels that changed."""
    changed = (images != picture()).any(-1).mean((1, 2))
    return np.stack([images.mean((1, 2, 3)), images.std((1, 2, 3)), changed], 1)


def our_operations(count, magnitude):
    augment = Augment(rand_augment=(count, magnitude))
    return seen(augment.pixels(np.tile(picture(), (DRAWS, 1, 1, 1)), 0, 0, samples(), [0.5]))


def their_operations(count, magnitude):
    operations, pil = import_module("timm.data.auto_augment"), import_module("PIL.Image")
    settings = {"img_mean": (128, 128, 128)}
    augment = operations.rand_augment_transform(f"rand-m{magnitude}-n{count}-inc1", settings)
    for operation in augment.ops:
        operation.kwargs["resample"] = pil.NEAREST
    return seen(np.stack([augment(pil.fromarray(picture())) for _ in range(DRAWS)]))


def our_flips(padding):
    augment = Augment(flip=True, crop_padding=padding)
    return seen(augment.pixels(np.tile(picture(), (DRAWS, 1, 1, 1)), 0, 0, samples(), [0.0]))


def their_flips(padding):
    transforms, pil = import_module("torchvision.transforms"), import_module("PIL.Image")
    augment = transforms.Compose(
        [transforms.RandomCrop(24, padding), transforms.RandomHorizontalFlip()]
    )
    return seen(np.stack([augment(pil.fromarray(picture())) for _ in range(DRAWS)]))


DRAWN = {
    "resized crop": (our_crops, their_crops, (SMALL, (0.08, 1.0))),
    "resized crop, wide": (our_crops, their_crops, (WIDE, (0.25, 1.0))),
    "resized crop, none fits": (our_crops, their_crops, (WIDE, (0.9, 1.0))),
    "resized crop, naflex": (our_naflex_crops, their_naflex_crops, (WIDE, (0.08, 1.0))),
    "erasing": (our_erasing, their_erasing, (SMALL, 0.25)),
    "erasing, wide": (our_erasing, their_erasing, (WIDE, 1.0)),
    "mixup": (our_mixing, their_mixing, (0.2, 0.0)),
    "cutmix": (our_mixing, their_mixing, (0.0, 1.0)),
    "mixup or cutmix": (our_mixing, their_mixing, (0.8, 1.0)),
    "rand_augment": (our_operations, their_operations, (2, 9)),
    "flip": (our_flips, their_flips, (0,)),
    "flip and padded crop": (our_flips, their_flips, (3,)),
}


@pytest.mark.parametrize("name", DRAWN)
def test_augmentations_have_the_distribution_of_timm(name):
    ours, theirs, settings = DRAWN[name]
    import_module("random").seed(1)
    np.random.seed(1)
    import_module("torch").manual_seed(1)
    ours, theirs = (np.asarray(draw(*settings), "float64") for draw in (ours, theirs))
    # Five standard errors of a difference of two means; those of squares compare the spread.
    for one, other in ((ours, theirs), (ours**2, theirs**2)):
        error = np.sqrt((one.var(0) + other.var(0)) / DRAWS)
        assert (np.abs(one.mean(0) - other.mean(0)) <= 5 * error + 1e-9).all()


@pytest.mark.parametrize("magnitude", [0, 3, 9, 10])
def test_operations_of_rand_augment_are_those_of_timm(monkeypatch, magnitude):
    theirs, pil = import_module("timm.data.auto_augment"), import_module("PIL.Image")
    names = theirs._RAND_INCREASING_TRANSFORMS
    assert len(names) == len(OPERATIONS)
    noise = np.random.default_rng(0).integers(0, 256, (24, 20, 3), "uint8")
    fill = np.array([10, 20, 30], "uint8")
    for image in (picture(), noise, noise // 3 + 60):
        for name, ours in zip(names, OPERATIONS, strict=True):
            for sign in (-1.0, 1.0):
                monkeypatch.setattr(theirs, "_randomly_negate", lambda value, s=sign: s * value)
                settings = {"img_mean": tuple(fill.tolist())}
                operation = theirs.AugmentOp(name, 1.0, magnitude, settings)
                operation.kwargs["resample"] = pil.NEAREST
                wanted = np.asarray(operation(pil.fromarray(image)))
                found = ours(image[None], magnitude / 10, np.array([sign]), fill)[0]
                np.testing.assert_array_equal(found, wanted, err_msg=f"{name} {sign}")


VITS = {
    "token": {},
    "avg": {"use_class_token": False, "final_norm": False},
    "map": {"use_class_token": False},
    "registers": {
        "num_register_tokens": 2,
        "position_over_prefix": False,
        "pre_norm": True,
        "use_patch_bias": False,
        "layer_scale": 0.1,
    },
    "no head": {},
}


@pytest.mark.parametrize("kind", VITS)
def test_weight_decay_and_layer_decay_are_those_of_timm(tmp_path, kind):
    """timm's factors are written into its weights, which says for what each of ours has them."""
    timm, optim = import_module("timm"), import_module("timm.optim")
    files, torch = import_module("safetensors.torch"), import_module("torch")
    backbone = ViTBackbone.from_preset("vit_debug", **VITS[kind])
    pooling = {"avg": {"pooling": "gap", "pooled_norm": True}, "map": {"pooling": "map"}}
    model = ViTImageClassifier(backbone, num_classes=3, **pooling.get(kind, {}))
    model.export_to_timm(tmp_path)
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    if kind == "no head":
        theirs.reset_classifier(0)
    groups = optim.param_groups_layer_decay(theirs, 0.5, theirs.no_weight_decay(), layer_decay=0.75)
    for factor in ("lr_scale", "weight_decay"):
        with torch.no_grad():
            for group in groups:
                for parameter in group["params"]:
                    parameter.fill_(group[factor])
        files.save_file(theirs.state_dict(), tmp_path / "model.safetensors")
        if kind == "no head":
            again = ViTBackbone.from_preset(tmp_path)
        else:
            again = ViTImageClassifier.from_preset(tmp_path, preprocessor=None)
        optimizer = AdamW(layer_decay=0.75)
        optimizer.build(again.trainable_variables)
        ours = optimizer._multipliers if factor == "lr_scale" else 0.5 * np.array(optimizer._decays)
        for variable, wanted in zip(again.trainable_variables, ours, strict=True):
            values = keras.ops.convert_to_numpy(variable.value)
            np.testing.assert_allclose(values, wanted, rtol=1e-6, err_msg=variable.path)


def test_schedule_is_that_of_timm():
    torch, scheduler = import_module("torch"), import_module("timm.scheduler.cosine_lr")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.5)
    theirs = scheduler.CosineLRScheduler(
        optimizer, 30, lr_min=0.01, warmup_t=10, warmup_prefix=True, t_in_epochs=False
    )
    wanted = [theirs._get_lr(step)[0] for step in (*range(1, 11), *range(10, 41))]
    ours = WarmupSchedule(0.5, 40, 10, "cosine", final=0.01)
    found = keras.ops.convert_to_numpy(ours(np.array([*range(10), *range(10, 41)])))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_moving_average_and_clipping_are_those_of_timm():
    torch, utils = import_module("torch"), import_module("timm.utils")
    theirs = torch.nn.Linear(3, 1, bias=False)
    variable = keras.Variable(theirs.weight.detach().numpy().T, name="kernel")
    optimizer, average = torch.optim.SGD(theirs.parameters(), 0.1), utils.ModelEmaV3(theirs, 0.8)
    ours = SGD(0.1, clip_norm=1.0, ema=0.8)
    for step in range(1, 5):
        gradient = np.random.default_rng(step).normal(size=(3, 1)).astype("float32") * step
        ours.apply([keras.ops.convert_to_tensor(gradient)], [variable])
        theirs.weight.grad = torch.from_numpy(gradient.T.copy())
        utils.dispatch_clip_grad(theirs.parameters(), 1.0)
        optimizer.step()
        average.update(theirs, step=step)  # as timm's train.py counts
    ours.swap_average()
    wanted = average.module.weight.detach().numpy().T
    found = keras.ops.convert_to_numpy(variable.value)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance("optimizer"))


def test_label_smoothing_and_drop_path_are_those_of_timm():
    torch, loss = import_module("torch"), import_module("timm.loss")
    logits = np.random.default_rng(0).normal(size=(6, 5)).astype("float32")
    labels = np.arange(6) % 5
    ours = keras.losses.CategoricalCrossentropy(True, 0.1)(np.eye(5)[labels], logits)
    theirs = loss.LabelSmoothingCrossEntropy(0.1)(
        torch.from_numpy(logits), torch.from_numpy(labels)
    )
    np.testing.assert_allclose(float(ours), float(theirs), rtol=1e-5)

    rates = import_module("timm.layers.drop").calculate_drop_path_rates(0.3, 4)
    backbone = ViTBackbone.from_preset("vit_debug", num_layers=4, drop_path_rate=0.3)
    found = [backbone.get_layer(f"block_{i}").drop_path.rate for i in range(4)]
    np.testing.assert_allclose(found, rates, rtol=1e-6)
    layer, x = DropPath(0.25, seed=0), np.ones((4000, 2, 3), "float32")
    dropped = keras.ops.convert_to_numpy(layer(x, training=True))
    assert {0.0, 1.0} == set(np.unique(dropped * 0.75)) and (np.ptp(dropped, (1, 2)) == 0).all()
    assert dropped.mean() == pytest.approx(1.0, abs=0.05)
