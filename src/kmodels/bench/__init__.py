"""`kmodels bench`: one model on each backend, in processes that take turns."""

from kmodels.bench.cases import Case, cases
from kmodels.bench.compare import Refused
from kmodels.bench.options import Options, listed, numbers
from kmodels.bench.report import draw, show, write
from kmodels.bench.run import run

__all__ = [
    "Case",
    "Options",
    "Refused",
    "cases",
    "draw",
    "listed",
    "numbers",
    "run",
    "show",
    "write",
]
