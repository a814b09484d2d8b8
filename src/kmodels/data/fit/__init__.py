"""What `fit` accepts, turned into batches of NumPy arrays."""
