"""The one line that spreads a run over devices."""

from typing import overload

from kmodels.core.dispatch import backend, backend_module
from kmodels.core.errors import InputError
from kmodels.distribution import processes
from kmodels.distribution.engines.engine import EngineBackend
from kmodels.distribution.mesh import check_batch, fill, parse_mesh
from kmodels.distribution.plan import ParallelPlan


@overload
def distribute(spec: str, batch_size: int | None = None) -> ParallelPlan: ...
@overload
def distribute(spec: None, batch_size: int | None = None) -> None: ...
@overload
def distribute(spec: str | None, batch_size: int | None = None) -> ParallelPlan | None: ...
def distribute(spec: str | None, batch_size: int | None = None) -> ParallelPlan | None:
    """Spreads what is built from now on over the devices of a mesh.

    Call it once, before the model is built: variables keep the place where they were made. The
    order is distribute, build or load, `enable_lora`, `plan.prepare`, `compile`, `fit`.

        plan = kmodels.distribution.distribute("data=4,model=2")
        model = plan.prepare(kmodels.models.ViTImageClassifier.from_preset("vit_debug"))

    Args:
        spec: axes and lengths, as `parse_mesh` reads them; -1 takes the devices that are left.
            None takes a mesh back.
        batch_size: rows of a global batch, checked here where it is given.

    Returns:
        The plan, which is `current()` from now on; None for None.

    Raises:
        InputError: for a wrong mesh, too few devices, a batch that does not divide, or what the
            backend cannot do.
    """
    if spec is None:
        if (former := processes.current()) is not None:
            processes.set_current(None)
            former.engine.leave()
        return None
    mesh = parse_mesh(spec)
    if batch_size is not None:
        check_batch(mesh, batch_size)
    module = backend_module("kmodels.distribution.engines.engine", EngineBackend, optional=True)
    if module is None:
        raise InputError(
            f"a mesh ({spec}) is not supported on {backend()} yet; set KERAS_BACKEND=jax or leave "
            "the mesh out"
        )
    if mesh.sequence != 1 and module.NO_SEQUENCE is not None:
        raise InputError(
            f"the mesh {mesh} cuts rows by their tokens, which is not supported on {backend()}: "
            f"{module.NO_SEQUENCE}; set KERAS_BACKEND=jax, or leave sequence out"
        )
    processes.join()
    mesh = fill(mesh, module.devices(), module.MORE)
    if batch_size is not None:
        check_batch(mesh, batch_size)
    distribute(None)
    plan = ParallelPlan(mesh, module.use(mesh))
    processes.set_current(plan)
    return plan
