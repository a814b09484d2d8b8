"""What a training step will need, told before anything is allocated: on one device or on many."""

from kmodels.plan.show import show
from kmodels.plan.step import DOUBT, Plan, Saving, check
from kmodels.training.footprint import Setup

__all__ = ["DOUBT", "Plan", "Saving", "Setup", "check", "show"]
