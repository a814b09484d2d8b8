"""Free memory goes back to the system where that was measured to count."""

import ctypes

import keras

from kmodels.core import runtime


def test_another_c_library_is_no_error(monkeypatch):
    runtime.malloc_trim()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    runtime.malloc_trim()


if keras.backend.backend() == "jax":
    import jax
    from jax import monitoring

    from kmodels import task
    from kmodels.core import runtime_jax

    def test_long_compilations_are_followed_by_a_trim(monkeypatch):
        trims, events = [], []
        monkeypatch.setattr(runtime, "malloc_trim", lambda: trims.append(1))
        monitoring.register_event_duration_secs_listener(
            lambda event, *_, **__: events.append(event)
        )
        assert task.Presets  # which registers the listener
        jax.jit(lambda x: x * 3 + 1)(2.0)
        assert runtime_jax.COMPILED in events  # the name is JAX's own
        assert not trims
        monitoring.record_event_duration_secs(runtime_jax.COMPILED, 2 * runtime_jax.LONG)
        assert len(trims) == 1
        monitoring.record_event_duration_secs("/another", 2 * runtime_jax.LONG)
        assert len(trims) == 1
else:

    def test_the_other_backends_need_no_listener(monkeypatch):
        trims = []
        monkeypatch.setattr(runtime, "malloc_trim", lambda: trims.append(1))
        runtime.native.trim_after_compiling()
        assert not trims
