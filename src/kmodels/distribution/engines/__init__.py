"""The engines: how each backend trains on many devices."""
