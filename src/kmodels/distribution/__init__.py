"""Training on many devices: `distribute` puts a mesh in force, on the engine of each backend."""

from kmodels.distribution.layout import register
from kmodels.distribution.mesh import Mesh, check_batch, parse_mesh
from kmodels.distribution.plan import ParallelPlan, Plan, current, distribute

__all__ = [
    "Mesh",
    "ParallelPlan",
    "Plan",
    "check_batch",
    "current",
    "distribute",
    "parse_mesh",
    "register",
]
