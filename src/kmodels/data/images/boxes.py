"""Images whose labels are boxes of objects: COCO's files, and made scenes."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kmodels.core.arguments import checked
from kmodels.core.errors import InputError
from kmodels.core.files import is_hidden, is_inside
from kmodels.core.remote import local_copy
from kmodels.core.schema import NUMBER, Needed, Shape, read_json
from kmodels.data.images.decoding import (
    decode,
    decode_file,
    is_turned,
    read_picture,
    suffixes,
    tell_of_orientation,
)
from kmodels.data.images.resizing import sides_of
from kmodels.data.images.sources import DataBundle, all_parts, check_share, check_whole_classes
from kmodels.data.images.synthetic import SCENE_CLASSES, SCENE_SIZE, made_objects, number_of_scenes

SPECS = "scenes[:N], coco:DIR"
# By part of the data: names of its folder, and of COCO's files, in which these words occur.
PARTS = {"train": ("train",), "validation": ("val", "valid", "validation"), "test": ("test",)}
# Labels of an image, and of a batch, by transformers' names.
KEYS = ("boxes", "class_labels")
# Boxes may end outside of their image, but numbers beyond are pixels.
BEYOND = 2.0
# What is read of COCO's files; the rest describes where images come from, and masks.
COCO: Shape = {
    "images": Needed([{"id": Needed(NUMBER), "file_name": Needed(str)}]),
    "annotations": Needed(
        [{"image_id": Needed(NUMBER), "category_id": Needed(NUMBER), "bbox": Needed([NUMBER])}]
    ),
    "categories": Needed([{"id": Needed(NUMBER), "name": Needed(str)}]),
}


class BoxImages:
    """Images in memory or in files with the boxes of each, an `ImageSource`.

    Args:
        images: uint8 arrays (H, W, C), or paths of files, which are read with their batch.
        objects: for each image "boxes", float32 (T, 4): center x and y, width and height as parts
            of the sides of the image; and "class_labels", int32 (T,). With "iscrowd" (T,) some are
            crowds, which only `kmodels.training.average_precision` looks at; so it is with "area".
        sizes: (height, width) of each file according to its annotations, or None; a file of
            another size is refused when it is read.

    Attributes:
        labels: the numbers of the images, since their boxes do not make an array.
        most: largest number of boxes of an image.

    Raises:
        InputError: if the numbers of images and of objects differ.
    """

    def __init__(
        self,
        images: Sequence[Any],
        objects: Sequence[Mapping[str, np.ndarray]],
        sizes: Sequence[tuple[int, int]] | None = None,
    ):
        if len(images) != len(objects):
            raise InputError(
                f"{len(images)} images have the boxes of {len(objects)}; give those of each"
            )
        for number, one in enumerate(objects):
            if not isinstance(one, Mapping) or not set(KEYS) <= set(one):
                keys = ", ".join(map(str, one)) if isinstance(one, Mapping) else repr(one)
                raise InputError(f"image {number} has {keys}; give {' and '.join(KEYS)}")
        self.images, self.objects, self.sizes = images, list(objects), sizes
        self.labels = np.arange(len(objects), dtype="int32")
        self.most = max((len(one[KEYS[1]]) for one in objects), default=0)

    def __len__(self) -> int:
        return len(self.objects)

    def batch(self, indices: np.ndarray) -> tuple[list[np.ndarray], Any]:
        """Returns lists of images (H, W, C) and of their objects.

        Raises:
            InputError: for a file whose size is not that of its annotations.
        """
        return [self._image(i) for i in indices], [self.objects[i] for i in indices]

    def _image(self, index: int) -> np.ndarray:
        image = self.images[index]
        if not isinstance(image, Path):
            return image
        content = read_picture(image)
        pixels = decode(content, str(image))
        height, width = pixels.shape[:2] if self.sizes is None else self.sizes[index]
        if pixels.shape[:2] != (height, width):
            raise InputError(
                f"{image} has {pixels.shape[1]}x{pixels.shape[0]} pixels, but its annotations are "
                f"for {width}x{height}; give annotations for the image as it is"
            )
        if is_turned(content):
            tell_of_orientation(str(image), "boxes are read as they are")
        return pixels

    def part(self, indices: np.ndarray) -> "BoxImages":
        """Returns the images with these numbers, in this order."""
        sizes = None if self.sizes is None else [self.sizes[i] for i in indices]
        return BoxImages(
            [self.images[i] for i in indices], [self.objects[i] for i in indices], sizes
        )


def padded(objects: Sequence[Mapping[str, Any]], room: int = 1) -> dict[str, np.ndarray]:
    """Returns the objects of several images in one array each; crowds are left out.

    Returns "boxes", float32 (B, S, 4), and "class_labels", int32 (B, S), -1 for no box. S is a
    power of two of at least `room`, so that few steps are compiled.
    """
    room = 1 << (max([1, room, *(len(one[KEYS[1]]) for one in objects)]) - 1).bit_length()
    # A box that stands for none has an area, so that no derivative is infinite.
    boxes = np.full((len(objects), room, 4), 0.5, "float32")
    classes = np.full((len(objects), room), -1, "int32")
    for number, one in enumerate(objects):
        own, labels = check_objects(one, number)
        if "iscrowd" in one:
            single = np.asarray(one["iscrowd"]) == 0
            own, labels = own[single], labels[single]
        boxes[number, : len(own)], classes[number, : len(own)] = own, labels
    return dict(zip(KEYS, (boxes, classes), strict=True))


def check_objects(one: Mapping[str, Any], number: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns boxes (T, 4) and classes (T,) of an image as float32 arrays.

    Raises:
        InputError: for boxes that are not finite, of a negative size, in pixels, or without a whole
            number as class each.
    """
    boxes, labels = (np.asarray(one[key], "float32") for key in KEYS)
    if boxes.size == labels.size == 0:
        return np.zeros((0, 4), "float32"), np.zeros(0, "float32")
    if labels.ndim != 1 or boxes.shape != (len(labels), 4):
        raise InputError(
            f"image {number} has boxes {boxes.shape} and classes {labels.shape}; give (T, 4) and "
            "(T,)"
        )
    if not np.isfinite(boxes).all() or (boxes[:, 2:] < 0).any():
        raise InputError(f"image {number} has a box that is not finite, or of a negative size")
    if (far := (np.abs(boxes) > BEYOND).any(1)).any():
        raise InputError(
            f"image {number} has the box {boxes[far][0].tolist()}; give center x and y, width and "
            "height as parts of the sides of the image, from 0 to 1"
        )
    check_whole_classes(labels, f"image {number}")
    return boxes, labels


def cropped(one: Mapping[str, np.ndarray], part: Sequence[float]) -> dict[str, np.ndarray]:
    """Returns the objects in a part of an image, their boxes cut off at its border.

    The part is left, top, right and bottom as shares of the sides of the image.
    """
    boxes, (left, top, right, bottom) = np.asarray(one[KEYS[0]], "float64"), part
    begin, sides = np.array([left, top]), np.array([right - left, bottom - top])
    low = np.clip((boxes[:, :2] - boxes[:, 2:] / 2 - begin) / sides, 0, 1)
    high = np.clip((boxes[:, :2] + boxes[:, 2:] / 2 - begin) / sides, 0, 1)
    stays = (high > low).all(1)
    inside = np.concatenate([(low + high) / 2, high - low], axis=1).astype("float32")
    return {key: np.asarray(x)[stays] for key, x in {**one, KEYS[0]: inside}.items()}


def corners_in_pixels(boxes: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Returns x and y of the upper left and of the lower right corner, float64 (T, 4), in pixels.

    Boxes (T, 4) are center x and y, width and height as shares of the sides of an image of the size
    (height, width).
    """
    (height, width), half = size, boxes[:, 2:] / 2
    corners = np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)
    return corners * np.array([width, height, width, height])


def in_pixels(image: np.ndarray, objects: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the objects of an image (H, W, C) as `average_precision` takes them."""
    boxes = corners_in_pixels(objects[KEYS[0]], image.shape[:2])
    more = {name: objects[name] for name in ("iscrowd", "area") if name in objects}
    return {"boxes": boxes, "labels": objects[KEYS[1]], **more}


@checked
def open_boxes(
    spec: str,
    *,
    image_size: tuple[int, int] | None = None,
    seed: int = 0,
    validation_split: float = 0.1,
) -> DataBundle:
    """Opens a data set of images with boxes.

    A folder has COCO's layout, `annotations/*train*.json` and the images in `train*/`, the same
    with `val` and `test`; or Roboflow's, with the images and `_annotations.coco.json` in `train/`,
    `valid/` and `test/`; or one JSON file beside the images or beside a folder `images/`. Missing
    parts are drawn from the training part by the seed. Boxes are cut off at the border of their
    image.

    Args:
        spec: "scenes[:N]" for N synthetic scenes (default: 2,400), or "coco:DIR".
        image_size: (height, width) of synthetic scenes.
        seed: seed of scenes and splits.
        validation_split: share of each missing part.

    Returns:
        The splits, each a `BoxImages`.

    Raises:
        InputError: for another spec, or files that do not fit together.
    """
    check_share(validation_split)
    image_size = None if image_size is None else sides_of(image_size)
    kind, _, rest = spec.partition(":")
    if kind == "scenes":
        count = number_of_scenes(spec)
        images, objects = made_objects(count, image_size or SCENE_SIZE, seed)
        parts = all_parts({"train": BoxImages([*images], objects)}, validation_split, seed)
        shape = images.shape[1:]
        return DataBundle(**parts, class_names=[*SCENE_CLASSES[1:]], image_shape=shape)
    if kind == "coco":
        return _coco(local_copy(rest), image_size, seed, validation_split)
    raise InputError(f"data is {spec}; give one of {SPECS}")


def _coco(
    root: Path, image_size: tuple[int, int] | None, seed: int, validation_split: float
) -> DataBundle:
    if not root.is_dir():
        raise InputError(f"there is no folder {root}")
    files = _files(root)
    described = {part: read_json(file, COCO, most=None) for part, file in files.items()}
    names = {one["id"]: one["name"] for one in described["train"]["categories"]}
    for part, content in described.items():
        if {one["id"]: one["name"] for one in content["categories"]} != names:
            raise InputError(f"{files[part]} has other categories than {files['train']}")
    numbers = {category: number for number, category in enumerate(sorted(names))}
    sources = {
        part: _part(files[part], root, content, numbers) for part, content in described.items()
    }
    parts = all_parts(sources, validation_split, seed)
    images, _ = parts["train"].batch(np.arange(1))
    height, width = image_size or images[0].shape[:2]
    return DataBundle(
        **parts,
        class_names=[names[category] for category in sorted(names)],
        image_shape=(height, width, 3),
    )


def _files(root: Path) -> dict[str, Path]:
    """Returns the JSON file of each part."""
    files = [path for folder in (root, root / "annotations") for path in folder.glob("*.json")]
    files += root.glob("*/_annotations.coco.json")
    files = [path for path in files if not is_hidden(path.name)]
    if len(files) == 1:
        return {"train": files[0]}
    chosen: dict[str, Path] = {}
    for part, words in PARTS.items():
        named = [
            path
            for path in files
            if any(
                word in (path.parent.name if path.name[0] == "_" else path.stem) for word in words
            )
            and (path.name[0] == "_" or "person_keypoints" not in path.stem)
            and "captions" not in path.stem
        ]
        if len(named) > 1:
            raise InputError(
                f"{root} has {', '.join(sorted(path.name for path in named))} for {part}; leave one"
            )
        if named:
            chosen[part] = named[0]
    if "train" not in chosen:
        raise InputError(
            f"{root} has no annotations of images to train with; give annotations/*train*.json, or "
            "one JSON file"
        )
    return chosen


def _part(file: Path, root: Path, content: dict[str, Any], numbers: Mapping[Any, int]) -> BoxImages:
    folders = [file.parent, file.parent / "images", root, root / "images"]
    folders += [path for path in sorted(root.iterdir()) if path.is_dir() and path.name in file.stem]
    twice = [i for i, count in Counter(one["id"] for one in content["images"]).items() if count > 1]
    if twice:
        raise InputError(
            f"{file} has two images with the id {twice[0]!r}; give each image a unique id"
        )
    own: dict[Any, list[dict[str, Any]]] = {one["id"]: [] for one in content["images"]}
    for one in content["annotations"]:
        if one["image_id"] not in own or one["category_id"] not in numbers:
            raise InputError(
                f"{file} has a box of image {one['image_id']!r} and category "
                f"{one['category_id']!r}, and describes no such ones"
            )
        if len(one["bbox"]) != 4:
            raise InputError(f"{file} has a bbox of {len(one['bbox'])} numbers; give 4")
        own[one["image_id"]].append(one)
    paths, objects, sizes, without = [], [], [], []
    for image in content["images"]:
        name = image["file_name"]
        path = next(
            (x for folder in folders if is_inside(name) and (x := folder / name).is_file()), None
        )
        if path is None or path.suffix.lower() not in suffixes():
            raise InputError(
                f"{file} describes {name}, and there is no such image beside it, in images/ or in "
                "a folder that the file is named after"
            )
        sizes.append(_size(image, path))
        found = _objects(file, image, sizes[-1], own[image["id"]], numbers)
        paths.append(path)
        objects.append(found)
        without += [name] * (len(own[image["id"]]) - len(found[KEYS[1]]))
    if not paths:
        raise InputError(f"{file} describes no images")
    if without:
        warnings.warn(
            f"{file}: {len(without)} boxes have no area within their image and are left out, in "
            f"{', '.join([*dict.fromkeys(without)][:8])}",
            stacklevel=2,
        )
    return BoxImages(paths, objects, sizes)


def _size(image: Mapping[str, Any], path: Path) -> tuple[int, int]:
    """Returns (height, width) as described, or else as it is."""
    width, height = image.get("width"), image.get("height")
    if isinstance(width, int) and isinstance(height, int) and min(width, height) > 0:
        return height, width
    return decode_file(path).shape[:2]


def _objects(
    file: Path,
    image: Mapping[str, Any],
    size: tuple[int, int],
    boxes: Sequence[Mapping[str, Any]],
    numbers: Mapping[Any, int],
) -> dict[str, np.ndarray]:
    height, width = size
    corners = np.array([one["bbox"] for one in boxes], "float64").reshape(-1, 4)
    if not np.isfinite(corners).all() or (corners[:, 2:] < 0).any():
        raise InputError(f"{file} has a bbox of {image['file_name']} that is no box")
    whole = np.concatenate([corners[:, :2] + corners[:, 2:] / 2, corners[:, 2:]], axis=1)
    classes = np.array([numbers[one["category_id"]] for one in boxes], "int32")
    relative = whole / np.array([width, height, width, height])
    objects = {KEYS[0]: relative, KEYS[1]: classes}
    if any(one.get("iscrowd") for one in boxes):
        objects["iscrowd"] = np.array([bool(one.get("iscrowd")) for one in boxes], "int32")
    if boxes and all(isinstance(one.get("area"), int | float) for one in boxes):
        objects["area"] = np.array([one["area"] for one in boxes], "float64")
    return cropped(objects, (0, 0, 1, 1))
