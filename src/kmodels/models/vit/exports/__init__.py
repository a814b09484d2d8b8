"""Vision Transformers' weights as other programs' files."""
