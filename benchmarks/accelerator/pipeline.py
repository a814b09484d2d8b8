"""Pictures per second from JPEG files into `fit`, and how long its steps wait for them."""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from accelerator import clock
from accelerator.pieces import SMALL
from accelerator.vit import kmodels_fit, shape_of


def write_files(folder: Path, count: int) -> None:
    import data  # benchmarks/data.py

    data.SIDE = 32 if SMALL else 256
    pictures, labels = data.jpegs(count)
    for number, (content, label) in enumerate(zip(pictures, labels, strict=True)):
        path = folder / "train" / f"c{label}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def run(settings: dict[str, Any]) -> clock.Parts:
    """Yields a row per number of workers, beside arrays that are there already."""
    from kmodels.data import ImageLoader, open_dataset
    from kmodels.data.pipeline.kinds import pipeline

    batch, count = settings["batch"], settings["images"]
    shape = shape_of(settings["preset"]).image_shape
    images, labels = np.zeros((count, *shape), "float32"), np.zeros(count, "int32")
    model, arrays = kmodels_fit(settings["preset"], images, labels, batch)
    clock.wait(arrays())
    begun = time.perf_counter()
    clock.wait(arrays())
    seconds = time.perf_counter() - begun
    case = f"{settings['preset']} x{batch}"
    row: dict[str, Any] = {"case": case, "system": "kmodels, arrays"}
    row |= {"median_ms": round(1e3 * seconds * batch / count, 3)}
    yield {"rows": [row | {"images_per_s": round(count / seconds, 1)}]}
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), count)
        opened = open_dataset(f"folder:{folder}", validation_split=0.0, image_size=shape[:2])
        for workers in (0,) if SMALL else (0, 4, max(4, (os.cpu_count() or 4) - 2)):
            loader = ImageLoader(opened.train, batch, image_size=shape[:2], workers=workers)
            feed = None
            for _ in range(2):  # the first epoch starts the workers
                feed = pipeline(loader)
                begun = time.perf_counter()
                clock.wait(model.fit(feed, verbose=0))
                seconds = time.perf_counter() - begun
            loader.close()
            row = {"case": case, "system": f"kmodels, JPEG, {workers} workers"}
            row |= {"median_ms": round(1e3 * seconds * batch / count, 3)}
            row |= {"images_per_s": round(count / seconds, 1)}
            row |= {"wait_share": round(feed.clock.share, 3) if feed else None}
            yield {"rows": [row]}
