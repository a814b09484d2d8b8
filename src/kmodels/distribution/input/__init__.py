"""How batches are divided among the processes of a run."""
