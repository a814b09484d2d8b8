"""The statistics by which a checkpoint's images are normalised."""

import inspect
import warnings
from pathlib import Path
from typing import Any

# The arguments of preprocessors that the warning names.
DECISIVE = ("image_size", "patch_size", "max_num_patches", "mean", "std")


def preprocessing(path: Path, arguments: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the fields of a `Checkpoint` that concern images.

    Args:
        path: where the checkpoint lies, for the warning.
        arguments: arguments of the preprocessor; None where the checkpoint does not describe one,
            of which the user is warned when a model is made from it.
    """

    def warn(kind: type) -> None:
        if arguments is None:
            known = inspect.signature(kind.__init__).parameters
            given = ", ".join(name for name in DECISIVE if name in known)
            warnings.warn(
                f"{path} does not say how its images are normalised, so the model has no "
                f"preprocessor; give preprocessor={kind.__name__}({given}), or preprocessor=None",
                stacklevel=4,
            )

    return {"preprocessor": arguments, "verify_preprocessor": warn}
