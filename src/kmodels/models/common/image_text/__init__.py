"""What models of images and text share before the model: pixels, texts with images, and batches."""
