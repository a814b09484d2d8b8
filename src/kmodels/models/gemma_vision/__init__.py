"""Gemma 3 and Gemma 4 with images: texts and images in, text out."""
