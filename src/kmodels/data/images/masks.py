"""Images whose labels are masks, a class for each pixel."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from kmodels.core.arguments import checked
from kmodels.core.errors import InputError
from kmodels.core.files import paths_below
from kmodels.core.remote import local_copy
from kmodels.data.images.decoding import (
    PictureError,
    decode,
    decode_file,
    is_turned,
    read_picture,
    read_pixels,
    tell_of_orientation,
)
from kmodels.data.images.resizing import sides_of
from kmodels.data.images.sources import (
    NO_LABEL,
    SPLITS,
    ArraySource,
    DataBundle,
    all_parts,
    check_images,
    check_labels,
    check_share,
    check_stems,
    check_whole_classes,
    is_image_file,
    unread_files,
    warn_of_files,
)
from kmodels.data.images.synthetic import SCENE_CLASSES, SCENE_SIZE, made_scenes, number_of_scenes

SPECS = "scenes[:N], folder:DIR"
ADE20K = "annotations"  # the folder of its masks


class MaskArrays(ArraySource):
    """Images and masks in memory, an `ImageSource` whose labels are masks.

    Args:
        images: uint8 or float32 (n, H, W, C), values from 0 to 255.
        masks: whole numbers (n, H, W).
        indices: numbers of the images to use, in order; default: all.

    Raises:
        InputError: if their shapes do not fit together, or a class is not a whole number.
    """

    def __init__(self, images: np.ndarray, masks: np.ndarray, indices: np.ndarray | None = None):
        check_images(images)
        check_whole_classes(masks, "one of the masks")
        if images.shape[:3] != masks.shape:
            raise InputError(
                f"images have shape {images.shape} and masks {masks.shape}; give (n, H, W, C) and "
                "(n, H, W)"
            )
        self.images = images if indices is None else images[indices]
        self.labels = masks if indices is None else masks[indices]


class MaskFiles:
    """Images with masks of the same name, read with their batch.

    `labels` are the numbers of the images, since masks of different sizes do not make an array.
    """

    def __init__(
        self,
        pairs: list[tuple[Path, Path]],
        classes: int,
        reduce_labels: bool = False,
        ignore_class: int | None = NO_LABEL,
    ):
        self.pairs, self.classes = pairs, classes
        self.reduce_labels, self.ignore_class = reduce_labels, ignore_class
        self.labels = np.arange(len(pairs), dtype="int32")

    def __len__(self) -> int:
        return len(self.pairs)

    def batch(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Returns lists of images (H, W, 3) and masks (H, W)."""
        pairs = [self._pair(*self.pairs[i]) for i in indices]
        return [image for image, _ in pairs], [mask for _, mask in pairs]

    def part(self, indices: np.ndarray) -> "MaskFiles":
        """Returns the images with these numbers, in this order."""
        pairs = [self.pairs[i] for i in indices]
        return MaskFiles(pairs, self.classes, self.reduce_labels, self.ignore_class)

    def _pair(self, image: Path, mask: Path) -> tuple[np.ndarray, np.ndarray]:
        content = read_picture(image)
        pixels, labels = decode(content, str(image)), read_mask(mask, self.reduce_labels)
        if pixels.shape[:2] != labels.shape:
            raise InputError(
                f"{mask} has {labels.shape[1]}x{labels.shape[0]} pixels and its image "
                f"{pixels.shape[1]}x{pixels.shape[0]}; give masks of the size of their images"
            )
        if is_turned(content) and not is_turned(read_picture(mask)):
            tell_of_orientation(str(image), "masks without one are read as they are")
        return pixels, check_labels(labels, self.classes, str(mask), self.ignore_class)


def read_mask(path: Path, reduce_labels: bool = False) -> np.ndarray:
    """Returns the classes in a PNG, int32 (height, width), upright as by EXIF.

    Palette indices are the classes.
    """
    from PIL import ImageOps

    def numbers_of(image: Any) -> np.ndarray:
        return np.asarray(ImageOps.exif_transpose(image))

    try:
        numbers = read_pixels(read_picture(path), str(path), ("PNG",), numbers_of)
    except PictureError as error:
        raise InputError(f"{path} is not a PNG of a mask ({error.reason}); repair it") from error
    if numbers.ndim != 2:
        raise InputError(
            f"{path} has {numbers.shape[-1]} channels; give a PNG whose values are the classes"
        )
    labels = numbers.astype("int32")
    if reduce_labels:
        labels = np.where((labels == 0) | (labels == NO_LABEL), NO_LABEL, labels - 1)
    return labels


@checked
def open_masks(
    spec: str,
    *,
    image_size: tuple[int, int] | None = None,
    seed: int = 0,
    validation_split: float = 0.1,
    reduce_labels: bool = False,
    ignore_class: int | None = NO_LABEL,
) -> DataBundle:
    """Opens a data set of images with masks.

    A folder has `images/` and `masks/`, with PNGs of the same paths, or `train/`, `validation/` (or
    `val/`) and `test/` with these two each. The value of a pixel is its class, or `ignore_class`.
    `classes.txt` has the class names, one per line; without it their number is read from the masks.
    Missing parts are drawn from the training part by the seed. ADE20K's own folders,
    `images/training` and `annotations/training` and the same of `validation`, are read as they are,
    with the names of `objectInfo150.txt`; there is no test part then.

    Args:
        spec: "scenes[:N]" for N synthetic scenes (default: 2,400), or "folder:DIR".
        image_size: (height, width) of synthetic scenes.
        seed: seed of scenes and splits.
        validation_split: share of each missing part.
        reduce_labels: value 0 marks unlabeled pixels and classes are numbered from 1 on in files,
            as in ADE20K; transformers' `do_reduce_labels`.
        ignore_class: value of unlabeled pixels; None if all have a class.

    Returns:
        The splits, whose labels are masks.

    Raises:
        InputError: for another spec, settings that do not fit together, or files that do not.
    """
    check_share(validation_split)
    if reduce_labels and ignore_class != NO_LABEL:
        raise InputError(
            f"ignore_class is {ignore_class} with reduce_labels, which gives unlabeled pixels "
            f"{NO_LABEL}; leave ignore_class out"
        )
    image_size = None if image_size is None else sides_of(image_size)
    kind, _, rest = spec.partition(":")
    if kind == "scenes":
        if reduce_labels:
            raise InputError("scenes have no unlabeled pixels; leave reduce_labels out")
        count = number_of_scenes(spec)
        images, masks = made_scenes(count, image_size or SCENE_SIZE, seed)
        parts = all_parts({"train": MaskArrays(images, masks)}, validation_split, seed)
        shape = images.shape[1:]
        return DataBundle(**parts, class_names=[*SCENE_CLASSES], image_shape=shape)
    if kind == "folder":
        root = local_copy(rest)
        return _folder(root, image_size, seed, validation_split, reduce_labels, ignore_class)
    raise InputError(f"data is {spec}; give one of {SPECS}")


def _folder(
    root: Path,
    image_size: tuple[int, int] | None,
    seed: int,
    validation_split: float,
    reduce_labels: bool,
    ignore_class: int | None,
) -> DataBundle:
    if not root.is_dir():
        raise InputError(f"there is no folder {root}")
    if (root / ADE20K / "training").is_dir():
        folders = {"train": "training", "validation": "validation"}
        pairs = {
            part: _pairs(root / "images" / name, root / ADE20K / name)
            for part, name in folders.items()
        }
        validation_split = 0.0  # It is evaluated on the validation part.
    elif "train" in (folders := _parts(root)):
        pairs = {part: _pairs(one / "images", one / "masks") for part, one in folders.items()}
    else:
        pairs = {"train": _pairs(root / "images", root / "masks")}
    masks = [mask for paths in pairs.values() for _, mask in paths]
    names = _names(root, masks, reduce_labels, ignore_class)
    sources = {
        part: MaskFiles(paths, len(names), reduce_labels, ignore_class)
        for part, paths in pairs.items()
    }
    parts = all_parts(sources, validation_split, seed)
    first = parts["train"].pairs[0][0]
    height, width = image_size or decode_file(first).shape[:2]
    return DataBundle(**parts, class_names=names, image_shape=(height, width, 3))


def _parts(root: Path) -> dict[str, Path]:
    """Returns the folder of each part that has one."""
    folders: dict[str, Path] = {}
    for path in sorted(root.iterdir()):
        part = SPLITS.get(path.name.lower()) if path.is_dir() else None
        if part in folders:
            raise InputError(f"{root} has {folders[part].name} and {path.name}; leave one")
        if part is not None:
            folders[part] = path
    return folders


def _pairs(images: Path, masks: Path) -> list[tuple[Path, Path]]:
    paths = paths_below(images) if images.is_dir() else []
    warn_of_files(images, unread_files(paths))
    names = [Path(*parts) for parts in paths if is_image_file(parts[-1])]
    check_stems(images, names)
    pairs = [(images / name, masks / name.with_suffix(".png")) for name in names]
    if lacking := [path.name for path, mask in pairs if not mask.is_file()]:
        raise InputError(f"{masks} has no PNG for {', '.join(lacking[:8])}; add them")
    if not pairs:
        raise InputError(f"{images} has no images; give DIR/images and DIR/masks")
    listed = {masks.joinpath(*parts) for parts in paths_below(masks) if parts[-1].endswith(".png")}
    if extra := sorted(path.name for path in listed - {mask for _, mask in pairs}):
        warnings.warn(
            f"{masks}: {len(extra)} masks have no image and are left out: {', '.join(extra[:8])}",
            stacklevel=2,
        )
    return pairs


def _names(
    root: Path, masks: list[Path], reduce_labels: bool, ignore_class: int | None
) -> list[str]:
    file = root / "classes.txt"
    names = [line.strip() for line in _lines(file)] if file.is_file() else []
    if "" in names:
        raise InputError(f"{file} has an empty line; give the name of a class in each")
    if (table := root / "objectInfo150.txt").is_file():
        rows = _lines(table)[1:]
        names = [row.split("\t")[-1].split(",")[0].strip() for row in rows if "\t" in row]
        names = names if reduce_labels else ["other", *names]
    if names:
        return names
    most, has_others = -1, False
    for mask in masks:
        labels = read_mask(mask, reduce_labels)
        labeled = labels[labels != ignore_class]
        most = max(most, int(labeled.max(initial=-1)))
        has_others |= labeled.size < labels.size
    if most < 0:
        raise InputError(f"{root} has no labeled pixel; give masks whose values are the classes")
    if most == 0 and has_others:
        raise InputError(
            f"{root} has pixels of class 0 and of ignore_class={ignore_class} alone, so nothing "
            "can be learnt; write masks of two classes as 0 and 1"
        )
    return [str(i) for i in range(most + 1)]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8-sig").rstrip().split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 at byte {error.start + 1}") from error
