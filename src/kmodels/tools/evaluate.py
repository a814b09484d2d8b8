"""`kmodels eval`: the accuracy of an image classifier on labelled images."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from kmodels.core.errors import InputError, check_whole, pluralize
from kmodels.core.files import atomic_write, local_path
from kmodels.core.schema import read_json
from kmodels.runs.run_folder import MODEL, check_preprocessor, model_in

if TYPE_CHECKING:
    import numpy as np  # not for `kmodels --help`

# Bins of equal width of the calibration error, as in Guo et al. 2017.
BINS = 15
# Folders of a whole data set, one of which holds the images to evaluate on.
PARTS = ("train", "training", "val", "valid", "validation", "test")
# Classes in the table, and unread files in an error.
SHOWN = 10
_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})\.\w+")


class Labelled(NamedTuple):
    """Images and their classes.

    Attributes:
        files: paths of the images.
        labels: int (n,), the model's number of each image's class.
        note: how folders became classes.
    """

    files: list[Path]
    labels: "np.ndarray"
    note: str


def run(
    model: Annotated[str, typer.Argument(help=MODEL)],
    data: Annotated[
        Path, typer.Argument(help="Folder with a folder of images for each class, as ImageNet's.")
    ],
    real_labels: Annotated[
        Path | None,
        typer.Option(help="real.json of ReaL: the classes of each image of ImageNet's validation."),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="CSV file with the columns of timm's validate.py.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images per batch.")] = 32,
    precision: Annotated[str, typer.Option(help="float32, bfloat16 or mixed_*.")] = "float32",
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out unreadable images.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with all classes and their confusions.")
    ] = False,
) -> None:
    """Evaluate an image classifier: top-1, top-5, calibration, accuracy of each class."""
    from rich.console import Console

    from kmodels import presets

    check_whole("--batch-size", batch_size)
    path = model_in(model)
    cls: Any = presets.class_of(path, whole=True)
    if not hasattr(cls, "decode_predictions"):
        raise InputError(f"{path} holds a {cls.__name__}; give an image classifier")
    classifier = cls.from_preset(path, dtype=precision)
    _check(classifier, path)
    images = labelled(local_path(data), classifier)
    real = None if real_labels is None else read_real(local_path(real_labels), images.files)
    console = Console(stderr=as_json, markup=False, emoji=False, highlight=False)
    console.print(f"{len(images.files)} images, {images.note}")
    logits, bad = predicted(classifier, images.files, batch_size, skip_bad, console)
    kept = [number for number in range(len(images.files)) if number not in bad]
    if bad:
        console.print(f"{pluralize(len(bad), 'unreadable image')} left out")
    if real is not None:
        real = [real[number] for number in kept]
    found = scores(logits, images.labels[kept], real)
    row = as_row(model, classifier, found)
    if results is not None:
        text = io.StringIO()
        writer = csv.DictWriter(text, row, lineterminator="\n")
        writer.writeheader()
        writer.writerow(row)
        content = text.getvalue()
        atomic_write(local_path(results), lambda file: file.write_text(content, encoding="utf-8"))
    if as_json:
        names = [classifier.class_name(number) for number in range(classifier.num_classes)]
        print(json.dumps({**row, **found, "classes": names}, indent=1, ensure_ascii=False))
    else:
        _show(console, classifier, found)


def _check(classifier: Any, path: str) -> None:
    if classifier.problem_type not in (None, "single_label_classification"):
        raise InputError(
            f"{path} is for {classifier.problem_type}; give a model that chooses one class"
        )
    if not classifier.num_classes:
        raise InputError(f"{path} has no classes; give a model with a head")
    check_preprocessor(classifier, path)


def labelled(root: Path, classifier: Any) -> Labelled:
    """Returns the images below the folders of classes, in the order of their paths.

    Folders with the names of the model's classes are these. Otherwise there is one for each class,
    in natural order ("class10" after "class9"), as in timm.

    Args:
        root: holds a folder for each class.
        classifier: the model.

    Raises:
        InputError: for folders that are not the model's classes, or without images.
    """
    import numpy as np

    from kmodels.data.images.decoding import suffixes

    if not root.is_dir():
        raise InputError(f"{root} is not a folder; give one with a folder of images for each class")
    folders = [one for one in root.iterdir() if one.is_dir() and not one.name.startswith(".")]
    folders.sort(key=_natural)
    if folders and all(one.name.lower() in PARTS for one in folders):
        raise InputError(f"{root} holds {folders[0].name}; give one of its parts, {folders[-1]}")
    names = classifier.class_names
    known = {} if names is None else {name: number for number, name in enumerate(names)}
    if folders and all(one.name in known for one in folders):
        numbers = [known[one.name] for one in folders]
        note = f"{len(folders)} of {len(known)} classes by the names of folders"
    elif len(folders) == classifier.num_classes:
        numbers = list(range(len(folders)))
        first, last = (f"{folders[i].name} is {classifier.class_name(i)}" for i in (0, -1))
        note = f"classes in the order of the folders: {first}, {last}"
    else:
        other = next((one.name for one in folders if one.name not in known), "none")
        raise InputError(
            f"{root} has {pluralize(len(folders), 'folder')}, such as {other}, and the model "
            f"{classifier.num_classes} classes, such as {classifier.class_name(0)}; name the "
            "folders as the classes, or give one for each class"
        )
    files, labels, others = list[Path](), list[int](), Counter[str]()
    for folder, number in zip(folders, numbers, strict=True):
        below = sorted(file for file in folder.rglob("*") if file.is_file())
        found = [file for file in below if file.suffix.lower() in suffixes()]
        others.update(file.suffix or file.name for file in {*below} - {*found})
        files += found
        labels += [number] * len(found)
    if not files:
        raise InputError(f"{root} holds no images that Pillow reads; give other folders")
    if others:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common(SHOWN))
        note += f"; other files are left out ({kinds})"
    return Labelled(files, np.array(labels), note)


def _natural(folder: Path) -> tuple[list[Any], str]:
    parts = re.split(r"([0-9]+)", folder.name)  # numbers are in every second place
    return [int(x) if place % 2 else x for place, x in enumerate(parts)], folder.name


def read_real(path: Path, files: Sequence[Path]) -> list[set[int]]:
    """Returns the classes of each image by ReaL (https://arxiv.org/abs/2006.07159); often several.

    Args:
        path: path of real.json, a list with the classes of each image of ImageNet's validation set.
        files: images named ILSVRC2012_val_00000001.JPEG and so on.

    Raises:
        InputError: for another file, or images with other names or numbers.
    """
    found = read_json(path, [[int]])
    real = []
    for file in files:
        match = _NUMBER.fullmatch(file.name)
        number = int(match[1]) if match else 0
        if not 1 <= number <= len(found):
            raise InputError(
                f"{file.name} is not one of the {len(found)} images of {path}, which are named "
                "ILSVRC2012_val_00000001.JPEG and so on; leave --real-labels out"
            )
        real.append(set(found[number - 1]))
    if not any(real):
        raise InputError(f"{path} has no class for any of these images; leave --real-labels out")
    return real


def predicted(
    classifier: Any, files: Sequence[Path], batch_size: int, skip_bad: bool, console: Any
) -> "tuple[np.ndarray, set[int]]":
    """Returns the logits (n, classes) in float32, and the numbers of unreadable images.

    Raises:
        InputError: for an unreadable image, unless `skip_bad`; with it if no image is readable.
    """
    import numpy as np
    from rich.progress import track

    from kmodels.data.images.any_picture import open_picture

    bad: set[int] = set()

    def pictures() -> "Iterator[np.ndarray]":
        for number, file in enumerate(files):
            try:
                yield open_picture(file)
            except InputError as error:
                if not skip_bad:
                    raise InputError(f"{error}, or give --skip-bad") from None
                bad.add(number)

    shown = {"console": console, "transient": True, "disable": not console.is_terminal}
    rest = iter(track(pictures(), "evaluating", len(files), **shown))
    parts = []
    while batch := list(islice(rest, batch_size)):
        # A shorter batch would be compiled again.
        filled = [*batch, *[batch[-1]] * (batch_size - len(batch))]
        outputs = classifier.predict(filled, batch_size=batch_size, verbose=0)
        parts.append(np.asarray(outputs, "float32")[: len(batch)])
    if not parts:
        raise InputError(f"none of {pluralize(len(files), 'image')} can be read; give others")
    return np.concatenate(parts), bad


def scores(
    logits: "np.ndarray", labels: "np.ndarray", real: Sequence[set[int]] | None = None
) -> dict[str, Any]:
    """Returns the accuracy, calibration error and confusions of logits.

    Args:
        logits: (n, C).
        labels: int (n,).
        real: the classes of each image by ReaL; images without one do not count for accuracy then.

    Returns:
        top1 and top5 in percent; images, those that count; by `labels` alone calibration_error, the
        mean distance of confidence and accuracy in `BINS` bins, `per_class`, (class, images,
        correct ones), and `confusions`, (class, prediction, images) of those that occur.
    """
    import numpy as np

    wide = logits.astype("float64")
    best = np.argsort(-wide, axis=1, kind="stable")[:, :5]
    accepted = [{label} for label in labels.tolist()] if real is None else real
    counted = [number for number, classes in enumerate(accepted) if classes]
    hits = np.array([[x in accepted[number] for x in best[number].tolist()] for number in counted])
    shares = np.exp(wide - wide.max(1, keepdims=True))
    confidence = (shares / shares.sum(1, keepdims=True)).max(1)
    right = best[:, 0] == labels
    bins = np.minimum(np.ceil(confidence * BINS).astype(int) - 1, BINS - 1)
    gaps = np.abs(np.bincount(bins, right - confidence, BINS))
    pairs, counts = np.unique(np.stack([labels, best[:, 0]], 1), axis=0, return_counts=True)
    classes = np.unique(labels)
    return {
        "images": len(counted),
        "top1": 100 * float(hits[:, 0].mean()),
        "top5": 100 * float(hits.any(1).mean()),
        "calibration_error": float(gaps.sum() / len(labels)),
        "per_class": [
            (int(x), int((labels == x).sum()), int(right[labels == x].sum())) for x in classes
        ],
        "confusions": [
            (*pair, count) for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True)
        ],
    }


def as_row(model: str, classifier: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the columns that timm's validate.py writes."""
    preprocessor = classifier.preprocessor
    size = classifier.backbone.config.image_shape[0]
    whole = getattr(preprocessor, "resize_size", None) or size
    whole = whole if isinstance(whole, int) else whole[0]
    return {
        "model": model,
        "top1": round(found["top1"], 4),
        "top1_err": round(100 - found["top1"], 4),
        "top5": round(found["top5"], 4),
        "top5_err": round(100 - found["top5"], 4),
        "param_count": round(classifier.count_params() / 1e6, 2),
        "img_size": size,
        "crop_pct": round(size / whole, 4),
        "interpolation": preprocessor.interpolation,
    }


def _show(console: Any, classifier: Any, found: dict[str, Any]) -> None:
    from rich.table import Table

    console.print(
        f"top-1 {found['top1']:.2f} %, top-5 {found['top5']:.2f} %, calibration error "
        f"{found['calibration_error']:.3f} on {pluralize(found['images'], 'image')}"
    )
    worst = sorted(found["per_class"], key=lambda row: row[2] / row[1])[:SHOWN]
    mistakes = [row for row in found["confusions"] if row[0] != row[1]]
    table = Table("class", "images", "correct", "most often taken for", title="lowest accuracy")
    for label, images, correct in worst:
        own = [row for row in mistakes if row[0] == label]
        other = max(own, key=lambda row: row[2])[1] if own else None
        table.add_row(
            classifier.class_name(label),
            str(images),
            f"{correct / images:.1%}",
            "" if other is None else classifier.class_name(other),
        )
    console.print(table)
