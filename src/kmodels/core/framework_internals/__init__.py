"""The only place that names what JAX, torch and TensorFlow keep private, a file for each.

`tests/core/framework_internals` has a contract test for each private name in it.
"""
