"""Qwen 3's weights as other programs' files."""
