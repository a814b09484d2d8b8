"""Products that TensorFlow does not round; collects nothing on the other backends."""

import keras
import numpy as np

from gradients import to_numpy
from kmodels import ops

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    from kmodels.overrides import dense_tensorflow

    def test_a_product_is_rounded_once(monkeypatch) -> None:
        """On a processor that cuts digits off: `test_parity.py` has values on both kinds."""
        monkeypatch.setattr(dense_tensorflow, "truncates", lambda x: x.size == 2)
        rng = np.random.default_rng(0)
        x, kernel = (
            tf.constant(rng.normal(size=size), tf.bfloat16) for size in ((3, 5, 64), (64, 32))
        )
        right = tf.cast(tf.cast(x, tf.float64) @ tf.cast(kernel, tf.float64), tf.bfloat16)
        assert np.mean(to_numpy(ops.dense(x, kernel)) == to_numpy(right)) > 0.99
