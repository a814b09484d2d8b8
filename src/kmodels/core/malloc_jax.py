"""Memory of XLA's compiler goes back to the system before the compiled program runs."""

from jax import monitoring

from kmodels.core import malloc

COMPILED = "/jax/core/compile/backend_compile_duration"
# Seconds of compiling below which there is little to give back.
LONG = 1.0


def watch() -> None:
    """Trims the heap after each long compilation from now on."""
    monitoring.register_event_duration_secs_listener(_compiled)


def _compiled(event: str, duration_secs: float, **_: object) -> None:
    if event == COMPILED and duration_secs > LONG:
        malloc.malloc_trim()
