"""An optimizer's variables by the weight they belong to, whatever its class and the backend."""

from typing import Any

from kmodels.core import keras_internals


def slots(optimizer: Any) -> dict[str, Any]:
    """Every variable of a built optimizer by `weight's path:slot`, or by its own name.

    On torch Keras puts classes of its own behind the public names, and Adafactor calls all its
    variables as their weights are called; so a variable is known by the list of the optimizer that
    it is in, and by its place there.

    Args:
        optimizer: of any of Keras' classes; one that scales losses gives its inner one's too, and
            those of several objectives give each one's, after its name.

    Returns:
        For example "iteration", "block_0/mlp/up/kernel:momentum".
    """
    objectives: dict[str, Any] = getattr(optimizer, "by_player", {})
    if objectives:
        return {f"{name}/{k}": v for name, own in objectives.items() for k, v in slots(own).items()}
    inner = getattr(optimizer, "inner_optimizer", None)
    found = {} if inner is None else slots(inner)
    inside = {id(variable) for variable in found.values()}
    weights = keras_internals.built_for(optimizer)
    owners: dict[int, tuple[str, str]] = {}
    for attribute, held in keras_internals.slot_lists(optimizer):
        for weight, variable in zip(weights, held, strict=True):
            path = getattr(weight, "path", weight.name)
            owners.setdefault(id(variable), (path, attribute.strip("_")))
    for variable in optimizer.variables:
        if id(variable) in inside:
            continue
        name = variable.name
        if id(variable) in owners:
            path, attribute = owners[id(variable)]
            prefix = path.replace("/", "_") + "_"
            slot = name.removeprefix(prefix) if name.startswith(prefix) else attribute
            name = f"{path}:{slot}"
        found[unique(name, found)] = variable
    return found


def averages(optimizer: Any) -> list[tuple[Any, Any]]:
    """Each weight with its moving average, where a built optimizer keeps one."""
    objectives: dict[str, Any] = getattr(optimizer, "by_player", {})
    if objectives:
        return [pair for own in objectives.values() for pair in averages(own)]
    if (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        return averages(inner)
    return keras_internals.moving_averages(optimizer)


def unique(name: str, taken: Any) -> str:
    """The name, or the first of `name#1`, `name#2` that is free."""
    copies, found = 0, name
    while found in taken:
        copies += 1
        found = f"{name}#{copies}"
    return found
