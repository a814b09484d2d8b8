"""Work in blocks on TensorFlow, one after the other, forward and backward.

TensorFlow's executor starts what has its inputs: nothing but dependencies keeps it from computing
all blocks at once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from kmodels.ops._attention_blockwise import Block


def blockwise(
    function: Callable[..., Any],
    blocks: Sequence["Block"],
    tensors: tuple[Any, Any, Any],
    others: Any,
) -> Any:
    """See `RecomputeBackend.blockwise`; gradients are added up block by block."""

    @tf.custom_gradient
    def run(*tensors: tf.Tensor) -> Any:
        outputs: list[tf.Tensor] = []
        for block in blocks:
            with tf.control_dependencies(outputs[-1:]):
                outputs.append(function(*placed(block), *tensors, others))

        def backward(gradient: tf.Tensor) -> list[tf.Tensor]:
            totals: list[tf.Tensor] = []
            for block in blocks:
                with tf.control_dependencies(totals or [gradient]):
                    own = [tf.identity(x) for x in tensors]
                    part = gradient[:, block.start : block.start + block.size]
                    found = slopes(partial(function, *placed(block)), own, others, part)
                    pairs = zip(totals, found, strict=True)
                    totals = [a + b for a, b in pairs] if totals else found
            return totals

        return tf.concat(outputs, axis=1), backward

    return run(*tensors)


def slopes(
    function: Callable[..., Any], tensors: list[tf.Tensor], others: Any, gradient: tf.Tensor
) -> list[Any]:
    """Returns the gradients of `function(*tensors, others)`."""
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        output = function(*tensors, others)
    found = tape.gradient([output], tensors, [gradient])
    if found[0] is not None:
        return found

    # Eager forward mode asks for gradients where it lets no tape record.
    def of_graph(gradient: tf.Tensor, *tensors: tf.Tensor) -> Any:
        return tf.gradients(function(*tensors, others), tensors, gradient)

    return tf.function(of_graph)(gradient, *tensors)


def placed(block: "Block") -> tuple[tf.Tensor, tf.Tensor, int, int]:
    """Returns a block whose places the graph does not know.

    Otherwise TensorFlow would fold the masks of all blocks into constants, which it keeps.
    """
    start, low = (
        tf.raw_ops.PlaceholderWithDefault(input=tf.constant(x, tf.int32), shape=())
        for x in (block.start, block.low)
    )
    return start, low, block.size, block.width
