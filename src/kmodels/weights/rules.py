"""One line of a table: a name in a file, the variables it fills, the change of layout between."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kmodels.weights.transforms import Transform, identity


@dataclass(frozen=True)
class Rule:
    """The place of a file's tensor in the model.

    Args:
        source: name in the file; `{i}` stands for a block's number.
        target: path of the variable, or paths where the file keeps several fused.
        transform: layout of the file to layout of the variable, for each part.
        axis: along which the parts of a fused tensor lie in the file.
    """

    source: str
    target: str | Sequence[str]
    transform: Transform = field(default=identity)
    axis: int = 0

    @property
    def targets(self) -> tuple[str, ...]:
        """The paths, one or several."""
        return (self.target,) if isinstance(self.target, str) else tuple(self.target)


@dataclass(frozen=True)
class Bound:
    """A rule with its block's number filled in."""

    source: str
    targets: tuple[str, ...]
    transform: Transform
    axis: int


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text).replace(re.escape("{i}"), r"(?P<i>\d+)"))


def _bind(rule: Rule, number: str) -> Bound:
    targets = tuple(target.replace("{i}", number) for target in rule.targets)
    return Bound(rule.source.replace("{i}", number), targets, rule.transform, rule.axis)


def bind_sources(rules: Iterable[Rule], names: Iterable[str]) -> dict[str, Bound | None]:
    """Returns for each name in a file the rule that reads it, or None."""
    compiled = [(rule, _pattern(rule.source)) for rule in rules]
    found: dict[str, Bound | None] = {}
    for name in names:
        found[name] = None
        for rule, pattern in compiled:
            if match := pattern.fullmatch(name):
                found[name] = _bind(rule, match.groupdict().get("i") or "")
                break
    return found


def bind_targets(rules: Iterable[Rule], paths: Iterable[str]) -> list[Bound]:
    """Returns the rules that write to these variables, in the order of the variables."""
    compiled = [(rule, _pattern(rule.targets[0])) for rule in rules]
    found = []
    for path in paths:
        for rule, pattern in compiled:
            if match := pattern.fullmatch(path):
                found.append(_bind(rule, match.groupdict().get("i") or ""))
                break
    return found
