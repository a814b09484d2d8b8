"""Steps on TensorFlow, which runs them without Python once they are traced."""

import tensorflow as tf


def tracing() -> bool:
    """Returns whether TensorFlow is tracing a function just now."""
    return tf.inside_function()
