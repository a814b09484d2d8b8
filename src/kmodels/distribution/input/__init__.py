"""Input of several processes: each feeds its own rows of every batch."""
