"""The contents of a checkpoint: an architecture, its settings and its tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kmodels.weights.rules import Rule
from kmodels.weights.tensors import LazyArray

Tensors = Mapping[str, LazyArray]
# Names of transformers for what the outputs of a head mean.
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


@dataclass(frozen=True)
class SourceCheckpoint:
    """A file or directory of another package, understood but not yet read.

    Args:
        path: where it lies, for messages.
        kind: whose format it is, for messages.
        backbone: fields of the family's config.
        task: arguments of the task; `num_classes` is missing or None where there is no head.
        preprocessor: arguments of the preprocessor, or None.
        tensors: name to tensor.
        rules: what each tensor is in the model of this config.
        fit: changes the tensors to suit another config, such as another image size.
        verify_preprocessor: called with the class of the preprocessor that is made; raises
            `InputError` where its files are damaged, and warns where there is nothing to make it
            of.
        changes: what was done to the model before it was saved, see `kmodels.layers.changes`.
        left_out: parts of the model in the file that have no counterpart here.
        whole: name of the class that has them; empty where there is none.
        takes: what the model reads, for the warning of parts that are left out.
        notice: what the user is told when a model is made from it; None for nothing.
        notice_part: prefix of variables, where that is told only to those whose model lacks them.
        assumed: settings of the backbone or the task that nothing in the file says; a warning names
            those that the caller does not give.
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
    takes: str = "text"
    notice: str | None = None
    notice_part: str | None = None
    assumed: Mapping[str, Any] = field(default_factory=dict)
