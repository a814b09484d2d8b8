"""The files of other packages that hold a Gemma 3 with its vision encoder."""
