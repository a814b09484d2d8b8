"""The plan of a training step's memory and traffic, before anything is allocated."""

from kmodels.memory.sizes import Setup
from kmodels.tools.plan.show import show
from kmodels.tools.plan.step import DOUBT, Plan, Saving, check

__all__ = ["DOUBT", "Plan", "Saving", "Setup", "check", "show"]
