"""Many devices on torch: a process for each, as torchrun starts them.

Every process feeds its own rows of each batch. `data` is DDP, `fsdp` is FSDP2, and `model` is the
ModelParallel of Keras, from 3.16 on.
"""

from kmodels.core import processes, seeds_torch
from kmodels.core.errors import InputError
from kmodels.distribution.engines.ddp_torch import DDPEngine
from kmodels.distribution.engines.engine import Engine
from kmodels.distribution.mesh import Mesh

MORE = "start {0} processes: torchrun --nproc-per-node={0} script.py"
# Found by running it on two processes, see docs/scaling.md.
NO_SEQUENCE = "torch's context_parallel has no causal attention on CPUs, where it could be tested"


def devices() -> int:
    """Returns the number of processes, which have one device each."""
    return processes.count()


def use(mesh: Mesh) -> Engine:
    """Puts a mesh over the processes of the run in force; each of them takes part."""
    if mesh.size != devices():
        raise InputError(
            f"the mesh {mesh} leaves {devices() - mesh.size} of {devices()} processes without "
            f"work; start {mesh.size}, or give data=-1"
        )
    if mesh.model > 1:
        from kmodels.distribution.engines.tensor_parallel_torch import Split

        engine: Engine = Split(mesh)
    elif mesh.fsdp > 1:
        from kmodels.distribution.engines.fsdp_torch import FSDPEngine

        engine = FSDPEngine(mesh)
    else:
        engine = DDPEngine(mesh)
    seeds_torch.draw_as(engine.shard)
    return engine
