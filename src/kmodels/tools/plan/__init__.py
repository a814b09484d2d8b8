"""What a training step will need, told before anything is allocated: on one device or on many."""

from kmodels.memory.sizes import Setup
from kmodels.tools.plan.show import show
from kmodels.tools.plan.step import DOUBT, Plan, Saving, check

__all__ = ["DOUBT", "Plan", "Saving", "Setup", "check", "show"]
