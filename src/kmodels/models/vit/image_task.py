"""The base class of segmenters and detectors."""

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.types import DTypeLike
from kmodels.models.blocks.class_names import NamedClasses
from kmodels.models.vit.model import ViTBackbone
from kmodels.task import Task
from kmodels.training.sparse_labels import check_classes, check_pixels


class ImageTask(NamedClasses, Task):
    """A task with named classes on a ViT, whose head no file of a classifier has.

    Attributes:
        own_setting: a setting that only files of this task have.
        head_name: name of its head, for the message of a file without one.
    """

    compiles_itself = True
    resized = ViTBackbone.resized
    own_setting: ClassVar[str]
    head_name: ClassVar[str]

    @classmethod
    def from_preset(
        cls,
        preset: str | Path,
        dtype: DTypeLike = None,
        load_weights: bool = True,
        **overrides: Any,
    ) -> Self:
        """As of every task; a directory or a name of another task needs `num_classes`.

        Args:
            preset: as in `Task.from_preset`; of a classifier only the backbone's weights are read.
            dtype: as in `Task.from_preset`.
            load_weights: as in `Task.from_preset`.
            **overrides: as in `Task.from_preset`.

        Raises:
            InputError: as there, and for an unknown number of classes.
        """
        from kmodels import presets, registry
        from kmodels.presets.find import open_checkpoint

        cls = presets.class_below(cls, preset)
        if "num_classes" not in overrides:
            family = registry.family(cls.backbone_class.family)
            task = open_checkpoint(preset, family, {}, False).task
            if cls.own_setting not in task or task.get("num_classes") is None:
                raise InputError(f"{preset} has no {cls.head_name}; give num_classes")
        return super().from_preset(preset, dtype, load_weights, **overrides)

    @property
    def ignored_labels(self) -> Collection[int] | None:
        """Labels of pixels that no class has; None if the loss does not compare classes."""
        return None

    def check_labels(self, y: Any) -> None:
        """Raises `InputError` for arrays of classes that the model does not have."""
        ignored, queries = self.ignored_labels, None
        if isinstance(y, Mapping):
            queries = self.settings.get("num_queries")
            y, ignored = y.get("class_labels"), (-1,)
            if isinstance(y, np.ndarray) and y.shape[1:] == (0,) and self.preprocessor is None:
                raise InputError(
                    f"class_labels has shape {y.shape}; give at least one per image, -1 for none"
                )
        elif ignored is not None and isinstance(y, np.ndarray) and self.preprocessor is None:
            check_pixels(y, self.outputs[0])
        if ignored is not None and isinstance(y, np.ndarray) and y.dtype.kind in "iuf":
            check_classes(y, self.num_classes, ignored)
            if queries and (y >= 0).sum(1).max(initial=0) > queries:
                warnings.warn(
                    f"an image has more objects than the {queries} queries of the model, so not "
                    "all of them are learnt; make the model with a larger num_queries",
                    stacklevel=2,
                )


class ImageSegmenter(ImageTask):
    """The base of segmenters, whose `from_preset` finds the class of a preset."""


class ObjectDetector(ImageTask):
    """The base of detectors, whose `from_preset` finds the class of a preset."""


# The older name in keras-hub.
ImageObjectDetector = ObjectDetector
