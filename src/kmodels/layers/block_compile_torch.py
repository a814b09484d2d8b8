"""Blocks under `torch.compile`: one graph serves all blocks that are alike.

Keras' own choice is to compile the whole step, whose graph breaks at `backward` and wherever a
metric is read. A block alone has no break. Only the `call` of its layers is traced, without what
Keras does around it: that reads their names, and each block would then get a graph of its own.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import torch

from kmodels.core import internals_torch, keras_internals
from kmodels.core.dispatch import paths_now
from kmodels.core.errors import InputError
from kmodels.layers.direct_calls import direct_calls

# Training and inference, full batches and a smaller last one, the last block, rates of drop path.
GRAPHS = 128


def declines() -> str | None:
    """See `kmodels.layers.block_compile.declines`; measured in `docs/measured.md`."""
    if torch.accelerator.is_available():
        return "compiled blocks have not been measured on accelerators"
    # `compile` cannot know how long a run will be, and up to a fifth more memory counts too.
    return "measured on a CPU, it saves less in a short run than compiling takes"


def put(blocks: Iterable[Any]) -> None:
    """Compiles these blocks at their next calls; those that are compiled keep their graphs.

    Raises:
        InputError: on a CPU without a C++ compiler, and for blocks whose weights lie in parts.
    """
    waiting = [block for block in blocks if not is_compiled(block)]
    if not waiting:
        return
    if any("call" in vars(block) for block in waiting):
        raise InputError(
            "jit_compile=True got blocks whose weights are gathered as they run (fsdp), which "
            'breaks the graph; leave "auto"'
        )
    check_compiler()
    # A graph is bound to whether this thread has ever had a scope of autocast.
    with keras_internals.no_autocast():
        pass
    # The settings of `generic_only` and `override` are constants in a graph.
    step = functools.cache(lambda paths: internals_torch.compiled_alone(_call, GRAPHS))
    for block in waiting:
        block.call = _compiled(block, step)


def remove(blocks: Iterable[Any]) -> None:
    """Leaves these blocks to Python again."""
    for block in blocks:
        if is_compiled(block):
            del block.call


def is_compiled(block: keras.Layer) -> bool:
    """Returns True if `put` compiled this block."""
    # FSDP replaces `call` too.
    return getattr(vars(block).get("call"), "graph", False)


def check_compiler() -> None:
    """Raises `InputError` if torch.compile needs a C++ compiler and finds none."""
    if not torch.accelerator.is_available() and not internals_torch.has_compiler():
        raise InputError(
            'jit_compile=True needs a C++ compiler on a CPU; install g++, or leave "auto"'
        )


def _call(block: keras.Layer, args: tuple, kwargs: dict[str, Any]) -> Any:
    return type(block).call(block, *args, **kwargs)


def _compiled(block: keras.Layer, step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the compiled replacement of the block's `call`."""

    def call(*args: object, **kwargs: object) -> Any:
        # Keras infers shapes with tensors that have no numbers.
        if any(getattr(value, "is_meta", False) for value in (*args, *kwargs.values())):
            return _call(block, args, kwargs)
        with direct_calls(bool(kwargs.get("training")), compiled=True):
            return step(paths_now())(block, args, kwargs)

    vars(call)["graph"] = True
    return call
