"""The launch files: their syntax, and that flags, mesh and devices in them fit each other.

tests/loop/distribution/test_launch_files.py runs them.
"""

import functools
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kmodels.distribution import parse_mesh
from kmodels.runs.recipe import parse
from recipe_modules import load
from refusals import refused

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ROOT / "recipes" / "launch"
SHELL = sorted(LAUNCH.glob("*.sh"))
# What stands for a value of the user's, in a file that is run as it is.
VALUES = {"WEIGHTS": "weights", "DATA": "records.jsonl", "OUT": "runs/gemma"}


def test_every_file_is_looked_at():
    known = {"slurm.sh", "torchrun.sh", "jobset.yaml", "skypilot.yaml"}
    assert {path.name for path in LAUNCH.iterdir()} == known
    assert all(path.stat().st_size < 4096 for path in LAUNCH.iterdir())


def told_by_bash(text):
    """What a shell says about a script."""
    return subprocess.run(
        ["bash", "-n"], input=text, capture_output=True, text=True, check=False
    ).stderr


def test_shell_is_well_formed():
    assert len(SHELL) == 2
    for path in SHELL:
        assert path.read_text().startswith("#!/bin/bash\n") and path.stat().st_mode & 0o111
        assert told_by_bash(path.read_text()) == ""
    assert told_by_bash(read("skypilot.yaml")["run"]) == ""
    assert "unexpected end of file" in told_by_bash("if true; then")


def read(name):
    return yaml.safe_load((LAUNCH / name).read_text())


def started(text):
    """Recipe and arguments of each command, of which there is one in a script."""
    text = re.sub(r"(?m)^\s*#.*$", "", text).replace("\\\n", " ")
    text = re.sub(r"\$\{(\w+):[-?][^}]*\}", lambda match: VALUES.get(match[1], "1"), text)
    words = shlex.split(text[text.index("recipes/") :].split(" ||")[0].split(")\n")[0])
    return words[0], words[1:]


def check(recipe, arguments, devices):
    """The recipe takes the flags, and the mesh is as large as what the file asks for."""
    module = load(Path(recipe).stem)
    given = parse(module.Settings, arguments)
    mesh = parse_mesh(given.mesh)
    assert mesh.size == devices
    assert given.batch_size % devices == 0
    assert given.resume and given.out


def test_scripts_and_skypilot_ask_for_what_the_mesh_has():
    text = (LAUNCH / "slurm.sh").read_text()
    asked = dict(re.findall(r"(?m)^#SBATCH --([\w-]+)=(\S+)", text))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    check(*started(text), int(asked["nodes"]) * int(asked["gpus-per-node"]))
    # One task per GPU's share of the node, or one for all of them.
    assert f"--cpus-per-task={int(asked['cpus-per-task']) * int(asked['gpus-per-node'])}" in text
    assert f"--nproc-per-node={asked['gpus-per-node']}" in text

    text = (LAUNCH / "torchrun.sh").read_text()
    (processes,) = re.findall(r"--nproc-per-node=(\d+)", text)
    check(*started(text), int(processes))

    task = read("skypilot.yaml")
    check(*started(task["run"]), task["num_nodes"] * int(task["resources"]["accelerators"][5:]))


def test_jobset():
    found = read("jobset.yaml")
    (job,) = found["spec"]["replicatedJobs"]
    hosts, template = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
    (container,) = template["containers"]
    devices = hosts["completions"] * container["resources"]["limits"]["nvidia.com/gpu"]
    check(container["command"][1], container["args"], devices)
    assert hosts["completions"] == hosts["parallelism"]
    told = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert told["KERAS_DISTRIBUTION_NUM_PROCESSES"] == str(hosts["completions"])
    name = found["metadata"]["name"]
    address = f"{name}-{job['name']}-0-0.{name}"
    assert told["KERAS_DISTRIBUTION_JOB_ADDRESSES"].startswith(f"{address}:")
    volumes = {volume["name"] for volume in template["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def closed(schema: Any) -> Any:
    """A schema of Kubernetes' in which each field has to be named, as `kubectl apply` asks for."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: closed(part) for key, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        # What it says of metadata is left to all kinds alike.
        schema.setdefault("additionalProperties", False)
    return schema


@functools.cache
def schema(name):
    """What a cluster with JobSet's controller, or SkyPilot, checks of a file."""
    file = {"jobset.yaml": "jobset_v1alpha2.json", "skypilot.yaml": "skypilot_task.json"}[name]
    found = json.loads(Path(__file__).with_name(file).read_text())
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator(closed(found) if name == "jobset.yaml" else found)


@pytest.mark.parametrize("name", ["jobset.yaml", "skypilot.yaml"])
def test_a_file_is_valid(name):
    found = read(name)
    if name == "jobset.yaml":
        assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert [error.message for error in schema(name).iter_errors(found)] == []


POD = "spec.replicatedJobs.0.template.spec.template.spec"


@pytest.mark.parametrize(
    ("file", "place", "name", "value", "said"),
    [
        ("jobset", "spec.failurePolicy", "maxRestart", 3, "'maxRestart' was unexpected"),
        ("jobset", f"{POD}.containers.0", "name", 1, "'string'"),
        ("skypilot", "", "node_count", 2, "'node_count' was unexpected"),
        ("skypilot", "", "num_nodes", "two", "is not of type 'integer'"),
    ],
)
def test_a_field_that_is_refused_is_seen(file, place, name, value, said):
    found = inner = read(f"{file}.yaml")
    for part in filter(None, place.split(".")):
        inner = inner[int(part) if part.isdecimal() else part]
    inner[name] = value
    (error,) = schema(f"{file}.yaml").iter_errors(found)
    assert said in error.message


def test_what_does_not_fit_is_seen():
    with pytest.raises(AssertionError):
        check("recipes/vit.py", ["--mesh=data=2", "--batch-size=8", "--out=o", "--resume"], 4)
    refused("did you mean --mesh", check, "recipes/vit.py", ["--mash=data=2"], 2)
