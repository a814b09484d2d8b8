"""What each backend does to train over many devices."""
