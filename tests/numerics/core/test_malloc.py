"""Free memory goes back to the system where that was measured to count."""

import ctypes

import keras
import pytest

from kmodels.core import malloc


def test_another_c_library_is_no_error(monkeypatch):
    malloc.malloc_trim()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    malloc.malloc_trim()


if keras.backend.backend() == "jax":
    import jax
    from jax import monitoring

    from kmodels import task
    from kmodels.core import malloc_jax

    def test_long_compilations_are_followed_by_a_trim(monkeypatch):
        trims, events = [], []
        monkeypatch.setattr(malloc, "malloc_trim", lambda: trims.append(1))
        monitoring.register_event_duration_secs_listener(
            lambda event, *_, **__: events.append(event)
        )
        assert task.Presets  # which registers the listener
        jax.jit(lambda x: x * 3 + 1)(2.0)
        assert malloc_jax.COMPILED in events  # the name is JAX's own
        assert not trims
        monitoring.record_event_duration_secs(malloc_jax.COMPILED, 2 * malloc_jax.LONG)
        assert len(trims) == 1
        monitoring.record_event_duration_secs("/another", 2 * malloc_jax.LONG)
        assert len(trims) == 1
else:

    def test_the_other_backends_need_no_listener():
        with pytest.raises(ImportError):
            __import__(f"kmodels.core.malloc_{keras.backend.backend()}")
