"""Custom training steps, written once for all backends."""
