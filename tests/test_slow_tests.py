"""The list of slow tests names tests that are there and that may be left out."""

import pytest

from slow_tests import ROOT, SECONDS, may_wait, read_list

pytestmark = pytest.mark.once


def test_each_line_names_a_test_that_may_wait():
    slow = read_list()
    assert slow and min(slow.values()) >= SECONDS
    gone = []
    for name in slow:
        file, function = name.split("[")[0].split("::")
        path = ROOT / file
        if not path.is_file() or f"def {function}(" not in path.read_text():
            gone.append(name)
    assert not gone, f"not there any more: {gone}; take them out of tests/slow_tests.txt"
    kept = [name for name in slow if not may_wait(name)]
    assert not kept, f"what only one backend can get wrong is never left out: {kept}"
