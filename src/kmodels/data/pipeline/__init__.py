"""Data that `fit` accepts, turned into batches of NumPy arrays."""
