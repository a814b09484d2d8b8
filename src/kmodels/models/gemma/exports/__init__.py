"""Gemma's weights as other programs' files."""
