"""Folders of images, one per class, with or without split folders above, or a zip of them."""

import warnings
import zipfile
import zlib
from collections import Counter, defaultdict
from pathlib import Path, PurePosixPath

import numpy as np

from kmodels.core.errors import InputError, shown
from kmodels.core.files import check_zip
from kmodels.data.images.decoding import MAX_BYTES, PictureError, decode, suffixes
from kmodels.data.images.sources import DataBundle, common_size, readable, split

_SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "test": "test",
}

# Extensions of other files that are expected next to images.
_DOCUMENTS = (
    *(".txt", ".md", ".json", ".jsonl", ".csv", ".tsv", ".xml", ".yaml", ".yml", ".html", ".pdf"),
    *(".ini", ".db", ".log", ".py", ".mat", ".npy", ".npz", ".zip", ".tar", ".gz"),
)
Listing = list[tuple[str, ...]]


class FileSource:
    """Images in files or in a zip file, read with their batch.

    Args:
        root: the folder or the zip file.
        names: path of each image below root, with forward slashes.
        labels: int (n,).
    """

    def __init__(self, root: Path, names: list[str], labels: np.ndarray):
        self.root = Path(root)
        self.names = names
        self.labels = np.asarray(labels, "int32")
        self._zip: zipfile.ZipFile | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __getstate__(self) -> dict:
        # An open zip file cannot be pickled; another process opens its own.
        return {**self.__dict__, "_zip": None}

    def batch(self, indices: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """See ImageSource."""
        return [self.picture(int(i)) for i in indices], self.labels[indices]

    def picture(self, number: int) -> np.ndarray:
        """Returns one image, uint8 (H, W, 3)."""
        name = self.names[number]
        where = f"{self.root}/{name}"
        try:
            return decode(self._read(name), where)
        except (OSError, RuntimeError, NotImplementedError) as error:
            raise PictureError(where, f"cannot be read ({error})") from error
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
            raise PictureError(where, f"damaged in the zip ({error})") from error

    def _read(self, name: str) -> bytes:
        if self.root.is_dir():
            return (self.root / name).read_bytes()
        if self._zip is None:
            self._zip = zipfile.ZipFile(self.root)
        # The size is checked before unpacking: a few kilobytes can unpack to gigabytes.
        if self._zip.getinfo(name).file_size > MAX_BYTES:
            raise PictureError(f"{self.root}/{name}", f"unpacks to over {MAX_BYTES} bytes")
        return self._zip.read(name)


def read_folder(
    root: Path,
    image_size: tuple[int, int] | None,
    seed: int,
    validation_split: float,
    skip_bad: bool,
) -> DataBundle:
    """Opens ROOT/CLASS/*.jpg or ROOT/train/CLASS/*.jpg, or a zip of either.

    Raises:
        InputError: for a missing folder, fewer than two classes, an empty class, a class in a
            validation or test folder only, or an unreadable image unless skip_bad is set.
    """
    listed, unread = _list(root)
    images = _below_wrapper(listed)
    if not any(parts[-1] for parts in images):
        raise InputError(
            f"{root} holds no images that Pillow reads, such as .jpg; give folder:DIR with a "
            "folder per class"
        )
    by_split, names = _sort(root, images)
    skipped = [(f"{root}/{name}", "not an image that Pillow reads") for name in unread]
    if unread:
        ends = Counter(PurePosixPath(name).suffix.lower() or "no suffix" for name in unread)
        warnings.warn(
            f"{shown(root)}: {len(unread)} files are left out, which Pillow does not read "
            f"({', '.join(f'{count} {end}' for end, count in ends.most_common())}); convert them, "
            "or install Pillow's plugin for them, such as pillow-heif",
            stacklevel=3,
        )
    sources = {
        part: _source(root, members, names, skipped if skip_bad else None)
        for part, members in by_split.items()
        if members
    }
    train = sources["train"]
    empty = [name for label, name in enumerate(names) if label not in train.labels]
    if empty:
        raise InputError(
            f"{root}: no usable training image in class {', '.join(empty)}; add some or remove "
            "the folder"
        )
    shares = [0.0 if part in sources else validation_split for part in ("validation", "test")]
    rest, *drawn = split(len(train), shares, seed)
    for part, numbers in zip(("validation", "test"), drawn, strict=True):
        if len(numbers):
            sources[part] = _take(train, numbers)
    if len(rest) < len(train):
        sources["train"] = _take(train, rest)
    height, width = image_size or common_size(sources["train"], root)
    return DataBundle(
        sources["train"],
        sources.get("validation"),
        sources.get("test"),
        names,
        (height, width, 3),
        skipped,
    )


def _list(root: Path) -> tuple[Listing, list[str]]:
    """Lists the images and the other files below root.

    Returns:
        The parts of the path of each image, (*parts, "") for a folder; and the paths of other files
        in folders, except for texts and settings.
    """
    if root.is_dir():
        paths = [
            (*path.relative_to(root).parts, *(("",) if path.is_dir() else ()))
            for path in sorted(root.rglob("*"))
        ]
    elif root.is_file():
        try:
            with zipfile.ZipFile(root) as archive:
                check_zip(archive, root)
                paths = [
                    (*PurePosixPath(info.filename).parts, *(("",) if info.is_dir() else ()))
                    for info in archive.infolist()
                ]
        except (zipfile.BadZipFile, OSError, NotImplementedError, UnicodeError) as error:
            raise InputError(f"{root} is not a readable zip file ({error}); give a zip") from error
    else:
        raise InputError(f"{root} does not exist; give folder:DIR or folder:FILE.zip")
    shown = [p for p in paths if not any(part.startswith((".", "__MACOSX")) for part in p)]
    images = [p for p in shown if p[-1] == "" or p[-1].lower().endswith(suffixes())]
    others = {*shown} - {*images}
    return images, sorted(
        "/".join(p) for p in others if len(p) > 1 and not p[-1].lower().endswith(_DOCUMENTS)
    )


def _below_wrapper(images: Listing) -> Listing:
    """Removes a level of folders if a single folder wraps the data, as in many zip files.

    A folder with images right in it is a class, and one named train a split, not a wrapper. The
    wrapper stays in the names, as a part of the first one.
    """
    top = {parts[0] for parts in images}
    inner = [parts for parts in images if len(parts) > 2]
    wraps = (
        len(top) == 1
        and top.isdisjoint(_SPLITS)
        and bool(inner)
        and not any(len(parts) == 2 and parts[1] for parts in images)
    )
    if not wraps:
        return images
    prefix = next(iter(top))
    return [(f"{prefix}/{parts[1]}", *parts[2:]) for parts in inner]


def _sort(root: Path, images: Listing) -> tuple[dict[str, list[tuple[str, str]]], list[str]]:
    """Returns (path, class) of the images by split, and the class names in alphabetical order."""
    tops = {parts[0].rsplit("/", 1)[-1].lower() for parts in images if len(parts) > 1}
    has_splits = _has_splits(images)
    if has_splits and (strange := sorted(tops - set(_SPLITS))):
        raise InputError(
            f"{root} has both a train folder and {', '.join(strange)}; give class folders, or "
            "train, validation and test with class folders in them"
        )
    by_split: dict[str, list[tuple[str, str]]] = defaultdict(list)
    classes: dict[str, set[str]] = defaultdict(set)
    for parts in images:
        top, depth = parts[0].rsplit("/", 1)[-1], 1 if has_splits else 0
        if len(parts) < depth + 2:
            continue  # an image outside of all class folders
        part = _SPLITS[top.lower()] if has_splits else "train"
        label = parts[1] if has_splits else top
        classes[part].add(label)
        if parts[-1]:
            by_split[part].append(("/".join(parts), label))
    names = sorted(classes["train"])
    if len(names) < 2:
        raise InputError(
            f"{root} has {len(names)} class ({', '.join(names)}); give a folder for each of at "
            "least two"
            if names
            else f"{root} has images but no class folders; put them in a folder per class"
        )
    for part in ("validation", "test"):
        if extra := sorted(classes[part] - set(names)):
            raise InputError(
                f"{root}: class {', '.join(extra)} is in {part} but not in train; add it there or "
                "remove it"
            )
    by_split.setdefault("train", [])
    return by_split, names


def _has_splits(images: Listing) -> bool:
    """Returns True if a train folder has class folders; if it has images, it is a class."""
    train = [
        parts
        for parts in images
        if _SPLITS.get(parts[0].rsplit("/", 1)[-1].lower()) == "train" and parts[-1]
    ]
    return bool(train) and all(len(parts) > 2 for parts in train)


def _source(
    root: Path,
    members: list[tuple[str, str]],
    names: list[str],
    skipped: list[tuple[str, str]] | None,
) -> FileSource:
    label_of = {name: label for label, name in enumerate(names)}
    members = sorted(members)
    source = FileSource(
        root, [path for path, _ in members], np.array([label_of[name] for _, name in members], int)
    )
    if skipped is None:
        return source
    numbers, unreadable = readable(source.picture, len(source))
    skipped += unreadable
    return source if len(numbers) == len(source) else _take(source, numbers)


def _take(source: FileSource, numbers: np.ndarray) -> FileSource:
    names = [source.names[int(i)] for i in numbers]
    return FileSource(source.root, names, source.labels[numbers])
