"""What only JAX's overrides promise; collects nothing on the other backends."""

import keras
import numpy as np
import pytest

from gradients import to_numpy, value_and_grad
from kmodels import ops
from tolerances import tolerance

if keras.backend.backend() == "jax":
    import jax

    from kmodels.overrides import linear_cross_entropy_jax

    ROWS, WIDTH, VOCABULARY = 300, 8, 4608

    @pytest.mark.parametrize("counted", [0, 1, 128, 129, 299])
    def test_blocks_leave_out_what_does_not_count(counted, monkeypatch) -> None:
        monkeypatch.setattr(linear_cross_entropy_jax, "BLOCK", 128)
        monkeypatch.setattr(linear_cross_entropy_jax, "SMALLEST", 48)
        rng = np.random.default_rng(0)
        hidden = rng.normal(size=(ROWS, WIDTH)).astype("float32")
        table = rng.normal(size=(VOCABULARY, WIDTH)).astype("float32")
        labels = rng.integers(0, VOCABULARY, ROWS)
        weights = np.zeros(ROWS, "float32")
        weights[rng.permutation(ROWS)[:counted]] = rng.random(counted) + 0.5

        def loss(body):
            return value_and_grad(
                lambda h: body(h, table, labels, weights)[0], hidden, dtype="float32"
            )

        value, (gradient,) = loss(ops.linear_cross_entropy.override)
        expected, (wanted,) = loss(ops.linear_cross_entropy.generic)
        allowed = tolerance("linear_cross_entropy", "float32")
        scale = max(1.0, np.abs(wanted).max())
        assert abs(to_numpy(value) - to_numpy(expected)) <= allowed * max(1, to_numpy(expected))
        assert np.abs(gradient - wanted).max() <= allowed * scale
        assert not gradient[weights == 0].any()

    @pytest.mark.parametrize("rows", [100, 2100])
    def test_no_copy_of_a_bfloat16_table_is_made(rows) -> None:
        """XLA would widen it, or copy it as integers, which no other test would see."""
        table = jax.ShapeDtypeStruct((2**16, 256), "bfloat16")  # 32 MiB
        hidden = jax.ShapeDtypeStruct((rows, 256), "bfloat16")
        labels = jax.ShapeDtypeStruct((rows,), "int32")
        weights = jax.ShapeDtypeStruct((rows,), "float32")

        def gradient(hidden, *rest):
            return jax.grad(lambda h: ops.linear_cross_entropy.override(h, *rest)[0])(hidden)

        compiled = jax.jit(gradient).lower(hidden, table, labels, weights).compile()
        scores = 4 * min(rows, linear_cross_entropy_jax.BLOCK) * 4096  # bytes of a tile's
        assert compiled.memory_analysis().temp_size_in_bytes < 2 * scores + 2**23
