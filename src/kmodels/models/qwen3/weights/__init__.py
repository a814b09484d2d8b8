"""Other programs' files as Qwen 3's weights."""
