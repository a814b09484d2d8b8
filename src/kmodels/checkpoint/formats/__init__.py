"""Checkpoints in the formats of Keras and Orbax."""
