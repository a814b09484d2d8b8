"""Many devices: a mesh by name, over `keras.distribution`."""

from kmodels.distribution.mesh import check_batch, parse_mesh, use_mesh

__all__ = ["check_batch", "parse_mesh", "use_mesh"]
