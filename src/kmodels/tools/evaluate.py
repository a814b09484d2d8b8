"""`kmodels eval`: a model of images on labelled ones, or a model of texts on lines of JSON."""

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from kmodels.core.errors import InputError, check_whole, pluralize
from kmodels.core.files import atomic_write, check_output, local_path
from kmodels.core.schema import read_json
from kmodels.runs import report
from kmodels.runs.console import plain
from kmodels.runs.run_folder import (
    MODEL,
    check_preprocessor,
    json_text,
    model_in,
    note_evaluation,
    run_at,
)
from kmodels.runs.settings import texts_of
from kmodels.runs.terminal import option, refuse_idle

if TYPE_CHECKING:
    import numpy as np  # not for `kmodels --help`

# Bins of equal width of the calibration error, as in Guo et al. 2017.
BINS = 15
# Folders of a whole data set, one of which holds the images to evaluate on.
PARTS = ("train", "training", "val", "valid", "validation", "test")
# Classes in the table, and unread files in an error.
SHOWN = 10
# Flags for images alone, and for texts alone.
OF_IMAGES = ("real_labels", "class_names", "templates", "reduce_labels")
OF_TEXTS = ("adapter", "before", "written_as", "stop", "max_new_tokens", "max_length")
_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})\.\w+")


class Labelled(NamedTuple):
    """Paths of images, the model's number of each one's class, and how folders became classes."""

    files: list[Path]
    labels: "np.ndarray"
    note: str


def run(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=MODEL)],
    data: Annotated[
        str,
        typer.Argument(
            help="Folder with a folder of images for each class, as ImageNet's; for segmenters "
            "with images/ and masks/, for detectors as COCO's; or a .jsonl file of prompts with "
            "choices, prompts with answers, texts, or queries with documents."
        ),
    ],
    real_labels: Annotated[
        Path | None,
        typer.Option(help="real.json of ReaL: the classes of each image of ImageNet's validation."),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="CSV file; of images with the columns of timm's validate.py."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Rows per batch; by default 32 images or 8 texts.")
    ] = None,
    precision: Annotated[str, typer.Option(help="float32, bfloat16 or mixed_*.")] = "float32",
    class_names: Annotated[
        str | None,
        option(
            "CLIP and SigLIP",
            "File with the name of each class, one per line, in the order of the folders; "
            "default: the names of the folders.",
        ),
    ] = None,
    templates: Annotated[
        str | None,
        option(
            "CLIP and SigLIP",
            "Texts with {} for a name, separated by |, or a file of one per line.",
        ),
    ] = None,
    reduce_labels: Annotated[
        bool,
        option(
            "Segmenters", "0 is unlabeled, and classes in files begin with 1.", "--reduce-labels"
        ),
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out unreadable images and bad lines.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with the results of each class or record.")
    ] = False,
    adapter: Annotated[
        str | None, option("Language models", "Directory with a LoRA adapter.")
    ] = None,
    before: Annotated[
        bool, option("Language models", "Also evaluate without the adapter.", "--before")
    ] = False,
    written_as: Annotated[
        str | None,
        option(
            "Language models",
            "Format of the prompts: chat (default with a chat template), instruction, or text.",
            "--as",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None, option("Language models", "Largest number of tokens per reply; default: 256.")
    ] = None,
    max_length: Annotated[
        int | None, option("Language models", "Tokens per row; default: the context length.")
    ] = None,
    stop: Annotated[
        list[str] | None, option("Language models", "Text that ends a reply; may be repeated.")
    ] = None,
) -> None:
    """Evaluate a model of images on labelled ones, or a model of texts on lines of JSON."""
    from kmodels import presets
    from kmodels.tools.evaluate_text import TextTask, models_of, table_of

    if batch_size is not None:
        check_whole("--batch-size", batch_size)
    if results is not None:
        check_output(
            "--results", results, inputs=(model, data, class_names, real_labels, templates)
        )
    console = plain(stderr=as_json, highlight=False)
    if Path(data).suffix.lower() in (".jsonl", ".json"):
        refuse_idle(context, OF_IMAGES, f"on the texts of {data}")
        most = 256 if max_new_tokens is None else max_new_tokens
        task = TextTask(data, skip_bad, written_as, most, stop or ())
        idle = [] if task.task == "exact_match" else ["max_new_tokens", "stop"]
        idle += ["written_as"] if task.task in ("perplexity", "retrieval") else []
        idle += ["adapter", "before", "max_length"] if task.task == "retrieval" else []
        refuse_idle(context, idle, f"on {task.task}")
        if task.task == "retrieval":
            found = _retrieval(task, model_in(model), data, precision, batch_size or 32)
        else:
            stages = models_of(model, adapter, before, precision)
            found = _texts(task, stages, batch_size or 8, max_length, console)
    else:
        refuse_idle(context, OF_TEXTS, f"on the images of {data}")
        path, size = model_in(model), batch_size or 32
        cls: Any = presets.class_of(path, whole=True)
        segments, detects = hasattr(cls, "segment"), hasattr(cls, "detect")
        idle = [] if hasattr(cls, "classify") else ["class_names", "templates"]
        idle += [] if segments else ["reduce_labels"]
        idle += ["real_labels", "skip_bad"] if segments or detects else []
        refuse_idle(context, idle, f"on a {cls.__name__}, which {path} holds")
        if segments:
            found = _pixels(path, cls, data, size, precision, reduce_labels, console)
        elif detects:
            found = _boxes(path, cls, data, size, precision, console)
        else:
            texts = (
                None if class_names is None else texts_of("--class-names", class_names),
                None if templates is None else texts_of("--templates", templates),
            )
            found = _images(
                path, cls, data, real_labels, texts, size, precision, skip_bad, console, as_json
            )
    facts = {"task": found.task, "records": found.records}
    rows = [
        {"model": model, "data": data, **facts, **({"stage": stage} if before else {}), **metrics}
        for stage, metrics in found.stages.items()
    ]
    if found.columns is None:
        console.print(table_of(found.stages, found.task, found.records))
    else:
        rows = [{"model": model, **found.columns}]
    # First, as a file may still be damaged or the disk full.
    if as_json:
        print(json_text({**rows[-1], **found.details}, ensure_ascii=False))
    if results is not None:
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        content = text.getvalue()
        atomic_write(local_path(results), lambda file: file.write_text(content, encoding="utf-8"))
    if adapter is None and (run := run_at(model)) is not None:
        note_evaluation(run, data, {**facts, **found.stages})
        if (run / report.NAME).is_file():
            report.write(run)


class Evaluated(NamedTuple):
    """The results of an evaluation.

    Attributes:
        task: its name.
        records: number of records.
        stages: metrics "after", and "before" if they are known.
        details: results of each class or record, for JSON.
        columns: those of the CSV file, if they are not the metrics.
    """

    task: str
    records: int
    stages: dict[str, dict[str, Any]]
    details: dict[str, Any]
    columns: dict[str, Any] | None = None


def _texts(
    task: Any, stages: Iterator[Any], batch_size: int, max_length: int | None, console: Any
) -> Evaluated:
    from kmodels.tools.likelihood import LanguageScorer

    if task.skipped:
        lines = pluralize(len(task.skipped), "bad line")
        console.print(f"{lines} left out, the first: {task.skipped[0]}")
    metrics, details = {}, {}
    for stage, lm in stages:
        scorer = LanguageScorer(lm, batch_size, max_length, progress=_track(console))
        metrics[stage], details["rows"] = task.evaluate(scorer)
    if "before" in metrics:
        details["before"] = metrics["before"]
    return Evaluated(task.task, len(task.rows), metrics, details)


def _retrieval(task: Any, path: str, data: str, precision: str, batch_size: int) -> Evaluated:
    from kmodels import presets

    cls: Any = presets.class_of(path, whole=True)
    if not hasattr(cls, "encode_query"):
        raise InputError(f"{path} holds a {cls.__name__}; give an embedder for {data}")
    metrics, rows = task.retrieve(_opened(path, cls, precision), batch_size)
    return Evaluated(task.task, len(task.rows), {"after": metrics}, {"rows": rows})


def _opened(path: str, cls: Any, precision: str) -> Any:
    model = cls.from_preset(path, dtype=precision)
    check_preprocessor(model, path)
    return model


def _pixels(
    path: str,
    cls: Any,
    data: str,
    batch_size: int,
    precision: str,
    reduce_labels: bool,
    console: Any,
) -> Evaluated:
    from kmodels.data import open_masks
    from kmodels.runs.results import measure_masks

    task = _opened(path, cls, precision)
    bundle = open_masks(
        f"folder:{local_path(data)}",
        validation_split=0.0,
        reduce_labels=reduce_labels,
        ignore_class=task.ignore_class,
    )
    # The part that nothing was trained on, if there are several.
    part = bundle.test or bundle.validation or bundle.train
    metrics = measure_masks(task, part, batch_size, _track(console))
    details = {"iou": metrics.pop("iou")}
    return Evaluated("segmentation", len(part), {"after": metrics}, details)


def _boxes(
    path: str, cls: Any, data: str, batch_size: int, precision: str, console: Any
) -> Evaluated:
    from kmodels.data import open_boxes
    from kmodels.runs.results import measure_boxes

    root = local_path(data)
    bundle = open_boxes(f"coco:{root}", validation_split=0.0)
    part = bundle.test or bundle.validation or bundle.train
    task = _opened(path, cls, precision)
    if task.class_names not in (None, bundle.class_names):
        raise InputError(
            f"{root} has the classes {', '.join(bundle.class_names[:SHOWN])}, and the model "
            f"{', '.join(task.class_names[:SHOWN])}; give data of the same classes"
        )
    metrics = measure_boxes(task, part, batch_size, _track(console))
    return Evaluated("detection", len(part), {"after": metrics}, {})


class _ByNames:
    """Two towers as a classifier of the names of folders.

    Args:
        root: holds a folder for each class, of which "_" stands for a blank.

    Raises:
        InputError: for another number of names than of folders.
    """

    def __init__(
        self, towers: Any, root: Path, names: list[str] | None, templates: list[str] | None
    ):
        self.towers, self.preprocessor = towers, towers.preprocessor.image_preprocessor
        self.image_size = towers.backbone.config.vision.image_shape[0]
        folders = [one for one in root.iterdir() if one.is_dir() and one.name[0] != "."]
        self.class_names = [one.name for one in sorted(folders, key=_natural)]
        self.num_classes = len(self.class_names)
        if names is not None and len(names) != self.num_classes:
            raise InputError(
                f"--class-names has {len(names)} names for {self.num_classes} folders in {root}; "
                "give one for each"
            )
        self.texts = names or [name.replace("_", " ") for name in self.class_names]
        self.templates = templates

    def class_name(self, number: int) -> str:
        """Returns the name of a folder."""
        return self.class_names[number]

    def predict(self, images: list[Any], batch_size: int, verbose: int) -> Any:
        """Returns the logits of images."""
        templates = {} if self.templates is None else {"templates": self.templates}
        return self.towers.classify(images, self.texts, batch_size=batch_size, **templates)

    def count_params(self) -> int:
        """Returns the number of weights."""
        return self.towers.count_params()


def _track(console: Any, total: int | None = None) -> Callable[[Any], Any]:
    """Returns a function that iterates over something and shows its progress."""
    from rich.progress import track

    options = {"console": console, "transient": True, "disable": not console.is_terminal}
    return lambda items: track(items, "evaluating", total, **options)


def _images(
    path: str,
    cls: Any,
    data: str,
    real_labels: Path | None,
    texts: tuple[list[str] | None, list[str] | None],
    batch_size: int,
    precision: str,
    skip_bad: bool,
    console: Any,
    as_json: bool,
) -> Evaluated:
    by_names = hasattr(cls, "classify")
    if not (hasattr(cls, "decode_predictions") or by_names):
        raise InputError(f"{path} holds a {cls.__name__}; give a model of images")
    root, classifier = local_path(data), _opened(path, cls, precision)
    if not root.is_dir():
        raise InputError(f"{root} is not a folder; give one with a folder of images for each class")
    if by_names:
        classifier = _ByNames(classifier, root, *texts)
    elif classifier.problem_type not in (None, "single_label_classification"):
        raise InputError(
            f"{path} is for {classifier.problem_type}; give a model that chooses one class"
        )
    elif not classifier.num_classes:
        raise InputError(f"{path} has no classes; give a model with a head")
    images = labelled(root, classifier)
    real = None if real_labels is None else read_real(local_path(real_labels), images.files)
    console.print(f"{len(images.files)} images, {images.note}")
    logits, bad = predicted(classifier, images.files, batch_size, skip_bad, console)
    kept = [number for number in range(len(images.files)) if number not in bad]
    if bad:
        console.print(f"{pluralize(len(bad), 'unreadable image')} left out")
    if real is not None:
        real = [real[number] for number in kept]
    found = scores(logits, images.labels[kept], real)
    if not as_json:
        _show(console, classifier, found)
    names = [classifier.class_name(number) for number in range(classifier.num_classes)]
    metrics = {name: found[name] for name in ("top1", "top5", "calibration_error")}
    details, columns = {**found, "classes": names}, columns_of(classifier, found)
    return Evaluated("image classification", found["images"], {"after": metrics}, details, columns)


def labelled(root: Path, classifier: Any) -> Labelled:
    """Returns the images below the folders of classes, in the order of their paths.

    Folders with the names of the model's classes are these. Otherwise there is one for each class,
    in natural order ("class10" after "class9"), as in timm.

    Raises:
        InputError: for folders that are not the model's classes, or without images.
    """
    import numpy as np

    from kmodels.data.images.decoding import suffixes

    folders = [one for one in root.iterdir() if one.is_dir() and not one.name.startswith(".")]
    if not folders:
        raise InputError(f"{root} has no folders; give one with a folder of images for each class")
    folders.sort(key=_natural)
    if all(one.name.lower() in PARTS for one in folders):
        raise InputError(f"{root} holds {folders[0].name}; give one of its parts, {folders[-1]}")
    names = classifier.class_names
    known = {} if names is None else {name: number for number, name in enumerate(names)}
    if all(one.name in known for one in folders):
        numbers = [known[one.name] for one in folders]
        note = f"{len(folders)} of {len(known)} classes by the names of folders"
    elif len(folders) == classifier.num_classes:
        numbers = list(range(len(folders)))
        first, last = (f"{folders[i].name} is {classifier.class_name(numbers[i])}" for i in (0, -1))
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

    Raises:
        InputError: for another file than real.json, or images that are not named
            ILSVRC2012_val_00000001.JPEG and so on.
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

    rest = iter(_track(console, len(files))(pictures()))
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


def columns_of(classifier: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the columns that timm's validate.py writes besides the model."""
    preprocessor = classifier.preprocessor
    by_names = isinstance(classifier, _ByNames)
    size = classifier.image_size if by_names else classifier.backbone.config.image_shape[0]
    whole = getattr(preprocessor, "resize_size", None) or size
    whole = whole if isinstance(whole, int) else whole[0]
    return {
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
