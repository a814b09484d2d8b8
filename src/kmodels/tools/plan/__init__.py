"""`kmodels plan`: the memory and traffic of a training step, before anything is allocated."""

from kmodels.tools.plan.estimate import Setup
from kmodels.tools.plan.step import DOUBT, Plan, Saving, check, show

__all__ = ["DOUBT", "Plan", "Saving", "Setup", "check", "show"]
