"""Names of the classes of a task, and predictions under these names."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kmodels.core.arguments import Checked
from kmodels.core.errors import InputError


class NamedClasses(Checked):
    """A task of images whose settings hold `num_classes` and `class_names`."""

    settings: dict[str, Any]

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes in the order of the outputs, or None.

        They are saved with the model, and exported as `id2label` of transformers and as
        `label_names` of timm.
        """
        names = self.settings["class_names"]
        return None if names is None else list(names)

    @class_names.setter
    def class_names(self, names: Sequence[str] | None) -> None:
        names = check_class_names(names, self.settings["num_classes"])
        self.settings = {**self.settings, "class_names": names}

    def class_name(self, number: int) -> str:
        """Returns the name of a class, or its number as a text if the classes have no names."""
        names = self.settings["class_names"]
        return str(number) if names is None else names[number]


def check_class_names(names: Sequence[str] | None, number: int) -> list[str] | None:
    """Returns one text for each class as a list, or None."""
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InputError(f"class_names is {names!r}; give a list with one text for each class")
    if len(names) != number:
        raise InputError(
            f"class_names has {len(names)} names and num_classes is {number}; give one name for "
            "each class"
        )
    return list(names)


def best(scores: np.ndarray, names: list[str], top: int) -> list[list[tuple[str, float]]]:
    """Returns names and scores of the `top` best classes for each row of scores (B, classes)."""
    order = np.argsort(-scores, axis=-1, kind="stable")[:, :top]
    return [
        [(names[i], float(row[i])) for i in numbers]
        for row, numbers in zip(scores, order, strict=True)
    ]
