"""The base of all other packages: errors, files, the dispatcher, the boundary to Keras."""
