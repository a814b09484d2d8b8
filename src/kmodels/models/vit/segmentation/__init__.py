"""Dense prediction: a class for each pixel of an image."""
