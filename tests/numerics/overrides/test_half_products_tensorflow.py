"""Products that TensorFlow does not round; collects nothing on the other backends."""

import keras
import numpy as np
import pytest

import op_cases
from gradients import assert_near, to_numpy, value_and_grad
from kmodels import ops
from tolerances import tolerance

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    from kmodels.overrides import _tensors_tensorflow, attention_tensorflow, dense_tensorflow

    MODULES = (_tensors_tensorflow, attention_tensorflow, dense_tensorflow)
    CASES = [case for case in op_cases.few_cases() if case[0] in ("attention", "dense", "mlp")]

    @pytest.fixture(autouse=True, params=[True, False], ids=["cut off", "rounded"])
    def cuts(request, monkeypatch) -> bool:
        """A processor that cuts digits off, and one that rounds."""
        for module in MODULES:
            monkeypatch.setattr(module, "truncates", lambda x: request.param and x.size == 2)
        return request.param

    def test_a_product_is_rounded_once(cuts) -> None:
        rng = np.random.default_rng(0)
        x, kernel = (
            tf.constant(rng.normal(size=size), tf.bfloat16) for size in ((3, 5, 64), (64, 32))
        )
        right = tf.cast(tf.cast(x, tf.float64) @ tf.cast(kernel, tf.float64), tf.bfloat16)
        share = np.mean(to_numpy(ops.dense(x, kernel)) == to_numpy(right))
        if cuts:
            assert share > 0.99

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize(
        ("name", "label", "arrays", "keywords"),
        CASES,
        ids=lambda x: x if isinstance(x, str) else None,
    )
    def test_values_and_gradients(name, label, arrays, keywords, dtype, cuts) -> None:
        op = getattr(ops, name)
        tensors = [keras.ops.convert_to_tensor(x, dtype) for x in arrays]
        if name != "mlp":
            assert not cuts or op.declines(*tensors, **keywords) is None
        value, gradients = value_and_grad(lambda *x: op(*x, **keywords), *arrays, dtype=dtype)
        assert value.dtype == dtype
        expected, slopes = value_and_grad(
            lambda *x: op.generic(*x, **keywords), *[to_numpy(x) for x in tensors], dtype="float32"
        )
        assert_near([value, *gradients], [expected, *slopes], tolerance(name, dtype))
