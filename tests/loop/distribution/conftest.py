"""What the tests of this folder share."""

import pytest

from kmodels.distribution import distribute


@pytest.fixture(autouse=True)
def _no_mesh_left():
    yield
    distribute(None)
