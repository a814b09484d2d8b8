"""The pages of runs: what their folders hold, and the templates that show it."""
