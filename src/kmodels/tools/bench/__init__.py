"""`kmodels bench`: one model on each backend, in processes that take turns."""

from kmodels.tools.bench.cases import Case, make_cases
from kmodels.tools.bench.compare import Refused
from kmodels.tools.bench.options import BenchOptions, listed, numbers
from kmodels.tools.bench.report import draw, show, write
from kmodels.tools.bench.turns import run
from kmodels.tools.children import installed

__all__ = [
    "BenchOptions",
    "Case",
    "Refused",
    "draw",
    "installed",
    "listed",
    "make_cases",
    "numbers",
    "run",
    "show",
    "write",
]
