"""What models of images and text share."""
