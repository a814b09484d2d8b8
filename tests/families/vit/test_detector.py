"""Detection: the loss beside transformers', boxes through data and model, and average precision."""

import itertools
import json
from typing import Any

import keras
import numpy as np
import pytest
from PIL import Image

from arrays import to_numpy
from kmodels import models, training, transforms
from kmodels.data import BoxImages, BoxLoader, made_objects, open_boxes
from kmodels.models.vit.detection import BoxCriterion, generalized_iou
from refusals import refused
from tolerances import tolerance

SIZE, CLASSES = (24, 32), 4
SMALL = {"patch_size": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
SETTINGS = {
    "num_queries": 6, "num_decoder_layers": 2, "decoder_dim": 16, "num_decoder_heads": 2,
    "decoder_dropout": 0.0,
}  # fmt: skip
EACH = pytest.mark.each_backend


def made(size=SIZE, **settings):
    keras.utils.set_random_seed(0)
    backbone = models.ViTBackbone(image_shape=(*size, 3), **SMALL)
    preprocessor = models.ViTObjectDetectorPreprocessor(size)
    return models.ViTObjectDetector(backbone, CLASSES, preprocessor, **{**SETTINGS, **settings})


def outputs(layers=2, queries=6, images=3):
    """Random logits and boxes of several layers, and labels with one, two and no boxes."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (images, layers, queries, CLASSES + 1)).astype("float32")
    boxes = rng.uniform(0.1, 0.9, (images, layers, queries, 4)).astype("float32")
    wanted = rng.uniform(0.2, 0.8, (images, 2, 4)).astype("float32")
    classes = np.array([[1, -1], [3, 0], [-1, -1]], "int32")[:images]
    return logits, boxes, {"boxes": wanted, "class_labels": classes}


def giou(first, second):
    """By the corners of two boxes (x, y, w, h), in plain numbers."""
    (a, b), (c, d) = [
        (x - np.array([w, h]) / 2, x + np.array([w, h]) / 2)
        for x, w, h in ((one[:2], *one[2:]) for one in (first, second))
    ]
    inside = np.prod(np.clip(np.minimum(b, d) - np.maximum(a, c), 0, None))
    union = np.prod(b - a) + np.prod(d - c) - inside
    around = np.prod(np.maximum(b, d) - np.minimum(a, c))
    return inside / union - (around - union) / around


def expected_loss(logits, boxes, y):
    """The loss of one layer by trying all assignments."""
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    apart = count = total = 0.0
    weight = np.zeros(logits.shape[:2])
    entropy = np.zeros(logits.shape[:2])
    for i, labels in enumerate(y["class_labels"]):
        there = [t for t, label in enumerate(labels) if label >= 0]

        def cost(t, q, i=i, labels=labels):
            own, target = boxes[i, q], y["boxes"][i, t]
            share = np.exp(logs[i, q, labels[t]])
            return -share + 5 * np.abs(own - target).sum() - 2 * giou(own, target)

        ways = itertools.permutations(range(logits.shape[1]), len(there))
        best = min(ways, key=lambda way: sum(cost(t, q) for t, q in zip(there, way, strict=True)))
        target = np.full(logits.shape[1], CLASSES)
        for t, q in zip(there, best, strict=True):
            target[q] = labels[t]
            apart += 5 * np.abs(boxes[i, q] - y["boxes"][i, t]).sum()
            apart += 2 * (1 - giou(boxes[i, q], y["boxes"][i, t]))
            count += 1
        weight[i] = np.where(target == CLASSES, 0.1, 1.0)
        entropy[i] = -np.take_along_axis(logs[i], target[:, None], 1)[:, 0]
    total = (weight * entropy).sum() / weight.sum()
    return total + apart / max(count, 1)


@EACH
def test_the_loss_is_that_of_the_cheapest_assignment():
    logits, boxes, y = outputs()
    wanted = sum(expected_loss(logits[:, i], boxes[:, i], y) for i in range(2))
    compute = BoxCriterion(CLASSES)
    if keras.backend.backend() == "jax":  # it would compile each operation by itself
        compute = transforms.jit(lambda *given: BoxCriterion(CLASSES)(*given))
    loss = to_numpy(compute(y, boxes, logits))
    np.testing.assert_allclose(loss, wanted, rtol=tolerance("losses"))
    # Images without weight are not there.
    weighted = compute(y, boxes, logits, np.array([1.0, 0.0, 1.0]))
    left = {name: values[::2] for name, values in y.items()}
    alone = compute(left, boxes[::2], logits[::2])
    np.testing.assert_allclose(to_numpy(weighted), to_numpy(alone), rtol=tolerance("losses"))


@pytest.mark.across("torch")
def test_the_loss_is_that_of_transformers():
    import torch
    from transformers.loss.loss_for_object_detection import (
        HungarianMatcher,
        ImageLoss,
        generalized_box_iou,
    )

    logits, boxes, y = outputs(layers=1)
    targets = [
        {"class_labels": torch.tensor(labels[labels >= 0]).long(),
         "boxes": torch.tensor(own[labels >= 0])}
        for labels, own in zip(y["class_labels"], y["boxes"], strict=True)
    ]  # fmt: skip
    theirs = ImageLoss(HungarianMatcher(1, 5, 2), CLASSES, 0.1, ["labels", "boxes"])
    losses = theirs(
        {"logits": torch.tensor(logits[:, 0]), "pred_boxes": torch.tensor(boxes[:, 0])}, targets
    )
    total = losses["loss_ce"] + 5 * losses["loss_bbox"] + 2 * losses["loss_giou"]
    loss = to_numpy(BoxCriterion(CLASSES)(y, boxes, logits))
    np.testing.assert_allclose(loss, total.item(), rtol=tolerance("losses"))
    first, second = boxes[0, 0], boxes[1, 0]
    corners = [
        torch.tensor(np.concatenate([x[:, :2] - x[:, 2:] / 2, x[:, :2] + x[:, 2:] / 2], 1))
        for x in (first, second)
    ]
    shares = to_numpy(generalized_iou(first[:, None], second[None]))
    np.testing.assert_allclose(shares, generalized_box_iou(*corners), atol=tolerance("hidden"))


@pytest.mark.nightly("jax", "tensorflow")
@EACH
def test_it_learns_saves_and_detects(tmp_path):
    images, objects = made_objects(8, SIZE, seed=1)
    model = made()
    _, y = model.preprocessor(
        images, {name: [one[name] for one in objects] for name in ("boxes", "class_labels")}
    )
    model.compile(training.AdamW(3e-3))
    losses = model.fit(images, y, epochs=12, batch_size=4, verbose=0).history["loss"]
    assert losses[-1] < 0.7 * losses[0]
    assert np.isfinite(model.evaluate(images, y, batch_size=4, verbose=0))
    path = model.save_to_preset(tmp_path / "preset")
    again = models.ViTObjectDetector.from_preset(path)
    pictures = [images[0], images[1][:12], Image.fromarray(images[2])]
    for one, other in zip(model.detect(pictures, 0.0), again.detect(pictures, 0.0), strict=True):
        assert one["labels"].tolist() == other["labels"].tolist()
        for name in ("boxes", "scores"):
            np.testing.assert_allclose(one[name], other[name], atol=tolerance("hidden"))
    # Boxes are in the pixels of each image.
    whole = model.predict(images[1:2], verbose=0)["boxes"][0, :, 1]
    half = model.detect(images[1][:12], 0.0)["boxes"]
    assert half.shape == (6, 4) and whole.shape == (6,)
    # Another head starts anew on the same backbone, and another size keeps the weights.
    other = models.ViTObjectDetector.from_preset(path, num_classes=2)
    np.testing.assert_array_equal(other.backbone.get_weights()[0], model.backbone.get_weights()[0])
    assert model.resized((32, 32)).predict(np.zeros((1, 32, 32, 3)), verbose=0)["logits"].shape == (
        *(1, 6, CLASSES + 1),
    )


def coco(folder, part="train", box=(4.0, 2.0, 8.0, 6.0), **changes):
    """A folder in COCO's layout with two images, of which one has no box."""
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    (folder / f"{part}2017").mkdir(exist_ok=True)
    for number in range(2):
        Image.new("RGB", (16, 12), (number * 90, 0, 0)).save(folder / f"{part}2017/{number}.png")
    content = {
        "images": [{"id": i, "file_name": f"{i}.png", "width": 16, "height": 12} for i in range(2)],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 7, "bbox": list(box), "iscrowd": 0},
            {"id": 2, "image_id": 1, "category_id": 9, "bbox": [0, 0, 16, 12], "iscrowd": 1},
        ],
        "categories": [{"id": 9, "name": "dog"}, {"id": 7, "name": "cat"}],
    } | changes
    file = folder / f"annotations/instances_{part}2017.json"
    file.write_text(json.dumps(content))
    return folder


def test_coco_files_are_read(tmp_path):
    for part in ("train", "val"):
        coco(tmp_path, part)
        (tmp_path / "annotations" / f"._instances_{part}2017.json").write_bytes(b"of macOS")
    data = open_boxes(f"coco:{tmp_path}")
    assert data.class_names == ["cat", "dog"] and data.image_shape == (12, 16, 3)
    images, objects = data.validation.batch(np.arange(2))
    assert images[1].shape == (12, 16, 3) and len(objects[0]["boxes"]) == 0
    np.testing.assert_allclose(objects[1]["boxes"][0], [0.5, 5 / 12, 0.5, 0.5])
    assert objects[1]["class_labels"].tolist() == [0, 1]
    assert objects[1]["iscrowd"].tolist() == [0, 1]
    _, labels = BoxLoader(data.validation, 2)[0]
    assert labels["class_labels"].tolist() == [[-1, -1], [0, -1]]  # a crowd is no target


WRONG = {
    "an image outside": ({"images": [{"id": 1, "file_name": "../a.png"}]}, "no such image"),
    "no such image": ({"images": [{"id": 1, "file_name": "a.png"}]}, "describes a.png"),
    "another category": ({"categories": [{"id": 7, "name": "cat"}]}, "category 9"),
    "no images": ({"images": [], "annotations": []}, "describes no images"),
    "words": ({"annotations": [{"image_id": 1, "category_id": 7, "bbox": "4 2"}]}, "bbox"),
    "three numbers": ({"annotations": [{"image_id": 1, "category_id": 7, "bbox": [1, 2, 3]}]}, "4"),
    "negative": ({"box": (1, 2, -3, 4)}, "no box"),
    "one id for two": (
        {"images": 2 * [{"id": 1, "file_name": "1.png"}]},
        "two images with the id 1; give each",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_give_a_line(tmp_path, case):
    changes, message = WRONG[case]
    coco(tmp_path, **changes)
    refused(message, open_boxes, f"coco:{tmp_path}")


def test_boxes_are_of_the_image_as_it_is(tmp_path):
    images = [{"id": i, "file_name": f"{i}.png", "width": 160, "height": 120} for i in range(2)]
    coco(tmp_path, images=images)
    message = r"0\.png has 16x12 pixels, but its annotations are for 160x120; give annotations for"
    refused(message, open_boxes, f"coco:{tmp_path}", validation_split=0.0)


def test_boxes_without_an_area_are_left_out_by_name(tmp_path):
    coco(tmp_path, box=(40, 3, 8, 6))
    with pytest.warns(
        UserWarning, match=r"json: 1 boxes have no area within .* left out, in 1\.png"
    ):
        data = open_boxes(f"coco:{tmp_path}", validation_split=0.0).train
    assert [len(one["boxes"]) for one in data.objects] == [0, 1]


@pytest.mark.parametrize("crop", [None, 0.5])
@pytest.mark.parametrize("box", [(2, 3, 10, 12), (0.5, 0.5, 160, 0.5), (-30, 0.5, 0.1, 0.1)])
def test_boxes_in_pixels_are_refused(box, crop):
    label = {"boxes": np.array([box]), "class_labels": np.array([1])}
    source = BoxImages([np.zeros((16, 16, 3), "uint8")] * 2, [label] * 2)
    message = r"image 0 has the box \[.*; give center x and y, width and height as parts of the"
    refused(message, BoxLoader(source, 2, crop=crop).__getitem__, 0)


def test_objects_have_their_names():
    images, label = [np.zeros((4, 4, 3), "uint8")], {"boxes": np.zeros((0, 4)), "labels": []}
    refused("image 0 has boxes, labels; give boxes and class_labels", BoxImages, images, [label])


def test_crops_and_flips_move_boxes():
    """A white box on black: its pixels are where the label says, in every augmented image."""
    image = np.zeros((32, 32, 3), "uint8")
    image[8:24, 4:20] = 255
    label = {"boxes": np.array([[12 / 32, 0.5, 0.5, 0.5]]), "class_labels": np.array([1])}
    source = BoxImages([image] * 16, [label] * 16)
    settings = {"flip": True, "crop": 0.4, "image_size": (64, 64), "mean": 0.0, "std": 1.0}
    images, labels = BoxLoader(source, 16, **settings)[0]
    assert labels["boxes"].shape == (16, 1, 4) and len(np.unique(labels["boxes"][:, 0, 0])) > 8
    for pixels, (box,), (kind,) in zip(
        images, labels["boxes"], labels["class_labels"], strict=True
    ):
        rows, columns = (np.flatnonzero(pixels[..., 0].max(axis) > 0.5) for axis in (1, 0))
        assert kind == 1
        low, high = 64 * (box[:2] - box[2:] / 2), 64 * (box[:2] + box[2:] / 2)
        np.testing.assert_allclose(low, [columns[0], rows[0]], atol=2)
        np.testing.assert_allclose(high, [columns[-1] + 1, rows[-1] + 1], atol=2)


REFUSED = {
    "width": (lambda: made(decoder_dim=18), "decoder_dim is 18"),
    "weights": (lambda: made(box_weight=-1.0), "box_weight"),
    "a weight of NaN": (lambda: made(iou_weight=np.nan), "iou_weight is nan; give a finite number"),
    "no width": (lambda: made(decoder_mlp_dim=0), "decoder_mlp_dim"),
    "loss": (lambda: made().compile(loss="mse"), "leave loss and metrics out"),
    "labels": (lambda: made().fit(np.zeros((1, *SIZE, 3)), np.zeros(1)), "class_labels"),
    "boxes": (
        lambda: models.ViTObjectDetectorPreprocessor(SIZE)(
            np.zeros((1, *SIZE, 3)), {"boxes": [np.zeros((2, 4))], "class_labels": [[1]]}
        ),
        r"image 0 has boxes \(2, 4\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_settings_give_a_line(case):
    make, message = REFUSED[case]
    refused(message, make)


@pytest.mark.nightly
@pytest.mark.across("torch", "jax", "tensorflow")
def test_it_overfits_sixteen_scenes():
    images, objects = made_objects(16, (48, 48), seed=1)
    keras.utils.set_random_seed(0)
    sizes = {"patch_size": 6, "num_layers": 3, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
    backbone = models.ViTBackbone(image_shape=(48, 48, 3), **sizes)
    model = models.ViTObjectDetector(
        *(backbone, 4),
        models.ViTObjectDetectorPreprocessor((48, 48)),
        num_queries=16,
        num_decoder_layers=3,
        decoder_dim=64,
        num_decoder_heads=4,
        decoder_dropout=0.0,
    )
    schedule = training.WarmupSchedule(1e-3, 600, 30, "cosine")
    model.compile(training.AdamW(schedule, clip_norm=0.1))
    model.fit(
        BoxLoader(BoxImages([*images], objects), 16, mean=0.5, std=0.5), epochs=600, verbose=0
    )
    wanted = []
    for one in objects:
        half = one["boxes"][:, 2:] / 2
        corners = np.concatenate([one["boxes"][:, :2] - half, one["boxes"][:, :2] + half], 1)
        wanted.append({"boxes": 48 * corners, "labels": one["class_labels"]})
    averages = training.average_precision(model.detect(images, threshold=0.0), wanted)
    assert averages["map_50"] > 0.95, averages


@pytest.mark.across("torch")
def test_average_precision_is_cocos(tmp_path):
    """The same boxes through files in COCO's form, as pycocotools' own programs read them."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    rng = np.random.default_rng(0)
    wanted, detected = [], []
    for count in (3, 1, 0, 5):
        low = rng.uniform(0, 200, (count, 2))
        boxes = np.concatenate([low, low + rng.uniform(8, 150, (count, 2))], 1)
        wanted.append({"boxes": boxes, "labels": rng.integers(0, 3, count)})
        moved = np.concatenate([boxes + rng.normal(0, 4, boxes.shape), boxes[:1] + 60])
        labels = np.append(wanted[-1]["labels"], [0] * (len(moved) - count))
        detected.append({"boxes": moved, "labels": labels, "scores": rng.random(len(moved))})

    def corners(box):
        return [*box[:2].tolist(), *(box[2:] - box[:2]).tolist()]

    every = [(i, one, k) for i, one in enumerate(wanted) for k in range(len(one["labels"]))]
    content = {
        "images": [{"id": i} for i in range(4)],
        "categories": [{"id": i} for i in range(3)],
        "annotations": [
            {"id": n + 1, "image_id": i, "category_id": int(one["labels"][k]), "iscrowd": 0,
             "bbox": (box := corners(one["boxes"][k])), "area": box[2] * box[3]}
            for n, (i, one, k) in enumerate(every)
        ],
    }  # fmt: skip
    (tmp_path / "truth.json").write_text(json.dumps(content))
    results = [
        {"image_id": i, "category_id": int(one["labels"][k]), "bbox": corners(one["boxes"][k]),
         "score": float(one["scores"][k])}
        for i, one in enumerate(detected) for k in range(len(one["labels"]))
    ]  # fmt: skip
    truth: Any = COCO(str(tmp_path / "truth.json"))
    evaluation = COCOeval(truth, truth.loadRes(results), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    ours = training.average_precision(detected, wanted)
    np.testing.assert_allclose(list(ours.values()), evaluation.stats, atol=1e-6)
    assert 0.1 < ours["map"] < 0.9
    perfect = [one | {"scores": np.ones(len(one["labels"]))} for one in wanted]
    assert training.average_precision(perfect, wanted)["map"] == pytest.approx(1.0)
    wrong = {
        r"boxes \(3, 5\), labels \(3,\)": {"boxes": np.zeros((3, 5))},
        r"labels \(2,\)": {"labels": [0, 1]},
        " class 0.5; give whole numbers": {"labels": [0.5, 1, 1]},
        r" the labels \[0, 1, -1\]; give the number": {"labels": [0, 1, -1]},
        r" the labels \['a', 'b', 'c'\]; give the number": {"labels": [*"abc"]},
        "upper left and of the lower right corner": {"boxes": perfect[0]["boxes"][:, [2, 3, 0, 1]]},
        "a number that is not finite": {"scores": [np.nan, 1, 1]},
    }
    for message, change in wrong.items():
        objects = [perfect[0] | change, *perfect[1:]]
        refused(f"detected image 0 has.*{message}", training.average_precision, objects, wanted)
    message = "detected image 0 has no scores, but boxes, labels"
    refused(message, training.average_precision, wanted, wanted)
