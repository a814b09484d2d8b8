"""The commands behind `kmodels`, and the processes that they start."""
