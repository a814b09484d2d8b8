"""Vision Transformers (Dosovitskiy et al. 2021) and their common variants."""
