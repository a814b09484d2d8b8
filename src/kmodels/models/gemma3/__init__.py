"""Gemma 3 with images."""
