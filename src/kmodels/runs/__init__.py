"""Runs of recipes: settings, the runner, its results, plots and report."""
