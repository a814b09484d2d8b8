"""Children of one backend each, which compute only while they are asked to.

Keras has one backend per process, so whatever looks at two of them needs two processes. Nothing
here imports Keras: the parent has no backend.
"""

from kmodels.tools.children.failures import ChildError, LeftOut, OutOfMemory
from kmodels.tools.children.link import Link
from kmodels.tools.children.parent import Child, installed, stopped_by_signals

__all__ = [
    "Child",
    "ChildError",
    "LeftOut",
    "Link",
    "OutOfMemory",
    "installed",
    "stopped_by_signals",
]
