"""The failures of a child process that its parent is told about."""


class ChildError(RuntimeError):
    """A child crashed, or gave no answer in time; the message is one line."""

    kind = "crashed"


class OutOfMemory(ChildError):
    """A child asked for more memory than there is, or than it may have."""

    kind = "out_of_memory"


class LeftOut(ChildError):
    """Raised where a child's job has no meaning on its backend or device."""

    kind = "left_out"


KINDS = {kind.kind: kind for kind in (ChildError, OutOfMemory, LeftOut)}
REFUSED = "refused"
