"""What SLURM, SkyPilot, JobSet or nothing are to a launch file, on this machine as two nodes.

python tests/nightly/launch/pretended_clusters.py sbatch SCRIPT STATE
python tests/nightly/launch/pretended_clusters.py sky TASK.yaml
python tests/nightly/launch/pretended_clusters.py jobset JOBSET.yaml
python tests/nightly/launch/pretended_clusters.py machines SCRIPT

Each runs a job, and again where the cluster would; the last line is the exit status of each time,
as JSON. Tests start it by `launch`, which ends what is left. `srun` and `scontrol`, which a SLURM
script calls, are this file too.
"""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch import descendants

NODES = ("127.0.0.1", "127.0.0.2")
STATE = "PRETENDED_SLURM"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def together(commands: Sequence[Sequence[str]], envs: Sequence[Mapping[str, str]]) -> int:
    """Runs commands side by side; where one fails the others are ended.

    Returns:
        0, or the status of the first that failed, as a shell has it.
    """
    running = [
        subprocess.Popen(command, env=dict(env), start_new_session=True)
        for command, env in zip(commands, envs, strict=True)
    ]
    while codes := [process.poll() for process in running]:
        if failed := [code for code in codes if code]:
            for process in running:
                end(process)
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            break
        time.sleep(0.05)
    return 0


def end(process: subprocess.Popen) -> None:
    """Kills a process and all that it has started, as a container or a cgroup is ended."""
    for pid in [*reversed(descendants(process.pid)), process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


def without(*prefixes: str) -> dict[str, str]:
    """The environment, less what this machine itself may have of a cluster's."""
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


# === Machines without a cluster ===


def machines(script: str) -> int:
    """Runs a script on each, as torchrun asks for; their addresses differ."""
    # Where the command line says nothing, torchrun reads its options from such variables.
    envs = [{**os.environ, "PET_LOCAL_ADDR": node} for node in NODES]
    return together([["bash", script]] * len(NODES), envs)


# === SLURM ===


def sbatch(script: str, state: str) -> list[int]:
    """Runs a batch script on its first node, again for as long as it puts itself into the queue.

    It sees what https://slurm.schedmd.com/sbatch.html names under OUTPUT ENVIRONMENT VARIABLES, and
    nothing else that begins with SLURM_.
    """
    programs = Path(state) / "bin"
    programs.mkdir(parents=True)
    lines = {name: f'exec {sys.executable} {__file__} {name} "$@"' for name in ("srun", "scontrol")}
    lines["python"] = f'exec {sys.executable} "$@"'
    lines["torchrun"] = f'exec {sys.executable} -m torch.distributed.run "$@"'
    for name, line in lines.items():
        (programs / name).write_text(f"#!/bin/bash\n{line}\n")
        (programs / name).chmod(0o755)
    options = dict(re.findall(r"(?m)^#SBATCH --([\w-]+)(?:=(\S+))?", Path(script).read_text()))
    per_node = int(options["ntasks-per-node"])
    told = {
        # JAX chooses its port by the number of the job.
        "SLURM_JOB_ID": os.getpid(),
        "SLURM_JOB_NODELIST": "127.0.0.[1-2]",
        "SLURM_NNODES": options["nodes"],
        # It stands there where --ntasks-per-node alone was given, and srun takes it for --ntasks.
        "SLURM_NTASKS": int(options["nodes"]) * per_node,
        "SLURM_NTASKS_PER_NODE": per_node,
        "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
    }
    env = without("SLURM_") | {name: str(value) for name, value in told.items()}
    env |= {STATE: state, "PATH": f"{programs}:{os.environ['PATH']}"}
    requeued, statuses = Path(state) / "requeued", []
    while True:
        statuses.append(subprocess.run(["bash", script], env=env).returncode)
        if not requeued.exists() or "requeue" not in options:
            return statuses
        requeued.unlink()
        env["SLURM_RESTART_COUNT"] = str(len(statuses))


def scontrol(*words: str) -> int:
    """The two uses of it that the script has."""
    if words == ("show", "hostnames", os.environ["SLURM_JOB_NODELIST"]):
        print("\n".join(NODES))
        return 0
    if words == ("requeue", os.environ["SLURM_JOB_ID"]):
        Path(os.environ[STATE], "requeued").touch()
        return 0
    sys.exit(f"scontrol: {words} is not pretended")


def srun(*words: str) -> int:
    """Starts the tasks that options or, without these, the environment ask for."""
    options: dict[str, str] = {}
    while words[0].startswith("--"):
        name, _, value = words[0][2:].partition("=")
        options[name], words = value, words[1:]
    if unknown := options.keys() - {"nodes", "ntasks", "cpus-per-task", "kill-on-bad-exit"}:
        sys.exit(f"srun: {unknown} is not pretended")
    assert options["kill-on-bad-exit"] == "1"
    assert int(options.get("nodes", len(NODES))) == len(NODES) == int(os.environ["SLURM_NNODES"])
    tasks = int(options.get("ntasks", os.environ["SLURM_NTASKS"]))
    per_node = tasks // len(NODES)
    there = int(os.environ["SLURM_CPUS_PER_TASK"]) * int(os.environ["SLURM_NTASKS_PER_NODE"])
    # A task has one CPU where nothing is said.
    if int(options["cpus-per-task"]) * per_node != there:
        sys.exit(f"srun: {tasks} tasks do not share the {there} CPUs of each node")
    step = [
        {
            "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
            "SLURM_STEP_NUM_NODES": len(NODES),
            "SLURM_NTASKS": tasks,
            "SLURM_PROCID": task,
            "SLURM_LOCALID": task % per_node,
            "SLURM_NODEID": task // per_node,
        }
        for task in range(tasks)
    ]
    envs = [{**os.environ, **{name: str(value) for name, value in told.items()}} for told in step]
    return together([words] * tasks, envs)


# === SkyPilot ===


def sky(task: str) -> list[int]:
    """Runs a managed job on all nodes, again as often as its task says where one of them fails."""
    import yaml

    asked = yaml.safe_load(Path(task).read_text())
    told = {
        "SKYPILOT_NODE_IPS": "\n".join(NODES),
        "SKYPILOT_NUM_NODES": str(asked["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": asked["resources"]["accelerators"].rpartition(":")[2],
    }
    assert asked["num_nodes"] == len(NODES)
    ranks = [
        {**without("SKYPILOT_"), **told, "SKYPILOT_NODE_RANK": str(rank)}
        for rank in range(len(NODES))
    ]
    torchrun = f'torchrun() {{ {sys.executable} -m torch.distributed.run "$@"; }}\n'
    command = ["bash", "-e", "-c", torchrun + asked["run"]]
    more = asked["resources"]["job_recovery"]["max_restarts_on_errors"]
    return tried(lambda: together([command] * len(NODES), ranks), more)


# === JobSet ===


def jobset(file: str) -> list[int]:
    """Runs the pods of a set, all of them again where one fails, as often as the set says."""
    import yaml

    spec = yaml.safe_load(Path(file).read_text())["spec"]
    ((job,), pods) = spec["replicatedJobs"], spec["replicatedJobs"][0]["template"]["spec"]
    assert job["replicas"] == 1 and pods["backoffLimit"] == 0
    assert pods["completions"] == pods["parallelism"] == len(NODES)
    (container,) = pods["template"]["spec"]["containers"]
    program, *words = [*container["command"], *container["args"]]
    assert program == "python"
    envs = []
    for index in range(len(NODES)):
        env = without("KERAS_")
        for entry in container["env"]:
            if "valueFrom" in entry:
                assert entry["valueFrom"] == {"fieldRef": {"fieldPath": INDEX}}
            env[entry["name"]] = entry.get("value", str(index))
        envs.append(env)
    command = [sys.executable, *words]
    return tried(
        lambda: together([command] * len(NODES), envs), spec["failurePolicy"]["maxRestarts"]
    )


def tried(run, more: int) -> list[int]:
    """The statuses of a run and of those after it, until one is 0 or there were `more`."""
    statuses = []
    for _ in itertools.repeat(None, more + 1):
        statuses.append(run())
        if statuses[-1] == 0:
            break
    return statuses


KINDS = {
    "srun": srun,
    "scontrol": scontrol,
    "sbatch": sbatch,
    "sky": sky,
    "jobset": jobset,
    "machines": machines,
}

if __name__ == "__main__":
    found = KINDS[sys.argv[1]](*sys.argv[2:])
    if sys.argv[1] in ("srun", "scontrol"):
        sys.exit(found)
    print(json.dumps(found), flush=True)
