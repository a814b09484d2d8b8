"""Private names of TensorFlow, and the lines that it logs while it is imported.

TensorFlow's C++ code writes a dozen lines about CPU instructions and missing GPUs to stderr. The
ones from before its logging is set up ignore TF_CPP_MIN_LOG_LEVEL, so they are removed from the
output of the import; warnings and errors stay. One error is no error: a machine without NVIDIA's
driver gets a line about cuInit when TensorFlow first looks for devices. So the import looks for
them at once, and that line is removed too. TF_CPP_MIN_LOG_LEVEL=0 shows all lines.
"""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Lines of information, the line that announces them, and the error of a missing NVIDIA driver
# (303: the driver's library was not found).
_INFORMATION = re.compile(
    rb"I\d{4} |WARNING: All log messages before absl::|E\d{4} .*failed call to cuInit.*\(303\)"
)


def hide_information() -> None:
    """Hides lines of information from now on, including those of TensorFlow's import."""
    if os.environ.setdefault(_LOG_LEVEL, "1") != "0" and "tensorflow" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds TensorFlow as Python does, and runs its import without those lines."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of TensorFlow; None for any other module."""
        if fullname != "tensorflow":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: _without_information(run, module)
        return spec


def _without_information(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            run(module)
            module.config.list_physical_devices()
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            written.seek(0)
            left = [line for line in written if not _INFORMATION.match(line)]
            os.write(2, b"".join(left))


def may_record() -> bool:
    """Returns True if a `tf.GradientTape` or a graph may ask for the gradient of this call."""
    from tensorflow.python.eager import record

    return record.could_possibly_record()
