"""Other programs' files as the weights of SigLIP's text tower."""
