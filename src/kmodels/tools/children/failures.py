"""What can go wrong in a child, as its parent is told."""


class ChildError(RuntimeError):
    """A child crashed, or gave no answer in time; the message is one line."""

    kind = "crashed"


class OutOfMemory(ChildError):
    """A child asked for more memory than there is, or than it may have."""

    kind = "out_of_memory"


class LeftOut(ChildError):
    """What a child was to do has no meaning on its backend or device; nothing is wrong."""

    kind = "left_out"


KINDS = {kind.kind: kind for kind in (ChildError, OutOfMemory, LeftOut)}
REFUSED = "refused"
