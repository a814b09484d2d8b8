"""Programs that are equal, of whatever model and test, are compiled once in a process.

JAX holds what it compiled by the Python function that it traced, so the second model of a test is
compiled like the first. What was traced is still traced each time; only XLA is spared.

Linux gives a process so many mappings of memory, 65,530 unless it is told otherwise, and each
program takes three. XLA dies of a segmentation fault where there are no more.
"""

from pathlib import Path
from typing import Any

import jax
from jax._src import compiler

MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
# Programs by what they were compiled from.
_held: dict[tuple, Any] = {}


def let_programs_go() -> None:
    """Forgets all programs where they hold half of the mappings that there may be."""
    if not MAPS.is_file() or not MOST_MAPS.is_file():
        return
    with MAPS.open("rb") as lines:
        count = sum(1 for _ in lines)
    if count > int(MOST_MAPS.read_text()) / 2:
        _held.clear()
        jax.clear_caches()


def compile_equal_programs_once() -> None:
    """Have JAX look for an equal program, by its text and all options, before it calls XLA."""
    if not hasattr(compiler, "compile_or_get_cached"):
        return
    compile_program = compiler.compile_or_get_cached

    def compile_or_take(backend, computation, devices, options, callbacks, *more, **named):
        if callbacks:  # they are part of the program, but not of its text
            return compile_program(
                backend, computation, devices, options, callbacks, *more, **named
            )
        text = computation.operation.get_asm(enable_debug_info=False)
        ids = tuple(device.id for device in devices.flat)
        key = (id(backend), ids, options.SerializeAsString(), hash(text), text)
        if key not in _held:
            _held[key] = compile_program(
                backend, computation, devices, options, callbacks, *more, **named
            )
        return _held[key]

    compiler.compile_or_get_cached = compile_or_take
