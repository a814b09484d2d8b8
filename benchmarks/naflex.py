"""What do images of free shapes save of a ViT's training step, packed into rows of patches?

    python benchmarks/naflex.py [--data folder:PATH] [--backends torch,jax,tensorflow] [--write]

A small ViT classifier trains through `fit` on the same images in three ways: `square`, each
resized to one square of `--patches` patches; `padded`, each in its own shape in a row of so many;
`packed`, several of them in each row. Images have sides from 64 to 512 pixels, drawn evenly on a
logarithmic scale with aspect ratios from 1/2 to 2, or are those of `--data`; small ones are not
enlarged. `drawn` is the same with sizes drawn in training, from a quarter of the patches on.
FLOPs are counted from the shapes of the arrays, two for a multiplication and an addition,
attention over whole rows as it is computed, and per image; `flops_saved` is the share that
packing saves, and `time_ratio` is the step time over that of `packed`. The ways go in turns
within one process per backend, on one thread; times are medians of process CPU time per step.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import record

SIZES: dict[str, Any] = {
    "patch_size": 16,
    "num_layers": 2,
    "num_heads": 6,
    "hidden_dim": 384,
    "mlp_dim": 1536,
}


def flops(tokens: int, rows: int) -> int:
    """Counts the forward pass of so many rows of tokens."""
    width, mlp, patch = SIZES["hidden_dim"], SIZES["mlp_dim"], 3 * SIZES["patch_size"] ** 2
    dense = 8 * width**2 + 4 * width * mlp
    attention = 4 * tokens * width
    return rows * tokens * (2 * patch * width + SIZES["num_layers"] * (dense + attention))


def drawn_images(count: int) -> Any:
    """Returns a source of images of random sizes."""
    import numpy as np

    class Source:
        labels = (np.arange(count) % 10).astype("int32")

        def __len__(self) -> int:
            return count

        def batch(self, indices: Any) -> tuple[list, Any]:
            found = []
            for i in indices:
                draw = np.random.default_rng(int(i))
                side, ratio = 64 * 8 ** draw.random(), 2 ** (draw.random() - 0.5)
                shape = (max(round(side / ratio), 1), max(round(side * ratio), 1), 3)
                found.append(draw.integers(0, 256, shape, dtype="uint8"))
            return found, self.labels[indices]

    return Source()


def measure(settings: dict) -> dict:
    """Measures the ways in turns."""
    import keras
    import numpy as np

    from kmodels.data import ImageLoader, NaFlexLoader, open_dataset
    from kmodels.models import (
        NaFlexViTBackbone,
        NaFlexViTImageClassifier,
        ViTBackbone,
        ViTImageClassifier,
    )

    most, batch = settings["patches"], settings["batch"]
    side = math.isqrt(most) * SIZES["patch_size"]
    source = drawn_images(batch * settings["steps"])
    if settings["data"]:
        source = open_dataset(settings["data"], image_size=(side, side)).train
    given = {"max_num_patches": most, "shuffle": True, "drop_last": True}
    packs = {**given, "row_length": most}
    alone = {**given, "row_length": most, "rows": batch, "images_per_row": 1}
    fewer = {"min_num_patches": most // 4}
    loaders: dict[str, Any] = {
        "square": ImageLoader(
            source, batch, image_size=(side, side), shuffle=True, drop_last=True, mean=0.5, std=0.5
        ),
        "padded": NaFlexLoader(source, batch, **alone),
        "packed": NaFlexLoader(source, batch, **packs),
        "padded, drawn": NaFlexLoader(source, batch, **alone, **fewer),
        "packed, drawn": NaFlexLoader(source, batch, **packs, **fewer),
    }
    keras.utils.set_random_seed(0)
    square = ViTBackbone((side, side, 3), use_class_token=False, **SIZES)
    free = NaFlexViTBackbone((side, side, 3), **SIZES)
    models = {name: NaFlexViTImageClassifier(free, 10) for name in loaders}
    models["square"] = ViTImageClassifier(square, 10, pooling="gap")
    batches, filled, counted = {}, {}, {}
    for name, loader in loaders.items():
        models[name].compile(keras.optimizers.SGD(1e-3), LOSS)
        batches[name] = [loader[i] for i in range(min(settings["steps"], len(loader)))]
        rows, length = batch, most
        if name != "square":
            rows, length = batches[name][0][0]["pixel_values"].shape[:2]
            grids = np.stack([x["spatial_shapes"] for x, *_ in batches[name]])
            filled[name] = float(grids.prod(-1).sum() / (len(grids) * rows * length))
        counted[name] = flops(length, rows) / batch
    times: dict[str, list[float]] = {name: [] for name in loaders}
    for turn in range(settings["rounds"] + 1):
        for name, held in batches.items():
            for step in held if turn else held[:2]:
                begun = time.process_time()
                models[name].train_on_batch(*step)
                if turn:  # the first one compiles
                    times[name].append(time.process_time() - begun)
    medians = {name: statistics.median(x) for name, x in times.items()}
    return {
        "backend": keras.backend.backend(),
        "images": len(source),
        "rows": {name: int(loader.batch_size) for name, loader in loaders.items()},
        "filled": {name: round(x, 4) for name, x in filled.items()},
        "gflops_per_image": {name: round(x / 1e9, 4) for name, x in counted.items()},
        "flops_saved": {
            name: round(1 - counted[by(name)] / x, 4) for name, x in counted.items() if by(name)
        },
        "step_s": {name: round(x, 4) for name, x in medians.items()},
        "time_ratio": {
            name: round(x / medians[by(name)], 3) for name, x in medians.items() if by(name)
        },
    }


LOSS = "sparse_categorical_crossentropy"


def by(name: str) -> str:
    """Returns the packed way that a way is compared with; empty for one of them."""
    if name.startswith("packed"):
        return ""
    return "packed, drawn" if name.endswith("drawn") else "packed"


def main() -> None:
    parser = record.flags(__doc__)
    parser.add_argument("--data", default="", help="as `open_dataset` takes it")
    parser.add_argument("--backends", default="torch,jax,tensorflow")
    parser.add_argument("--patches", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(json.loads(options.child))))
        return
    names = ("data", "patches", "batch", "steps", "rounds")
    settings = {name: getattr(options, name) for name in names}
    rows = []
    for backend in options.backends.split(","):
        rows.append(record.child(__file__, backend, "--child", json.dumps(settings)))
        print(json.dumps(rows[-1]), flush=True)
    if options.write:
        backends = options.backends.split(",")
        kind, _, place = options.data.partition(":")
        shown = f"{kind}:{Path(place).name}" if place else "drawn sizes"
        record.write(
            f"naflex_{Path(place).name or 'drawn'}_{'-'.join(backends)}_cpu",
            __doc__,
            ("keras", "numpy", *backends),
            clock="process CPU",
            threads=1,
            model=SIZES,
            settings={**settings, "data": shown},
            rows=rows,
        )


if __name__ == "__main__":
    main()
