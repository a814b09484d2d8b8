"""Figures of a run: curves, predictions, probes, rows of images.

Matplotlib is a part of `kmodels[plots]` and is imported when a figure is drawn. If it is missing,
one line reports that figures are left out.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kmodels.core import processes
from kmodels.core.errors import InputError, one_line
from kmodels.core.files import atomic_write
from kmodels.runs import console

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "captions",
    "confusion",
    "curves",
    "installed",
    "masks",
    "predictions",
    "probe",
    "rows",
    "spread",
]

EXTRA = "pip install 'kmodels[plots]'"
_INK = "#333333"
_TRAIN, _HELD_OUT, _WRONG = "#4477aa", "#cc6677", "#bb3333"


def installed() -> bool:
    """Returns True if figures can be drawn."""
    return find_spec("matplotlib") is not None


def _drawn(draw: Callable[..., None]) -> Callable[..., None]:
    """Leaves a figure out if Matplotlib is not installed, or cannot draw it."""

    @wraps(draw)
    def run(path: str | Path, *arguments: Any) -> None:
        if installed():
            try:
                with as_written(arguments):
                    draw(path, *arguments)
            except InputError:  # the file cannot be written
                raise
            except Exception as error:  # A figure costs no trained model.
                console.say(f"no figure {Path(path).name}: {one_line(error)}")
        elif processes.is_rank_zero():
            _say_left_out()

    return run


@cache
def _say_left_out() -> None:
    print(f"no figures: Matplotlib is not installed; {EXTRA}")


@contextmanager
def as_written(shown: object) -> Iterator[None]:
    """Draws texts in any script, and "$" as a plain character.

    Args:
        shown: values of the figure; strings in lists, tuples and dictionaries count.
    """
    from matplotlib import rc_context

    families, missing = _fonts("".join(sorted({c for text in _texts(shown) for c in text})))
    if missing and processes.is_rank_zero():
        _say_missing(missing)
    settings: dict[Any, Any] = {"font.family": list(families), "text.parse_math": False}
    with rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


def _texts(shown: object) -> Iterator[str]:
    if isinstance(shown, str):
        yield shown
    elif isinstance(shown, Mapping):
        yield from _texts([*shown.keys(), *shown.values()])
    elif isinstance(shown, list | tuple):
        for part in shown:
            yield from _texts(part)


@cache
def _fonts(characters: str) -> tuple[tuple[str, ...], str]:
    """Returns families of installed fonts with the characters, and characters of no font."""
    from matplotlib.font_manager import fontManager, get_font

    def has(font: Any) -> set[str]:
        return set(map(chr, get_font(font.fname).get_charmap()))

    # Matplotlib's own font comes first; its last resort has a box for every character.
    plain = [
        font
        for font in fontManager.ttflist
        if (font.style, font.weight) == ("normal", 400) and "Last Resort" not in font.name
    ]
    plain.sort(key=lambda font: (font.name != "DejaVu Sans", font.name))
    families, missing = ["DejaVu Sans"], {c for c in characters if c.isprintable()}
    for font in plain:
        if not missing:
            break
        if covered := missing & has(font):
            families.append(font.name)
            missing -= covered
    return tuple(dict.fromkeys(families)), "".join(sorted(missing))


@cache
def _say_missing(characters: str) -> None:
    print(
        f"figures have boxes for {characters[:20]}: no installed font has them; install a font of "
        "that script, such as one of Noto"
    )


@_drawn
def curves(path: str | Path, rows: Sequence[dict[str, Any]], metric: str = "accuracy") -> None:
    """Draws the loss by step, and loss and a metric by epoch.

    Args:
        path: the file to write.
        rows: as `History.rows`.
        metric: name of the metric in the rows.
    """
    figure, (left, right) = _figure(1, 2, (10, 4))
    steps = [row for row in rows if row["row"] == "step"]
    epochs = [row for row in rows if row["row"] == "epoch"]
    left.plot(
        [r["step"] for r in steps], [r["loss"] for r in steps], color=_TRAIN, alpha=0.35, lw=0.8
    )
    _line(left, epochs, "loss", "training", _TRAIN)
    _line(left, epochs, "val_loss", "validation", _HELD_OUT)
    _line(right, epochs, metric, "training", _TRAIN)
    _line(right, epochs, f"val_{metric}", "validation", _HELD_OUT)
    for axes, name in ((left, "loss"), (right, metric.replace("_", " "))):
        axes.set(xlabel="step", ylabel=name)
        axes.grid(alpha=0.25)
        axes.set_xlim(left=0)  # a run of one epoch is a point at its end
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
    _save(figure, path)


@_drawn
def predictions(
    path: str | Path,
    images: Sequence[np.ndarray],
    labels: np.ndarray,
    probabilities: np.ndarray,
    names: Sequence[str],
) -> None:
    """Draws held-out images with predictions; wrong ones in red, with the label.

    Args:
        path: the file to write.
        images: n of (H, W, C), values from 0 to 1.
        labels: int (n,).
        probabilities: (n, classes).
        names: of the classes.
    """
    predicted = [int(np.argmax(shares)) for shares in probabilities]
    texts = [
        f"{names[i]} {100 * shares[i]:.0f} %"
        for i, shares in zip(predicted, probabilities, strict=True)
    ]
    right: list[str | None] = [
        None if i == label else names[int(label)]
        for i, label in zip(predicted, labels, strict=True)
    ]
    _pictures(path, images, texts, right)


@_drawn
def captions(
    path: str | Path, images: Sequence[np.ndarray], texts: Sequence[str], expected: Sequence[str]
) -> None:
    """Draws held-out images with generated texts; wrong ones as in `predictions`.

    Args:
        path: the file to write.
        images: n of (H, W, C), values from 0 to 1.
        texts: n generated texts.
        expected: n texts.
    """
    right = [
        None if ours == theirs else theirs for ours, theirs in zip(texts, expected, strict=True)
    ]
    _pictures(path, images, [text[:24] for text in texts], right)


def _pictures(
    path: str | Path,
    images: Sequence[np.ndarray],
    texts: Sequence[str],
    right: Sequence[str | None],
) -> None:
    """Draws images below their texts; a wrong text is red, with the right one."""
    columns = min(8, len(images))
    rows = -(-len(images) // columns)
    figure, axes = _figure(rows, columns, (1.7 * columns, 2.0 * rows))
    for axis in np.ravel(axes):
        _hide(axis)
    for axis, image, text, instead in zip(np.ravel(axes), images, texts, right, strict=False):
        grey = image.shape[-1] == 1
        axis.imshow(image[..., 0] if grey else image, cmap="gray" if grey else None, vmin=0, vmax=1)
        text += "" if instead is None else f"\nis {instead[:24]}"
        axis.set_title(text, fontsize=8, color=_INK if instead is None else _WRONG)
    _save(figure, path)


@_drawn
def masks(
    path: str | Path,
    images: Sequence[np.ndarray],
    truth: Sequence[np.ndarray],
    predicted: Sequence[np.ndarray],
    names: Sequence[str],
) -> None:
    """Draws images with their masks and predicted masks, with a color for each class.

    Args:
        path: the file to write.
        images: n of (H, W, C), values from 0 to 1.
        truth: n masks (H, W); pixels without a class are white.
        predicted: n masks (H, W).
        names: of the classes.
    """
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    palette = colormaps["tab20" if len(names) > 10 else "tab10"]
    colors = np.array([palette(i % palette.N)[:3] for i in range(len(names))] + [(1.0, 1.0, 1.0)])

    def painted(mask: np.ndarray) -> np.ndarray:
        known = (mask >= 0) & (mask < len(names))
        return colors[np.where(known, mask, len(names))]

    across = min(2, len(images))
    down = -(-len(images) // across)
    figure, axes = _figure(down, 3 * across, (4.8 * across, 1.7 * down + 0.6))
    axes = np.reshape(axes, (-1, 3))
    for axis in axes.flat:
        _hide(axis)
    for row, image, mask, prediction in zip(axes, images, truth, predicted, strict=False):
        shown = np.repeat(image, 3, -1) if image.shape[-1] == 1 else image
        parts = {"image": shown, "truth": painted(mask), "prediction": painted(prediction)}
        for axis, (title, pixels) in zip(row, parts.items(), strict=True):
            axis.imshow(pixels, vmin=0, vmax=1, interpolation="nearest")
            axis.set_title(title, fontsize=8, color=_INK)
    if len(names) <= 20:
        keys = [
            Patch(color=color, label=str(name)) for color, name in zip(colors, names, strict=False)
        ]
        figure.legend(handles=keys, loc="outside lower center", ncols=7, frameon=False, fontsize=8)
    _save(figure, path)


@_drawn
def boxes(
    path: str | Path,
    images: Sequence[np.ndarray],
    truth: Sequence[Mapping[str, np.ndarray]],
    predicted: Sequence[Mapping[str, np.ndarray]],
    names: Sequence[str],
) -> None:
    """Draws images with the boxes of their objects, and again with predicted boxes.

    Args:
        path: the file to write.
        images: n of (H, W, C), values from 0 to 1.
        truth: n of "boxes" (T, 4), corners in pixels, and "labels" (T,).
        predicted: the same.
        names: of the classes.
    """
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    palette = colormaps["tab20" if len(names) > 10 else "tab10"]
    across = min(4, len(images))
    down = -(-len(images) // across)
    figure, axes = _figure(down, 2 * across, (3.4 * across, 1.9 * down))
    axes = np.reshape(axes, (-1, 2))
    for axis in axes.flat:
        _hide(axis)
    for row, image, *both in zip(axes, images, truth, predicted, strict=False):
        shown = np.repeat(image, 3, -1) if image.shape[-1] == 1 else image
        for axis, title, objects in zip(row, ("truth", "prediction"), both, strict=True):
            axis.imshow(shown, vmin=0, vmax=1, interpolation="nearest")
            axis.set_title(title, fontsize=8, color=_INK)
            for (left, top, right, bottom), label in zip(
                np.asarray(objects["boxes"]).tolist(), objects["labels"], strict=True
            ):
                color, place = palette(label % palette.N), (left - 0.5, top - 0.5)
                frame = Rectangle(place, right - left, bottom - top, fill=False, color=color)
                axis.add_patch(frame)
                axis.text(*place, str(names[label]), fontsize=6, color=color, va="bottom")
    _save(figure, path)


@_drawn
def confusion(
    path: str | Path, labels: np.ndarray, predicted: np.ndarray, names: Sequence[str]
) -> None:
    """Draws the confusion matrix.

    Args:
        path: the file to write.
        labels: int (n,).
        predicted: int (n,), predicted classes.
        names: of the classes.
    """
    matrix = np.zeros((len(names), len(names)), int)
    np.add.at(matrix, (labels, predicted), 1)
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    side = float(np.clip(0.5 * len(names), 4, 14))
    figure, axes = _figure(1, 1, (side + 1, side))
    shown = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(shown, ax=axes, fraction=0.046)
    axes.set(xlabel="predicted", ylabel="true")
    if len(names) <= 30:
        axes.set_xticks(range(len(names)), names)
        if max(map(len, map(str, names))) > 3:
            plain = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
            axes.set_xticks(range(len(names)), names, **plain)
        axes.set_yticks(range(len(names)), names)
    if len(names) <= 20:
        for row, column in np.argwhere(matrix):
            light = shares[row, column] > 0.5
            axes.text(
                column,
                row,
                str(matrix[row, column]),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if light else _INK,
            )
    _save(figure, path)


@_drawn
def probe(
    path: str | Path,
    scores: dict[str, float],
    features: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
) -> None:
    """Draws the accuracy of each use of the features, and the features of each class.

    Args:
        path: the file to write.
        scores: accuracy by way.
        features: (n, D) of held-out images; the first two principal components of the normalized
            features are drawn.
        labels: int (n,).
        names: of the classes.
    """
    figure, (left, right) = _figure(1, 2, (11, 4.5))
    bars = left.barh(list(scores), list(scores.values()), color=_TRAIN)
    left.bar_label(bars, fmt="%.3f", padding=3, color=_INK)
    left.invert_yaxis()
    left.set(xlabel="accuracy", xlim=(0, 1.12))
    across = principal_components(features)
    shown = right.scatter(*across.T, c=labels, cmap="tab10" if len(names) <= 10 else "turbo", s=12)
    right.set(xlabel="first principal component", ylabel="second", xticks=[], yticks=[])
    if len(names) <= 20:
        handles, _ = shown.legend_elements(num=None if len(names) <= 10 else len(names))
        classes = [str(names[i]) for i in np.unique(labels)]
        if len(handles) == len(classes):
            right.legend(handles, classes, frameon=False, fontsize=8, bbox_to_anchor=(1, 1))
    _save(figure, path)


@_drawn
def rows(path: str | Path, images: dict[str, np.ndarray]) -> None:
    """Draws images in rows, with a column for each image.

    Args:
        path: the file to write.
        images: by the name of the row (n, H, W, C), values from 0 to 1.
    """
    number = len(next(iter(images.values())))
    figure, axes = _figure(len(images), number, (number, 1.1 * len(images)))
    for line, (name, row) in zip(np.reshape(axes, (-1, number)), images.items(), strict=True):
        for place, image in zip(line, row, strict=True):
            place.imshow(
                image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=1
            )
            place.set(xticks=[], yticks=[])
        line[0].set_ylabel(name, fontsize=8)
    _save(figure, path)


def _figure(rows: int, columns: int, size: tuple[float, float]) -> Any:
    # Without pyplot there is no global state and no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns)


def _hide(axes: "Axes") -> None:
    """Leaves out the axes; of ticks that are only not drawn, the layout is computed."""
    axes.set(xticks=[], yticks=[])
    axes.set_axis_off()


def _line(axes: "Axes", epochs: Sequence[dict[str, Any]], key: str, label: str, color: str) -> None:
    points = [(row["step"], row[key]) for row in epochs if key in row]
    if points:
        axes.plot(*zip(*points, strict=True), color=color, label=label, marker=".", ms=6)


def _save(figure: "Figure", path: str | Path) -> None:
    if processes.is_rank_zero():
        atomic_write(path, lambda temporary: figure.savefig(temporary, dpi=120, format="png"))


def principal_components(features: np.ndarray) -> np.ndarray:
    """Returns float64 (n, 2), the first two principal components of normalized features (n, D)."""
    x = features.astype("float64")
    unit = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    centred = unit - unit.mean(0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    return centred @ axes[:2].T


def spread(count: int, most: int) -> np.ndarray:
    """Returns evenly spaced indices of `count` items, at most `most`."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).astype(int))
