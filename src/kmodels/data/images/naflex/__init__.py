"""Images of any aspect ratio as rows of patches (NaFlex), in NumPy."""
