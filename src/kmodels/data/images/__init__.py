"""Images: folders and sources of them, augmentation, and the loader."""
