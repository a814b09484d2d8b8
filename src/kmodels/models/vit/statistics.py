"""The statistics by which a checkpoint's images are normalised."""

import warnings
from pathlib import Path
from typing import Any


def preprocessing(path: Path, arguments: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the fields of a `Checkpoint` that concern images.

    Args:
        path: where the checkpoint lies, for the warning.
        arguments: arguments of the preprocessor; None where the checkpoint does not describe one,
            of which the user is warned when a model is made from it.
    """

    def warn() -> None:
        if arguments is None:
            warnings.warn(
                f"{path} does not say how its images are normalised, so the model has no "
                "preprocessor; give preprocessor=ViTImageClassifierPreprocessor(image_size, mean, "
                "std), or preprocessor=None",
                stacklevel=4,
            )

    return {"preprocessor": arguments, "verify_preprocessor": warn}
