"""Parts that models of images and texts share."""
