"""`kmodels bench`: one model on each backend, in processes that take turns."""

from kmodels.bench.cases import Case, make_cases
from kmodels.bench.compare import Refused
from kmodels.bench.options import Options, listed, numbers
from kmodels.bench.report import draw, show, write
from kmodels.bench.turns import run

__all__ = [
    "Case",
    "Options",
    "Refused",
    "draw",
    "listed",
    "make_cases",
    "numbers",
    "run",
    "show",
    "write",
]
