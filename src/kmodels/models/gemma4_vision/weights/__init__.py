"""The files of other packages that hold a Gemma 4 with its vision half."""
