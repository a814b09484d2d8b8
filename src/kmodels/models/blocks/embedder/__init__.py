"""Embedders, which give one vector for each text, and the files of sentence-transformers."""
