"""`kmodels parity`: where two backends part while they train one model from one seed."""

from kmodels.tools.parity.compare import Difference, Stage
from kmodels.tools.parity.options import ParityOptions, Side
from kmodels.tools.parity.report import show
from kmodels.tools.parity.trace import run

__all__ = ["Difference", "ParityOptions", "Side", "Stage", "run", "show"]
