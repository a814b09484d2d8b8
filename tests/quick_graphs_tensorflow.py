"""Graphs of small models are traced and begun in less time than TensorFlow takes for large ones.

A test traces a graph for a few steps, so what TensorFlow does once per graph is most of its time.
"""

from pathlib import Path

import tensorflow as tf
from tensorflow.python.util import tf_stack

TESTS = Path(__file__).resolve().parent
# Folders and files whose subject is what a compiled step computes or costs: their graphs go through
# all rewrites, which change last bits. So do those of users and of child processes. A test that
# begins a run in a child process and compares bits in its own belongs here.
REWRITTEN = (
    *("numerics/core/", "numerics/losses/", "numerics/ops/", "numerics/overrides/"),
    *("numerics/transforms/", "numerics/layers/test_remat", "numerics/test_optimizer"),
    *("loop/training/", "programs/", "nightly/"),
)


def keep_no_stacks() -> None:
    """Has all operations name one stack as their origin; a test shows its own where it fails.

    The stack of a step in a test is deep, and TensorFlow walks along it for each operation.
    """
    if hasattr(tf_stack, "extract_stack"):
        one = tf_stack.extract_stack()
        tf_stack.extract_stack = lambda stacklevel=1: one


def rewrite_graphs_of(path: Path) -> None:
    """Turns the rewrites of graphs on or off for a file of tests, by its folder."""
    place = path.resolve().relative_to(TESTS).as_posix()
    chosen = {"disable_meta_optimizer": not place.startswith(REWRITTEN)}
    tf.config.optimizer.set_experimental_options(chosen)
