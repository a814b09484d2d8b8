"""What does token merging cost in accuracy, in a ViT that was trained without it?

    KERAS_BACKEND=torch python benchmarks/merging_accuracy.py --data idx:DIR [--epochs 2] [--write]

A small ViT, 4 blocks of width 64 with patches of 4 pixels on images of 28 (49 patches and a class
token), learns the training images, and then tells the test images with 0, 2, 4 and 8 tokens merged
in each block, and so 0, 8, 16 and 32 of 49 patches in the end. The same weights serve all; with
`--merged 8` a second model of the same seed is trained with so many merged. `agree` is the share of
test images of which the class is that of the model without merging.
"""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import record

from kmodels import training
from kmodels.data import open_dataset
from kmodels.models import ViTBackbone, ViTImageClassifier

SIZES: dict[str, Any] = {
    "patch_size": 4,
    "num_layers": 4,
    "num_heads": 4,
    "hidden_dim": 64,
    "mlp_dim": 256,
}
NUMBERS, BATCH = (0, 2, 4, 8), 128


def arrays(part: object) -> tuple[np.ndarray, np.ndarray]:
    """Returns normalised images (N, 28, 28, 1) and their labels."""
    images, labels = part.batch(np.arange(len(part)))  # type: ignore[attr-defined]
    pixels = np.asarray(images, "float32").reshape(len(labels), 28, 28, -1)[..., :1]
    return (pixels / 255 - 0.286) / 0.353, np.asarray(labels)


def trained(merging: int, images: np.ndarray, labels: np.ndarray, epochs: int) -> object:
    """Returns a classifier after so many epochs with so many tokens merged in each block."""
    keras.utils.set_random_seed(0)
    backbone = ViTBackbone((28, 28, 1), **SIZES, token_merging=merging)
    model = ViTImageClassifier(backbone, 10)
    steps = epochs * (len(images) // BATCH)
    schedule = training.WarmupSchedule(2e-3, steps, steps // 10, "cosine")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(training.AdamW(schedule, weight_decay=0.05, clip_norm=1.0), loss)
    whole = steps // epochs * BATCH
    model.fit(images[:whole], labels[:whole], batch_size=BATCH, epochs=epochs, verbose=2)
    return model


def rows_of(model: object, merged: int, images: np.ndarray, labels: np.ndarray) -> list[dict]:
    """Returns the accuracy with each number of merged tokens."""
    found, plain = [], None
    for number in NUMBERS:
        model.backbone.token_merging = number  # type: ignore[attr-defined]
        said = model.predict(images, batch_size=500, verbose=0).argmax(-1)  # type: ignore[attr-defined]
        plain = said if plain is None else plain
        found.append(
            {
                "trained_with": merged,
                "token_merging": number,
                "test_accuracy": round(float((said == labels).mean()), 4),
                "agree": round(float((said == plain).mean()), 4),
            }
        )
        print(found[-1], flush=True)
    return found


def main() -> None:
    """Trains, tells, and writes what was found."""
    question = str(__doc__).splitlines()[0]
    parser = record.flags(question)
    parser.add_argument("--data", required=True, help="as `open_dataset` takes it")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--merged", type=int, help="a second model that is trained with so many")
    options = parser.parse_args()
    data = open_dataset(options.data, image_size=(28, 28))
    images, labels = arrays(data.train)
    test = arrays(data.test)
    numbers = [0] if options.merged is None else [0, options.merged]
    rows = []
    for number in numbers:
        rows += rows_of(trained(number, images, labels, options.epochs), number, *test)
    backend, name = keras.backend.backend(), Path(options.data.partition(":")[2]).name
    if options.write:
        record.write(
            f"merging_accuracy_{name}_{backend}",
            question,
            ("keras", backend),
            data=name,
            images=len(images),
            test_images=len(test[1]),
            epochs=options.epochs,
            batch=BATCH,
            model=SIZES,
            precision="float32",
            rows=rows,
        )


if __name__ == "__main__":
    main()
