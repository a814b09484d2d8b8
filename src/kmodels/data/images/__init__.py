"""Pictures: folders and sources of them, augmentation, and the loader."""
