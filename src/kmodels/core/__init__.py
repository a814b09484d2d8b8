"""What every other room stands on: errors, files, the dispatcher, the boundary to Keras."""
