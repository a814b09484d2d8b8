"""Other programs' files as the weights of CLIP's text tower."""
