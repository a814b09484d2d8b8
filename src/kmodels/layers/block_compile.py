"""`jit_compile`: torch compiles each block; on other backends XLA compiles the step."""

from collections.abc import Iterable
from typing import Any, Protocol

import keras

from kmodels.core import keras_internals
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError


class BlockCompileBackend(Protocol):
    """Compiling the blocks of a model one by one, on a backend that does so."""

    def declines(self) -> str | None:
        """Returns why `jit_compile="auto"` compiles no blocks on this machine; None if it does."""
        ...

    def put(self, blocks: Iterable[keras.layers.Layer]) -> None:
        """Compiles these blocks at their next calls; raises `InputError` if it cannot."""
        ...

    def remove(self, blocks: Iterable[keras.layers.Layer]) -> None:
        """Leaves these blocks to Python again."""
        ...

    def is_compiled(self, block: keras.layers.Layer) -> bool:
        """Returns True if `put` took this block."""
        ...


_engine = backend_module("kmodels.layers.block_compile", BlockCompileBackend, optional=True)


def choose(model: keras.Model, jit_compile: bool | str, run_eagerly: bool = False) -> bool | str:
    """Compiles the blocks of a model at their first calls, or leaves them to Python.

    Args:
        model: with layers called block_0, block_1, ...
        jit_compile: True, False or "auto", on torch True if `declines` returns None.
        run_eagerly: as in `keras.Model.compile`; wins over `jit_compile`.

    Returns:
        The `jit_compile` to pass to Keras.

    Raises:
        InputError: on torch, for another value, or if True cannot work.
    """
    if _engine is None:
        return jit_compile
    if not isinstance(jit_compile, bool) and jit_compile != "auto":
        raise InputError(f'jit_compile is {jit_compile!r}; give True, False or "auto"')
    all_blocks = blocks(model)
    chosen = declines() is None if jit_compile == "auto" else jit_compile
    if not chosen or run_eagerly:
        _engine.remove(all_blocks)
        # Keras warns of True with run_eagerly.
        return jit_compile if run_eagerly else False
    check(model)
    _engine.put(all_blocks)
    return False


def is_possible() -> bool:
    """Returns True if the running backend compiles blocks one by one."""
    return _engine is not None


def blocks(model: keras.Model) -> list[Any]:
    """Returns the layers that are compiled, each on its own."""
    return [layer for layer in keras_internals.sublayers(model) if layer.name.startswith("block_")]


def compiled(model: keras.Model) -> bool:
    """Returns True if `choose` compiled the blocks of a model."""
    return _engine is not None and any(_engine.is_compiled(block) for block in blocks(model))


def declines() -> str | None:
    """Returns why `jit_compile="auto"` compiles no blocks here, or None if it does.

    On the other backends Keras decides about the whole step, which is the returned reason.
    """
    if _engine is None:
        return "Keras compiles the whole step"
    return _engine.declines()


def check(model: keras.Model) -> None:
    """Raises `InputError` for layers that a compiled block would ignore or compile in pieces."""
    for block in blocks(model):
        for layer in keras_internals.sublayers(block):
            if layer is not block and keras_internals.is_rematerialized(layer):
                what = 'rematerialised; choose remat "block" or "none"'
            elif getattr(layer, "quantized", None) is not None:
                what = "quantized; keep the base in full precision"
            else:
                continue
            raise InputError(f"jit_compile=True got {layer.path}, {what}, or jit_compile=False")
