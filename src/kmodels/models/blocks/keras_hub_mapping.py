"""The mapping between a family and its counterpart in keras-hub."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kmodels.weights import Rule, Transform, identity

Settings = Mapping[str, Any]


def nothing(*_: object) -> list[str]:
    """Serves a pair in which neither side lacks anything."""
    return []


@dataclass(frozen=True)
class KerasHubMapping:
    """A backbone of keras-hub with its task, and the classes that they are here.

    Args:
        backbone: name of the class in `keras_hub.models`.
        task: name of the class with a head there, or None.
        ours: the backbone's class here.
        our_task: the task's class here.
        fields: the arguments of keras-hub's backbone to fields of the config here.
        unsupported_in: the same and the arguments of the task, empty for a backbone, to the
            settings that the model here does not support.
        settings: the arguments of keras-hub's task to arguments of the task here.
        arguments: a config to the arguments of keras-hub's backbone.
        head: settings of the task here to the arguments of keras-hub's task.
        belongs: (config, settings) to whether this is the pair for such a model.
        unsupported_out: (config, settings) to the settings that keras-hub does not support.
        table: a config to the rules, whose sources are the paths of keras-hub's variables without
            the name that keras-hub may put in front.
        pooled: if keras-hub's backbone pools, the settings of the task that it is here.
        inside: class of keras-hub to the attribute that holds such a backbone, of models that have
            other parts, which are left out.
        ignored: attributes of parts of the backbone itself that are left out.
        copies: variables of keras-hub that are copies: the path of the original, or None for
            variables that its layers compute.
        renamed: patterns for whole paths to the name in the table, for variables without one.
        part: attribute of keras-hub's backbone that is another model in it, which this pair has and
            one of the same names without it leaves out; None for a pair of the backbone alone.
        make_part: a config to the name of the class of the part and its arguments, if there is one.
        from_tokenizer: keras-hub's tokenizer to fields of the config that its backbone lacks.
    """

    backbone: str
    task: str | None
    ours: type
    our_task: type
    fields: Callable[[Settings], dict[str, Any]]
    arguments: Callable[[Any], dict[str, Any]]
    table: Callable[[Any], Sequence[Rule]]
    belongs: Callable[[Any, Settings], bool]
    unsupported_out: Callable[[Any, Settings], list[str]] = nothing
    unsupported_in: Callable[[Settings, Settings], list[str]] = nothing
    settings: Callable[[Settings], dict[str, Any]] = field(default=lambda given: {})
    head: Callable[[Settings], dict[str, Any]] = field(default=lambda settings: {})
    pooled: Settings | None = None
    inside: Mapping[str, str] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    copies: Mapping[str, str | None] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    part: str | None = None
    make_part: Callable[[Any], tuple[str, dict[str, Any]]] | None = None
    from_tokenizer: Callable[[Any], dict[str, Any]] = field(default=lambda tokenizer: {})


def norm(source: str, target: str) -> list[Rule]:
    """Returns the rules of a norm with a bias."""
    return [Rule(f"{source}/gamma", f"{target}/scale"), Rule(f"{source}/beta", f"{target}/bias")]


def dense(source: str, target: str, kernel: Transform = identity) -> list[Rule]:
    """Returns the rules of a linear layer with a bias."""
    return [
        Rule(f"{source}/kernel", f"{target}/kernel", kernel),
        Rule(f"{source}/bias", f"{target}/bias"),
    ]


def numbered(table: Sequence[Rule], layers: int, first: int) -> list[Rule]:
    """Rules whose blocks another package counts from `first`, one for each block."""
    by_block = []
    for rule in table:
        if "{i}" not in rule.source:
            by_block.append(rule)
            continue
        for i in range(layers):
            targets = [target.replace("{i}", str(i)) for target in rule.targets]
            source = rule.source.replace("{i}", str(i + first))
            target = targets if targets[1:] else targets[0]
            by_block.append(replace(rule, source=source, target=target))
    return by_block
