"""The `kmodels` command in this process."""

import pytest

from kmodels.tools import cli


def run(*arguments: object) -> object:
    """Returns the exit code of a command line."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(argument) for argument in arguments])
    return stopped.value.code
