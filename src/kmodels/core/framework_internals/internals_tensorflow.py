"""Private names of TensorFlow, each behind a function with a name of its own."""

from tensorflow.python.eager import record


def may_record() -> bool:
    """Tells whether a `tf.GradientTape` or a graph may ask for the gradient of what runs now."""
    return record.could_possibly_record()
