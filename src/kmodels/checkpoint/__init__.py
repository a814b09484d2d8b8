"""Checkpoints: how a run is saved, found again and continued."""
