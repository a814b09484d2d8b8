"""Other programs' files as weights of Vision Transformers."""
