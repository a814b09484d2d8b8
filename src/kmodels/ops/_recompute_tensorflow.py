"""Blocks and rows whose backward pass recomputes them, on TensorFlow.

TensorFlow would start unrolled blocks as soon as their inputs exist, and fold their masks into
constants that stay in memory. A loop with one iteration at a time does neither, and its graph does
not grow with the length.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from kmodels.ops._recompute import Block, Loop, loops


def blockwise(
    function: Callable[..., Any],
    blocks: Sequence[Block],
    tensors: tuple[Any, Any, Any],
    others: Any,
) -> Any:
    """See `RecomputeBackend.blockwise`; gradients are added up block by block."""
    cut = loops(blocks)

    @tf.custom_gradient
    def run(*tensors: tf.Tensor) -> Any:
        outputs: list[tf.Tensor] = []
        for loop in cut:
            with tf.control_dependencies(outputs[-1:]):
                outputs.append(forward(function, loop, tensors, others))

        def backward(gradient: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            with tf.control_dependencies([gradient]):
                totals = [tf.zeros_like(x) for x in tensors[1:]]
            for_query = []
            for loop in cut:
                of_query, *totals = gradients(function, loop, tensors, others, gradient, totals)
                for_query.append(of_query)
            for_key, for_value = totals
            return tf.concat(for_query, axis=1), for_key, for_value

        return tf.concat(outputs, axis=1), backward

    return run(*tensors)


def forward(
    function: Callable[..., Any], loop: Loop, tensors: Sequence[tf.Tensor], others: Any
) -> tf.Tensor:
    """Returns the results of the blocks of a loop, joined."""
    count = len(loop.places)

    def body(number: tf.Tensor, outputs: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        start, low = placed(loop, number)
        own = parts(tensors, start, low, loop)
        output = function(start, low, loop.size, loop.width, *own, others)
        return number + 1, outputs.write(number, output)

    outputs = tf.TensorArray(tensors[2].dtype, count)
    state = tf.while_loop(
        lambda number, _: number < count, body, (tf.constant(0), outputs), parallel_iterations=1
    )
    return joined(state[1])


def gradients(
    function: Callable[..., Any],
    loop: Loop,
    tensors: Sequence[tf.Tensor],
    others: Any,
    gradient: tf.Tensor,
    totals: list[tf.Tensor],
) -> tuple[tf.Tensor, ...]:
    """Returns the gradients of the loop's queries, and totals with those of its keys and values."""
    count = len(loop.places)
    keys: Any = tensors[1].shape[1]

    def body(
        number: tf.Tensor, slopes_of_query: tf.TensorArray, *totals: tf.Tensor
    ) -> tuple[Any, ...]:
        start, low = placed(loop, number)
        own = parts(tensors, start, low, loop)
        run = partial(function, start, low, loop.size, loop.width)
        of_query, *of_others = slopes(run, own, others, sliced(gradient, start, loop.size))
        rest = [[0, 0], [low, keys - low - loop.width], [0, 0], [0, 0]]
        sums = [total + tf.pad(x, rest) for total, x in zip(totals, of_others, strict=True)]
        for total, one in zip(totals, sums, strict=True):
            one.set_shape(total.shape)
        return number + 1, slopes_of_query.write(number, of_query), *sums

    slopes_of_query = tf.TensorArray(tensors[0].dtype, count)
    with tf.control_dependencies(totals):
        first = tf.constant(0)
    _, slopes_of_query, *totals = tf.while_loop(
        lambda number, *_: number < count,
        body,
        (first, slopes_of_query, *totals),
        parallel_iterations=1,
    )
    return joined(slopes_of_query), *totals


def joined(parts: tf.TensorArray) -> tf.Tensor:
    """Returns arrays (B, size, N, H) in one along the second axis."""
    stacked = parts.stack()
    count, batch, size, heads, width = tf.unstack(tf.shape(stacked))
    return tf.reshape(tf.transpose(stacked, (1, 0, 2, 3, 4)), (batch, count * size, heads, width))


def parts(
    tensors: Sequence[tf.Tensor], start: tf.Tensor, low: tf.Tensor, loop: Loop
) -> list[tf.Tensor]:
    """Returns the queries, keys and values of a block."""
    query, *others = tensors
    return [sliced(query, start, loop.size), *(sliced(x, low, loop.width) for x in others)]


def sliced(x: tf.Tensor, start: tf.Tensor, size: int) -> tf.Tensor:
    """Returns so many places of the second axis."""
    batch, _, heads, width = tf.unstack(tf.shape(x))
    part = tf.slice(x, (0, start, 0, 0), (batch, size, heads, width))
    part.set_shape((x.shape[0], size, *x.shape[2:]))
    return part


def slopes(
    function: Callable[..., Any], tensors: Sequence[tf.Tensor], others: Any, gradient: tf.Tensor
) -> list[Any]:
    """Returns the gradients of `function(*tensors, others)`."""
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        output = function(*tensors, others)
    gradients_of_inputs = tape.gradient([output], tensors, [gradient])
    if gradients_of_inputs[0] is not None:
        return gradients_of_inputs

    # In eager forward mode no tape records.
    def of_graph(gradient: tf.Tensor, *tensors: tf.Tensor) -> Any:
        return tf.gradients(function(*tensors, others), tensors, gradient)

    return tf.function(of_graph)(gradient, *tensors)


def placed(loop: Loop, number: tf.Tensor) -> list[tf.Tensor]:
    """Returns the first query and the first key of the block with this number."""
    return tf.unstack(tf.gather(tf.constant(loop.places, tf.int32), number))


def by_rows(function: Callable[..., Any], parts: Sequence[Any], others: Sequence[Any]) -> Any:
    """See `RecomputeBackend.by_rows`; gradients are added up part by part."""
    split = len(parts)

    @tf.custom_gradient
    def run(*tensors: tf.Tensor) -> Any:
        parts, others = tensors[:split], tensors[split:]
        dtype = tf.float64 if parts[0].dtype == tf.float64 else tf.float32
        output = tf.map_fn(
            lambda part: function(*part, *others),
            parts,
            fn_output_signature=tf.TensorSpec(parts[0].shape[1:2], dtype),
            parallel_iterations=1,
        )

        def backward(gradient: tf.Tensor) -> list[tf.Tensor]:
            count = tf.shape(gradient)[0]

            def body(number: tf.Tensor, arrays: Any, totals: Any) -> tuple[Any, ...]:
                own = *(x[number] for x in parts), *others
                of_inputs = slopes(lambda *x: function(*x[:-1]), own, None, gradient[number])
                pairs = zip(own, of_inputs, strict=True)
                of_inputs = [tf.zeros_like(x) if slope is None else slope for x, slope in pairs]
                pairs = zip(arrays, of_inputs[:split], strict=True)
                arrays = [array.write(number, slope) for array, slope in pairs]
                pairs = zip(totals, of_inputs[split:], strict=True)
                return number + 1, arrays, [total + slope for total, slope in pairs]

            arrays = [tf.TensorArray(x.dtype, count, element_shape=x.shape[1:]) for x in parts]
            totals = [tf.zeros_like(x) for x in others]
            _, arrays, totals = tf.while_loop(
                lambda number, *_: number < count,
                body,
                (tf.constant(0), arrays, totals),
                parallel_iterations=1,
            )
            return [*(array.stack() for array in arrays), *totals]

        return output, backward

    # A variable would, eagerly, be one that the function holds.
    return run(*parts, *(tf.convert_to_tensor(x) for x in others))
