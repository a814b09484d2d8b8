"""The vision halves of Gemma 4: patches of images of any shape to the features in a text."""
