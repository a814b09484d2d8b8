"""Which classes are taken for which, as tables that can be read on a small screen too."""

from typing import Any

from kmodels.runs.page.render import share

# More classes have no matrix, but the pairs that are confused most and the hardest classes.
MOST_CLASSES = 12
_SHOWN_PAIRS, _SHOWN_CLASSES = 15, 10
# Longer counts do not fit a cell of 25 pixels.
_LARGEST_COUNT = 999


def confusion(predictions: dict[str, Any]) -> dict[str, Any]:
    """Returns what the section of confusions shows.

    Args:
        predictions: predictions.json.

    Returns:
        `matrix` by class for few classes, `pairs` and `worst` for many.
    """
    classes = predictions["classes"]
    counts = {(label, said): count for label, said, count in predictions["confusions"]}
    sizes = [sum(counts.get((i, j), 0) for j in range(len(classes))) for i in range(len(classes))]
    few = len(classes) <= MOST_CLASSES
    percent = max(counts.values(), default=0) > _LARGEST_COUNT
    pairs = sorted(
        ((count, pair) for pair, count in counts.items() if pair[0] != pair[1]),
        key=lambda found: (-found[0], found[1]),
    )
    rights = [counts.get((i, i), 0) / size if size else 1.0 for i, size in enumerate(sizes)]
    hardest = sorted(range(len(classes)), key=rights.__getitem__)[:_SHOWN_CLASSES]
    return {
        "classes": classes,
        "percent": percent,
        "tall": max(map(len, classes), default=0) > 2,
        "matrix": [
            (name, [_cell(counts, sizes, classes, i, j, percent) for j in range(len(classes))])
            for i, name in enumerate(classes)
        ]
        if few
        else None,
        "pairs": [
            {"label": classes[i], "said": classes[j], "count": count, "of": sizes[i]}
            for count, (i, j) in pairs[: _SHOWN_PAIRS if not few else 5]
        ],
        "worst": [] if few else [{"name": classes[i], "share": rights[i]} for i in hardest],
    }


def _cell(
    counts: dict[tuple[int, int], int],
    sizes: list[int],
    classes: list[str],
    row: int,
    column: int,
    percent: bool,
) -> dict[str, Any]:
    count = counts.get((row, column), 0)
    part = count / sizes[row] if sizes[row] else 0.0
    kinds = ["strong"] if part > 0.55 else []
    if count and row != column:
        kinds.append("error")
    said = f"{count} of {sizes[row]} images of {classes[row]} ({share(part)})"
    return {
        "text": "" if not count else f"{100 * part:.0f}" if percent else str(count),
        "share": round(part, 3),
        "kind": " ".join(kinds),
        "title": f"{said} are taken for {classes[column]}",
    }
