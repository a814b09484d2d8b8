"""The environments of the tests: their versions, and the processes that make and use them."""

import os
import re
import signal
import threading
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import environments

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("backend", environments.BACKENDS)
def test_the_lowest_versions_are_the_floors_of_the_package(backend):
    pins = [Requirement(pin) for pin in environments.floors(f"{backend},test")]
    texts = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][backend]]
    wanted = {floor.name: floor for floor in map(Requirement, texts)}
    assert [pin.name for pin in pins] == [*wanted]
    for pin in pins:
        (exact,), (floor,) = pin.specifier, wanted[pin.name].specifier
        assert (exact.operator, floor.operator) == ("==", ">=")
        assert exact.version == floor.version
    assert wanted.keys() & set(environments.BACKENDS) == {backend}


def test_constraints_are_above_the_floors():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {
        pin.name: pin.specifier
        for pin in map(Requirement, (line for line in lines if line and line[0] != "#"))
    }
    for backend in environments.BACKENDS:
        for text in environments.floors(backend):
            name, floor = text.split("==")
            (version,) = pinned[name]
            assert Requirement(f"{name}>={floor}").specifier.contains(version.version)


@pytest.mark.parametrize("package", ["torch", "torchvision"])
def test_constraints_allow_the_builds_for_cpus_and_for_cuda(package):
    """The plain index has one of them, PyTorch's own the other."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (line,) = (line for line in lines if re.match(rf"{package}==", line))
    pin = Requirement(line)
    assert pin.marker is None
    version = line.partition("==")[2]
    for build in ("", "+cpu", "+cu130"):
        assert pin.specifier.contains(f"{version}{build}")


@pytest.mark.parametrize("kind", environments.VERSIONS)
def test_other_versions_have_environments_of_their_own(kind):
    for backend in environments.BACKENDS:
        assert environments.ENVIRONMENTS[f"{kind}-{backend}"] == environments.ENVIRONMENTS[backend]


def test_an_interrupt_ends_what_runs_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "_interrupted", threading.Event())
    reached_their_limit = []

    def sleep(name):
        log = tmp_path / f"{name}.log"
        environments.run_logged(name, ["sleep", "60"], log, lambda text: text, limit=20)
        reached_their_limit.append(name)

    interrupt = threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        environments.side_by_side(sleep, ["one", "other"], 2)
    assert not reached_their_limit
