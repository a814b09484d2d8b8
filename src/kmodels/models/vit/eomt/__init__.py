"""EoMT: a ViT whose last blocks carry queries, each of which becomes a mask with a class."""
