"""The systems that `vit_train.py` compares, each in a process of its own, see `child.py`.

The module of a system has `train(settings, pace, **options)`: it builds the model with the shared
weights, tells `pace.ready` the facts that the comparison rests on, and calls `pace` with the loss
after each step. `parent`, `measure`, `compare` and `results` are the other side, which asks them.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ALL = ("jax", "torch", "tensorflow")
BOTH = ("float32", "bfloat16")
REFERENCE = "kmodels"


@dataclass(frozen=True)
class System:
    """A system that trains, and how it does.

    module: in this folder.
    about: one line for the results.
    options: arguments of its `train`.
    environment: variables of its process.
    tolerated: facts that may differ from the reference's, because `about` says so.
    """

    module: str
    about: str
    backends: tuple[str, ...] = ALL
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    precisions: tuple[str, ...] = BOTH
    tolerated: tuple[str, ...] = ()


SYSTEMS = {
    REFERENCE: System("kmodels_vit", "model.fit"),
    "kmodels_generic": System(
        "kmodels_vit", "model.fit, no overrides", environment={"KMODELS_GENERIC_OPS": "all"}
    ),
    "kmodels_compiled": System(
        "kmodels_vit",
        "model.fit, jit_compile=True: blocks under torch.compile",
        ("torch",),
        {"compiled": True},
    ),
    "kmodels_bare": System(
        "kmodels_vit", "the framework's own loop and optimizer in place of fit", options={"fit": 0}
    ),
    "keras_tutorial": System(
        "keras_tutorial", "model.fit; the tutorial's code with a class token and a linear head"
    ),
    "keras_hub": System("keras_hub_vit", "model.fit"),
    "flax": System("flax_vit", "linen and optax, one jitted step", ("jax",)),
    "tensorflow": System("tensorflow_vit", "tf.function", ("tensorflow",)),
    "tensorflow_xla": System(
        "tensorflow_vit", "tf.function(jit_compile=True)", ("tensorflow",), {"xla": True}
    ),
}
for _kind in ("eager", "sdpa"):
    for _package in ("transformers", "timm"):
        _name, _module = f"{_package}_{_kind}", f"{_package}_vit"
        _options = {"attention": _kind}
        _about = f"{_kind} attention, autocast in bfloat16"
        SYSTEMS |= {
            _name: System(_module, _about, ("torch",), _options),
            f"{_name}_compiled": System(
                _module, f"{_about}, torch.compile", ("torch",), {**_options, "compiled": True}
            ),
            f"{_name}_narrow": System(
                _module,
                f"{_kind} attention, weights and optimizer in bfloat16",
                ("torch",),
                {**_options, "narrow": True},
                precisions=("bfloat16",),
                tolerated=("variables",),
            ),
        }
SYSTEMS["kmodels_narrow"] = System(
    "kmodels_vit",
    "model.fit, weights and optimizer in bfloat16",
    options={"narrow": True},
    precisions=("bfloat16",),
    tolerated=("variables",),
)
# transformers has no dropout after GELU; the systems above add it. This one is as it comes.
SYSTEMS["transformers_as_is"] = System(
    "transformers_vit",
    "eager attention, no dropout after GELU",
    ("torch",),
    {"attention": "eager", "complete": False},
)


# The source tree of another revision, to see whether a change made `fit` slower or larger.
BEFORE = os.environ.get("KMODELS_BEFORE")
if BEFORE:
    _path = [str(Path(__file__).resolve().parents[1]), str(Path(BEFORE) / "src")]
    _environment = {"PYTHONPATH": os.pathsep.join(_path)}
    SYSTEMS["kmodels_before"] = System(
        "kmodels_vit", "model.fit of the revision in KMODELS_BEFORE", environment=_environment
    )


def systems(backend: str, precision: str) -> list[str]:
    """Names of what runs on a backend in a precision, the reference first."""
    return [
        name
        for name, system in SYSTEMS.items()
        if backend in system.backends and precision in system.precisions
    ]
