"""`kmodels parity`: where two backends part while they train one model from one seed."""

from kmodels.parity.compare import Difference, Stage
from kmodels.parity.run import Options, Side, run, show

__all__ = ["Difference", "Options", "Side", "Stage", "run", "show"]
