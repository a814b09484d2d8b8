"""Keeps what TensorFlow logs while it is imported away from the user of a command.

Its C++ code writes a dozen lines about CPU instructions and missing GPUs to stderr. Those from
before its logging is set up come whatever TF_CPP_MIN_LOG_LEVEL says, so they are taken out of
what the import writes; warnings and errors stay. One error is no error: a machine without NVIDIA's
driver gets a line about cuInit when TensorFlow first looks for devices, so the import looks for
them at once and that line goes too. TF_CPP_MIN_LOG_LEVEL=0 shows all of them.
"""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
# Lines of information, the one that announces them, and the one that says that no driver of NVIDIA
# is there (error 303: the driver's library was not found).
_INFORMATION = re.compile(
    rb"I\d{4} |WARNING: All log messages before absl::|E\d{4} .*failed call to cuInit.*\(303\)"
)


def hide_information() -> None:
    """Hides lines of information from here on, also those of an import of TensorFlow to come."""
    if os.environ.setdefault(VARIABLE, "1") != "0" and "tensorflow" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds TensorFlow where Python does, to be run without its lines."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns how to load TensorFlow; None for any other module."""
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
