"""Optimizers, their groups of parameters, and learning rate schedules."""
