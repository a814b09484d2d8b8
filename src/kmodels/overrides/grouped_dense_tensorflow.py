"""Grouped products for TensorFlow on CPU: a loop over groups that slices the rows of each."""

from typing import Any

import tensorflow as tf
from keras import ops

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.grouped_dense import check_grouped, grouped_dense
from kmodels.overrides._tensors_tensorflow import later, product, static_shape

State = tuple[tf.Tensor, ...]


def supports(call: OpCall) -> str | None:
    """Supports CPUs, with at least as many rows as groups."""
    rows = call.x.shape[0]
    if rows is not None and rows < call.kernel.shape[0]:
        return "the loop asks each group, and most have no row"
    if tf.config.list_physical_devices("GPU"):
        return "XLA, by which steps are compiled on a GPU, has no slices of unknown length"
    return None


@override(grouped_dense, supports)
def grouped_dense_tensorflow(x: tf.Tensor, kernel: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
    """Multiplies the rows of one group at a time; the step is compiled without XLA."""
    check_grouped(x, kernel)
    ends = tf.cumsum(ops.convert_to_tensor(sizes))
    starts = ends - sizes
    groups = static_shape(kernel)[0]

    def own(array: tf.Tensor, group: tf.Tensor) -> Any:
        return array[starts[group] : ends[group]]

    @tf.custom_gradient
    def grouped(x: tf.Tensor, kernel: tf.Tensor) -> Any:
        def backward(gradient: tf.Tensor) -> State:
            x_, kernel_ = later(gradient, x, kernel)

            def step(group: tf.Tensor) -> State:
                slope, rows = own(gradient, group), own(x_, group)
                return (
                    product(slope, kernel_[group], transpose_b=True),
                    product(rows, slope, transpose_a=True),
                )

            for_x, for_kernel = _loop(step, groups, ((None, x.shape[1]), kernel.shape[1:]), x.dtype)
            return tf.ensure_shape(for_x.concat(), x.shape), for_kernel.stack()

        def forward(group: tf.Tensor) -> State:
            return (product(own(x, group), kernel[group]),)

        (products,) = _loop(forward, groups, ((None, kernel.shape[2]),), x.dtype)
        return tf.ensure_shape(products.concat(), (x.shape[0], kernel.shape[2])), backward

    # A variable would be captured instead of being an argument.
    return grouped(*(tf.convert_to_tensor(ops.convert_to_tensor(a)) for a in (x, kernel)))


def _loop(step: Any, groups: int, shapes: Any, dtype: tf.DType) -> Any:
    """Returns TensorArrays with the results of `step` for each group."""

    def body(group: tf.Tensor, *stored: Any) -> Any:
        parts = step(group)
        return group + 1, *(a.write(group, b) for a, b in zip(stored, parts, strict=True))

    made = [tf.TensorArray(dtype, groups, element_shape=s, infer_shape=False) for s in shapes]
    return tf.while_loop(lambda group, *_: group < groups, body, (0, *made))[1:]
