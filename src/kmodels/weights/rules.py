"""Tables between the names of a file and the variables of a model, and a checkpoint with its table.

A format is a list of `Rule`; each has a `Transform` between the layouts of the file and the model.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kmodels.weights.tensors import LazyArray

Change = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Transform:
    """A change of layout and its inverse; both only move values, so a round trip is bit-equal.

    Args:
        forward: from the layout of the file to that of the model.
        inverse: from the layout of the model to that of the file.
    """

    forward: Change
    inverse: Change


identity = Transform(lambda x: x, lambda x: x)

transpose = Transform(np.transpose, np.transpose)
"""Linear weights of PyTorch (out, in) <-> kernels (in, out)."""


def _each(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, 1, 2)


transpose_each = Transform(_each, _each)
"""Linear weights of many experts in one (E, out, in) <-> kernels (E, in, out)."""


def reshape(source: tuple[int, ...], target: tuple[int, ...]) -> Transform:
    """Merged or split axes, such as heads: (D, N, H) <-> (D, N * H)."""
    return Transform(lambda x: np.reshape(x, target), lambda x: np.reshape(x, source))


def leading_axes(number: int) -> Transform:
    """For files without leading axes of length 1: (D,) <-> (1, 1, D) with `number` 2."""
    return Transform(
        lambda x: np.reshape(x, (1,) * number + x.shape), lambda x: np.reshape(x, x.shape[number:])
    )


def patch_kernel(patch: int, channels: int) -> Transform:
    """Convolution (D, C, p, p) <-> patch projection (p * p * C, D), rows as (row, column, channel).

    Args:
        patch: side of the square patches, in pixels.
        channels: channels of the image.
    """
    rows = patch * patch * channels

    def forward(x: np.ndarray) -> np.ndarray:
        return np.transpose(x, (2, 3, 1, 0)).reshape(rows, -1)

    def inverse(x: np.ndarray) -> np.ndarray:
        return np.transpose(x.reshape(patch, patch, channels, -1), (3, 2, 0, 1))

    return Transform(forward, inverse)


def prepend_zeros(rows: int) -> Transform:
    """For files with leading rows of zeros: (1, rows + P, D) <-> (1, P, D)."""
    return Transform(
        lambda x: x[:, rows:],
        lambda x: np.concatenate([np.zeros_like(x[:, :1]).repeat(rows, 1), x], axis=1),
    )


def source_shape(shapes: list[tuple[int, ...]], transform: Transform, axis: int) -> tuple[int, ...]:
    """Returns the shape in the file of a tensor that becomes variables of these shapes.

    Several are fused along the axis.
    """
    # A view of a single zero has any shape and costs nothing, so the transform itself is applied.
    parts = [transform.inverse(np.broadcast_to(np.int8(0), shape)).shape for shape in shapes]
    joined = list(parts[0])
    if len(parts) > 1:
        joined[axis] = sum(part[axis] for part in parts)
    return tuple(joined)


def split_points(shapes: list[tuple[int, ...]], transform: Transform, axis: int) -> list[int]:
    """Returns the indices at which `np.split` along `axis` gives one part per variable."""
    sizes = [source_shape([shape], transform, axis)[axis] for shape in shapes]
    return [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]


@dataclass(frozen=True)
class Rule:
    """The variable, or variables, of one tensor in a file.

    Args:
        source: name in the file; `{i}` stands for a block's number.
        target: path of the variable, or paths if the file has several variables fused.
        transform: from the layout of the file to that of each variable.
        axis: axis along which the file fuses several variables.
    """

    source: str
    target: str | Sequence[str]
    transform: Transform = field(default=identity)
    axis: int = 0

    @property
    def targets(self) -> tuple[str, ...]:
        """The paths of the variables."""
        return (self.target,) if isinstance(self.target, str) else tuple(self.target)


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text).replace(re.escape("{i}"), r"(?P<i>\d+)"))


def _bind(patterns: Sequence[tuple[re.Pattern[str], Rule]], name: str) -> Rule | None:
    """Returns the first rule whose pattern matches, with the block's number filled in."""
    for pattern, rule in patterns:
        if match := pattern.fullmatch(name):
            number = match.groupdict().get("i") or ""
            targets = tuple(target.replace("{i}", number) for target in rule.targets)
            return replace(rule, source=rule.source.replace("{i}", number), target=targets)
    return None


def bind_sources(rules: Iterable[Rule], names: Iterable[str]) -> dict[str, Rule | None]:
    """Returns the rule of each name in a file, or None if no rule reads it."""
    patterns = [(_pattern(rule.source), rule) for rule in rules]
    return {name: _bind(patterns, name) for name in names}


def bind_targets(rules: Iterable[Rule], paths: Iterable[str]) -> list[Rule]:
    """Returns the rules that write to these variables, in the order of the variables."""
    patterns = [(_pattern(rule.targets[0]), rule) for rule in rules]
    return [rule for path in paths if (rule := _bind(patterns, path)) is not None]


Tensors = Mapping[str, LazyArray]
# Names that transformers gives the kinds of a head's outputs.
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


@dataclass(frozen=True)
class SourceCheckpoint:
    """A file or directory of another package: its settings, and tensors that are not read yet.

    Args:
        path: path of the file or directory, for messages.
        kind: name of the format, for messages.
        backbone: fields of the family's config.
        task: arguments of the task; `num_classes` is missing or None if there is no head.
        preprocessor: arguments of the preprocessor, or None.
        tensors: tensors by name.
        rules: the table between these names and the variables.
        fit: changes the tensors to suit another config, such as another image size.
        verify_preprocessor: called with the class of the preprocessor; raises `InputError` if its
            files are damaged, and warns if there are none.
        changes: changes of the model before it was saved, see `kmodels.layers.changes`.
        left_out: parts of the model in the file that have no counterpart here.
        whole: name of the class that has these parts; empty if there is none.
        saved_as: name of kmodels' class that was saved; empty in other packages' files.
        takes: the inputs of the model, for the warning of parts that are left out.
        notice: a message to print when a model is made from the checkpoint, or None.
        notice_part: prefix of variables; if given, the message is printed only for models without
            these.
        assumed: settings of the backbone or the task that no file contains; a warning names those
            that the caller does not give.
    """

    path: Path
    kind: str
    backbone: dict[str, Any]
    task: dict[str, Any]
    preprocessor: dict[str, Any] | None
    tensors: Tensors
    rules: Sequence[Rule]
    fit: Callable[[Tensors, Any], Tensors] = field(default=lambda tensors, config: tensors)
    verify_preprocessor: Callable[[type], None] = field(default=lambda kind: None)
    changes: Mapping[str, Any] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    whole: str = ""
    saved_as: str = ""
    takes: str = "text"
    notice: str | None = None
    notice_part: str | None = None
    assumed: Mapping[str, Any] = field(default_factory=dict)
