"""Runs on a cluster of several nodes, all on this machine, of which nodes go and come.

python node_cases.py FOLDER NAME...  a driver: the cases of these names, on one cluster
"""

import json
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ray_cases import await_checkpoint, in_workers, once

# After these steps a node goes, and where another one is to come, one comes.
GOES, COMES = 5, 7


@contextmanager
def cluster_of(nodes):
    """A cluster whose head has no CPU, and each other node one."""
    from kmodels.distribution.ray.cluster import check_installed

    check_installed()
    # Names of sockets have to be short. Ray notes there which cluster it has started last.
    folder = tempfile.mkdtemp(prefix="kmr")
    os.environ["RAY_TMPDIR"] = folder
    (Path(folder) / "ray").mkdir()
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=1)
        ray.init(
            address=cluster.address,
            logging_level="ERROR",
            logging_config=ray.LoggingConfig(log_level="ERROR"),
        )
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def ask(folder, what):
    """Has the driver do something, and waits for the end of this worker."""
    import ray

    path = Path(folder) / what
    path.with_suffix(".new").write_text(ray.get_runtime_context().get_node_id())
    path.with_suffix(".new").rename(path)
    time.sleep(600)


def go(folder, name, step, rank):
    """The node of the last worker goes."""
    note(folder, step)
    if step == GOES and rank == 1 and once(folder, "gone"):
        await_checkpoint(folder, name, step)
        ask(folder, "go")


def go_and_come(folder, name, step, rank):
    """The node of the last worker goes; when one worker is left, another node comes."""
    from kmodels.core import processes

    go(folder, name, step, rank)
    if step == COMES and processes.count() == 1 and once(folder, "came"):
        await_checkpoint(folder, name, step)
        ask(folder, "come")


def note(folder, step):
    from kmodels.core import processes

    if processes.is_rank_zero():
        with (Path(folder) / "steps").open("a") as file:
            file.write(json.dumps([processes.count(), step]) + "\n")


def serve(cluster, folder, done):
    """Does what workers ask for, in the main thread, as Ray's nodes want."""
    asked = {"go", "come"}
    while not done():
        time.sleep(0.1)
        for what in [what for what in asked if (folder / what).exists()]:
            asked.remove(what)
            if what == "come":
                cluster.add_node(num_cpus=1)
                continue
            found = (folder / what).read_text()
            (node,) = (node for node in cluster.worker_nodes if node.node_id == found)
            cluster.remove_node(node, allow_graceful=False)


def spare(ray, place, backend):
    """Two workers on three nodes."""
    return ray.run(
        in_workers, (place, ("vit",), go), workers=2, storage=place / "run", backend=backend
    )


def elastic(ray, place, backend):
    """One worker or two on two nodes, then on one, then on two."""
    return ray.run(
        in_workers, (place, ("vit",), go_and_come), workers=(1, 2), storage=place / "run",
        backend=backend, scaling={"elastic_resize_monitor_interval_s": 1},
    )  # fmt: skip


CASES = {"spare": spare, "elastic": elastic}


def drive(folder, names):
    from kmodels.distribution import ray

    found = {}
    with cluster_of(2 + any(name.startswith("spare") for name in names)) as cluster:
        for name in names:
            case, backend = name.split("-")
            place = Path(folder) / name
            place.mkdir(parents=True)
            begun = time.monotonic()
            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(CASES[case], ray, place, backend)
                serve(cluster, place, running.done)
            result = running.result()
            found[name] = {
                "checkpoints": [found.path for found, _ in result.best_checkpoints],
                "seconds": round(time.monotonic() - begun, 1),
            }
            print(name, found[name], file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    drive(sys.argv[1], sys.argv[2:])
