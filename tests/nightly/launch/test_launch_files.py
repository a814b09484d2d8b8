"""The files of recipes/launch as they stand, on two nodes that are this machine.

Numbers of devices and sizes are made smaller, nothing else, and on JAX the model too. A process is
killed in each run. On torch, the weights at its end are those of a run in which another one died at
another step, bit for bit; on JAX, those of one process up to the order of sums.
"""

import json
import re
import sys
from pathlib import Path

import dying_recipe
import keras
import numpy as np
import pytest
from launch import ROOT, Output, Process, free_port, jax_ranks, launch

from kmodels.distribution import distribute
from kmodels.models import GemmaCausalLM, GemmaCausalLMPreprocessor
from kmodels.runs import recipe
from kmodels.text import demo
from kmodels.text.training import train_tokenizer
from recipe_modules import load
from tolerances import tolerance

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    pytest.skip("processes of TensorFlow do not train together", allow_module_level=True)

# What restarts the processes is torchrun on torch, and the cluster on JAX.
pytestmark = pytest.mark.each_backend
LAUNCH = ROOT / "recipes" / "launch"
CLUSTERS = Path(__file__).with_name("pretended_clusters.py")
DYING = Path(__file__).with_name("dying_recipe.py")
HOST = "127.0.0.1"
GEMMA = "recipes/gemma_lora.py"
# What a run is asked for beside what its file says.
SHORT = "--steps 6 --checkpoint-every 2 --samples {samples} --resume"
SMALL = "--mesh fsdp=2 --batch-size 4 --sequence-length 32"
SLURM = {
    "--nodes=4": "--nodes=2",
    GEMMA: f"{DYING} {ROOT / GEMMA}",
    "--mesh data=4,fsdp=8 --batch-size 64 --sequence-length 2048": SMALL,
    "--resume)": f"{SHORT})",
}
# torchrun starts the processes of a node: SLURM's own numbers stay.
ON_TORCH = {"--nproc-per-node=8": "--nproc-per-node=1", ":29500": ":{port}", "{samples}": "1"}
ON_JAX = {
    "--ntasks-per-node=8": "--ntasks-per-node=1",
    "--gpus-per-node=8": "--gpus-per-node=1",
    "{samples}": "0",
}
SKYPILOT = {
    "H100:8": "H100:1",
    "29500": "{port}",
    "/runs/weights": "weights",
    "/runs/records.jsonl": "records.jsonl",
    "/runs/gemma": "runs/gemma",
    GEMMA: f"{DYING} {ROOT / GEMMA}",
    "--mesh data=2,fsdp=8 --batch-size 32 --sequence-length 2048": SMALL,
    "--resume\n": f"{SHORT}\n",
    "{samples}": "0",
}
JOBSET = {
    "parallelism: 4": "parallelism: 2",
    "completions: 4": "completions: 2",
    'value: "4"': 'value: "2"',
    "vit-host-0-0.vit:12355": "127.0.0.1:{port}",
    "[python, recipes/vit.py]": f"[python, {DYING}, {ROOT / 'recipes' / 'vit.py'}]",
    "--preset=vit_large_patch16_224": "--preset=vit_debug",
    "folder:/data/images": "digits",
    "--mesh=data=32": "--mesh=data=2",
    "--batch-size=2048": "--batch-size=64",
    "/runs/vit": "runs/vit",
    "- --resume": "- --resume\n                    - --steps=6\n"
    "                    - --checkpoint-every=2",
}


def smaller(name: str, folder: Path, changes: dict[str, str]) -> Path:
    """A launch file with other sizes, each of which stands in it once."""
    text = (LAUNCH / name).read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new.replace("{port}", str(free_port())))
    path = folder / name
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    keras.utils.set_random_seed(0)
    tokenizer = train_tokenizer(demo.texts()[:50], 300)
    text = GemmaCausalLMPreprocessor(tokenizer, 32)
    size = tokenizer.vocabulary_size()
    model = GemmaCausalLM.from_preset("gemma3_debug", vocabulary_size=size, preprocessor=text)
    model.save_to_preset(folder / "weights")
    rows = [{"prompt": f"say {i}", "response": f"it is {i}"} for i in range(40)]
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(command: list[str], folder: Path, out: str, rank: int, step: int) -> Output:
    """What is left of a job, one process of which dies after a step."""
    checkpoint = f"{out}/checkpoints/step_{2 * ((step - 1) // 2):08}"
    env = {
        "KMODELS_TEST_DEATH": f"{rank} {step} {folder / checkpoint}",
        "KMODELS_PROCESS_SECONDS": "30",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": jax_ranks(1, 1)[0]["XLA_FLAGS"],
        "WEIGHTS": "weights",
        "DATA": "records.jsonl",
        "OUT": out,
        "KMODELS_TEST_SMALL": "1" if BACKEND == "jax" else None,
        # torchrun.sh asks for it on several machines; slurm.sh says it itself.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1" if command[0] == "machines" else None,
    }
    (output,) = launch([Process(CLUSTERS, command, env, folder)], 240)
    assert (folder / out / "died").exists(), output.stdout + output.stderr
    assert f"resumed from {checkpoint} at step {int(checkpoint[-8:])}" in output.stdout
    return output


def slurm(folder: Path, out: str, rank: int, step: int) -> list[int]:
    """The statuses with which a SLURM job ended."""
    script = smaller("slurm.sh", folder, SLURM | (ON_TORCH if BACKEND == "torch" else ON_JAX))
    output = run(["sbatch", str(script), str(folder / out / "slurm")], folder, out, rank, step)
    return output.result()


def trained(folder: Path, out: str) -> dict:
    """What a run has left."""
    return json.loads((folder / out / "result.json").read_text())


def test_each_file_outlives_a_process(backend, folder):
    {"jax": on_jax, "torch": on_torch}[backend](folder)


def on_torch(folder):
    """torchrun starts all processes again in a job, or the cluster starts the job again."""
    # SLURM's job does not end: torchrun restarts what it has started, in another store.
    assert slurm(folder, "slurm", rank=1, step=5) == [0]
    # SkyPilot's runs again. The first node has the store, which is lost.
    skypilot = smaller("skypilot.yaml", folder, SKYPILOT)
    output = run(["sky", str(skypilot)], folder, "runs/gemma", rank=0, step=3)
    assert output.result() == [1, 0]
    script = smaller("torchrun.sh", folder, several_machines())
    output = run(["machines", str(script)], folder, "torchrun", rank=1, step=3)
    assert output.result() == 0
    one, *others = (trained(folder, out) for out in ("slurm", "runs/gemma", "torchrun"))
    assert one["steps"] == 6 == len(one["step_losses"]) and np.isfinite(one["step_losses"]).all()
    for name in ("weights_digest", "step_losses"):
        assert [other[name] for other in others] == [one[name]] * 2
    assert one["samples"] == [] and not (folder / "slurm" / "model").exists()
    assert (folder / "slurm" / "adapter" / "adapter_model.safetensors").is_file()


def on_jax(folder):
    """The cluster ends the process that is left, and starts all again."""
    assert slurm(folder, "slurm", rank=1, step=5) == [137, 0]
    found = smaller("jobset.yaml", folder, JOBSET)
    # The first one has JAX's coordination service.
    assert run(["jobset", str(found)], folder, "runs/vit", rank=0, step=3).result() == [137, 0]
    for out, expected in (
        ("slurm", alone("gemma_lora", folder, "fsdp=2", 4)),
        ("runs/vit", alone("vit", folder, "data=2", 64)),
    ):
        assert_close(trained(folder, out), expected)


def assert_close(found: dict, expected: dict) -> None:
    """Compares what two runs left."""
    atol = tolerance("losses_of_ranks", "float32")
    for name in ("kernel", "loss"):
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=atol, err_msg=name)


def alone(name: str, folder: Path, mesh: str, batch: int) -> dict:
    """What a run of one process with two devices leaves."""
    flags = f"--mesh={mesh} --batch-size={batch} --steps=6 --checkpoint-every=2".split()
    settings = recipe.parse(load(name).Settings, [*flags, f"--out={folder / 'alone' / name}"])
    whole = recipe.Folder(name, settings.out, settings, False)
    try:
        dying_recipe.train(settings, whole)
    finally:
        distribute(None)
        whole.close()
    return trained(folder, f"alone/{name}")


def several_machines() -> dict[str, str]:
    """What the head of torchrun.sh says for several machines, made smaller."""
    head = (LAUNCH / "torchrun.sh").read_text()
    (flags,) = re.findall(r"in place of\n# --standalone: (--nnodes=4 .*HEAD:29500)", head)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in head
    flags = flags.replace("=4", "=2").replace("HEAD:29500", f"{HOST}:{{port}}")
    return {
        "exec torchrun --standalone --nproc-per-node=8": f"exec {sys.executable} "
        f"-m torch.distributed.run {flags} --nproc-per-node=1",
        f"{GEMMA} \\\n": f"{DYING} {ROOT / GEMMA} ",
        "--mesh fsdp=8 \\\n    --batch-size 16 --sequence-length 2048": SMALL,
        "--resume\n": f"{SHORT}\n".replace("{samples}", "0"),
    }
