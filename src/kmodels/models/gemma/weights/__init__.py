"""Other programs' files as Gemma's weights."""
