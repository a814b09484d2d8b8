"""`kmodels parity`: where two backends part while they train one model from one seed."""

from kmodels.parity.compare import Difference, Stage
from kmodels.parity.options import Options, Side
from kmodels.parity.report import show
from kmodels.parity.trace import run

__all__ = ["Difference", "Options", "Side", "Stage", "run", "show"]
