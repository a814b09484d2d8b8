"""Programs that are equal, of whatever model and test, are compiled once in a process.

JAX holds what it compiled by the Python function that it traced, so the second model of a test is
compiled like the first. What was traced is still traced each time; only XLA is spared.
"""

from typing import Any

from jax._src import compiler


def compile_equal_programs_once() -> None:
    """Have JAX look for an equal program, by its text and all options, before it calls XLA."""
    if not hasattr(compiler, "compile_or_get_cached"):
        return
    compile_program = compiler.compile_or_get_cached
    held: dict[tuple, Any] = {}

    def compile_or_take(backend, computation, devices, options, callbacks, *more, **named):
        if callbacks:  # they are part of the program, but not of its text
            return compile_program(
                backend, computation, devices, options, callbacks, *more, **named
            )
        text = computation.operation.get_asm(enable_debug_info=False)
        ids = tuple(device.id for device in devices.flat)
        key = (id(backend), ids, options.SerializeAsString(), hash(text), text)
        if key not in held:
            held[key] = compile_program(
                backend, computation, devices, options, callbacks, *more, **named
            )
        return held[key]

    compiler.compile_or_get_cached = compile_or_take
