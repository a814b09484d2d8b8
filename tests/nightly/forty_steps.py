"""All meshes of eight devices beside one, for 40 steps: more than the suite has time for.

KERAS_BACKEND=jax PYTHONPATH=src:tests:tests/loop/distribution \
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python tests/nightly/forty_steps.py

For each model, dtype and mesh: the largest relative difference of the losses, which are running
means of each step, what device 0 holds of weights and slots, and what of them is planned.
"""

import itertools
import math

import keras
import numpy as np
from test_eight_devices import make_gemma, make_vit, train

from kmodels.checkpoint.state import slots
from kmodels.distribution import current, layout
from tolerances import tolerance

MODELS = (("vit", make_vit), ("gemma", make_gemma))
MESHES = ("data=8", "fsdp=8", "data=4,model=2", "data=2,fsdp=4")


class Losses(keras.callbacks.Callback):
    """The loss after each step, with those of its epoch before."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        assert logs is not None
        self.found.append(float(logs["loss"]))


def bytes_of(model):
    """Held by device 0, and planned by the rules: of weights and slots."""
    plan = current()
    assert plan is not None
    cut = {None: 1, "fsdp": plan.mesh.fsdp, "model": plan.mesh.model}
    held = planned = 0
    optimizer = {name: slot for name, slot in slots(model.optimizer).items() if ":" in name}
    weights = {variable.path: variable for variable in model.variables}
    for variable in (*weights.values(), *optimizer.values()):
        held += variable.value.addressable_shards[0].data.nbytes
    for name, variable in (*weights.items(), *optimizer.items()):
        axes = layout.axes_of(weights[name.rpartition(":")[0] or name], plan.mesh)
        planned += variable.value.nbytes // math.prod(cut[axis] for axis in axes)
    return held, planned


def main():
    print("| model | dtype | LoRA | mesh | loss, relative | bytes on device 0 | planned |")
    for (name, make), half, lora in itertools.product(MODELS, (False, True), (False, True)):
        dtype = "bfloat16" if lora else "mixed_bfloat16"
        options = {"dtype": dtype if half else "float32", "lora": lora}
        losses = Losses()
        train(make, None, **options, callbacks=[losses])
        alone = np.array(losses.found)
        assert len(alone) == 40
        for mesh in MESHES:
            losses = Losses()
            _, model = train(make, mesh, **options, callbacks=[losses])
            held, planned = bytes_of(model)
            worst = np.abs(np.array(losses.found) / alone - 1).max()
            row = (name, options["dtype"], lora, mesh, f"{worst:.1e}", held, planned)
            print("|", *(f"{cell} |" for cell in row), flush=True)
            assert worst < tolerance("losses_of_ranks", "bfloat16" if half else "float32")
            assert abs(held / planned - 1) < 0.05


if __name__ == "__main__":
    main()
