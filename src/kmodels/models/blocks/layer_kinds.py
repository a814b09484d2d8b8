"""The kind of attention of each layer, and the layers that use the keys and values of another."""

from collections.abc import Sequence

from kmodels.core.errors import InputError, check_whole

# As `layer_types` calls them: with a window, and without one.
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def check(kinds: Sequence[str], layers: int, shared: int) -> None:
    """Raises `InputError` for kinds that do not fit the layers of a model.

    Args:
        kinds: kind of each layer.
        layers: number of layers.
        shared: the last layers, so many, use keys and values of layers before them.
    """
    check_whole("num_kv_shared_layers", shared, least=0)
    if strange := sorted(set(kinds) - {LOCAL, GLOBAL}):
        raise InputError(f"layer_types has {strange[0]!r}; give {LOCAL!r} and {GLOBAL!r}")
    if len(kinds) != layers:
        raise InputError(f"layer_types names {len(kinds)} layers of {layers}; give one for each")
    if lacking := sorted(set(kinds) - set(kinds[: max(layers - shared, 0)])):
        raise InputError(
            f"num_kv_shared_layers is {shared}, and no layer before them has {lacking[0]} to "
            "share; give fewer"
        )


def sources(kinds: Sequence[str], shared: int) -> list[int | None]:
    """Returns whose keys and values each layer uses: the last of its kind that has its own.

    Args:
        kinds: kind of each layer.
        shared: the last layers, so many, have none of their own.

    Returns:
        The number of a layer, or None for a layer's own.
    """
    own = len(kinds) - shared
    last = {kind: index for index, kind in enumerate(kinds[:own])}
    return [None if index < own else last[kind] for index, kind in enumerate(kinds)]
