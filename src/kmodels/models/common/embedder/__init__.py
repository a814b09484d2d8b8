"""Embedders: a backbone that gives one vector for each text, and the files of sentence-transformers."""
