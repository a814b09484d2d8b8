"""A cluster of this machine is open to nobody else: its folder, and where its processes listen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, pathlib
from kmodels.distribution.ray import cluster

with cluster.connected({"CPU": 1}) as ray:
    folder = pathlib.Path(ray._private.worker._global_node.get_temp_dir_path()).parent
    print("mode", oct(folder.stat().st_mode)[-3:])
    sockets = set()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            said = "".join((process / name).read_text() for name in ("environ", "cmdline"))
            if str(folder) in said or process.name == str(os.getpid()):
                sockets |= {os.readlink(file)[8:-1] for file in (process / "fd").glob("*")}
        except OSError:
            continue
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in sockets:
                print("listens", words[1].partition(":")[0])
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.needs("ray")
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads the sockets of Linux")
def test_a_cluster_of_this_machine_is_private():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    said = [line.split() for line in done.stdout.splitlines()]
    assert ["mode", "700"] in said, done.stderr[-2000:]
    addresses = [word for kind, word in said if kind == "listens"]
    assert len(addresses) > 3 and set(addresses) <= LOOPBACK
