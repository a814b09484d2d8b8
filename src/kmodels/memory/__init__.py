"""Memory of a training step: the sizes of its parts, what a backend reports, an estimate."""
