"""predictions.json: what a classifier says of held-out images, for the page of a run."""

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

# Images of a group, and the longer side of one in pixels.
MOST_IMAGES, MOST_SIDE = 12, 128


def summary(part: str, source: Any, shares: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Returns confusions, and images of sure and unsure mistakes.

    Args:
        part: of the data, such as "test".
        source: a `kmodels.data` source of images.
        shares: (n, classes), the probabilities that the model gives.
        names: of the classes.

    Returns:
        Plain values: counts of (class, said class), and groups of images as data URLs.
    """
    labels, said = np.asarray(source.labels), shares.argmax(-1)
    confidence = shares.max(-1)
    wrong, right = np.flatnonzero(said != labels), np.flatnonzero(said == labels)
    wrong = wrong[np.argsort(-confidence[wrong], kind="stable")]
    right = right[np.argsort(confidence[right], kind="stable")]
    narrow = right[:MOST_IMAGES]
    if len(wrong) <= 2 * MOST_IMAGES:
        groups = [("all", wrong), ("narrow", narrow)]
    else:
        unsure = wrong[::-1][:MOST_IMAGES]
        groups = [("sure", wrong[:MOST_IMAGES]), ("unsure", unsure), ("narrow", narrow)]
    pairs, counts = np.unique(np.stack([labels, said], 1), axis=0, return_counts=True)
    return {
        "part": part,
        "samples": len(labels),
        "right": len(right),
        "classes": [str(name) for name in names],
        "confusions": np.concatenate([pairs, counts[:, None]], 1).tolist(),
        "groups": {
            kind: _images(source, chosen, shares, names) for kind, chosen in groups if len(chosen)
        },
    }


def _images(
    source: Any, chosen: np.ndarray, shares: np.ndarray, names: Sequence[str]
) -> list[dict[str, Any]]:
    images, labels = source.batch(chosen)
    found = []
    for image, label, row in zip(images, labels, shares[chosen], strict=True):
        second, first = np.argsort(row)[-2:] if len(row) > 1 else (0, 0)
        found.append(
            {
                **_image(np.asarray(image)),
                "label": str(names[label]),
                "said": str(names[first]),
                "second": str(names[second]),
                "confidence": round(float(row[first]), 4),
                "label_share": round(float(row[label]), 4),
            }
        )
    return found


def _image(pixels: np.ndarray) -> dict[str, Any]:
    from PIL import Image

    whole = np.clip(np.rint(pixels), 0, 255).astype("uint8")
    image = Image.fromarray(whole[..., 0] if whole.shape[-1] == 1 else whole[..., :3])
    image.thumbnail((MOST_SIDE, MOST_SIDE))
    # Photographs are smaller as JPEG, drawings and digits as PNG.
    kind = "JPEG" if image.mode == "RGB" and max(image.size) >= 64 else "PNG"
    held = io.BytesIO()
    image.save(held, kind, **({"quality": 85} if kind == "JPEG" else {}))
    data = base64.b64encode(held.getvalue()).decode()
    return {"image": f"data:image/{kind.lower()};base64,{data}", "side": max(image.size)}
