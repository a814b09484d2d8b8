"""Training: optimizers, schedules, checkpoints, custom steps, and the files of a run.

Nothing is imported until it is asked for, because the rooms that these names come from import
`kmodels.training` themselves.
"""

import importlib
from typing import Any

_EXPORTS = {
    "SCHEDULES": "training.optimizers",
    "SGD": "training.optimizers",
    "AdamW": "training.optimizers",
    "CLIPLoss": "training.losses",
    "Checkpoint": "checkpoint.callback",
    "ContrastiveLoss": "training.losses",
    "DINOLoss": "training.losses",
    "GRPOLoss": "training.preference",
    "Interrupted": "checkpoint.preemption",
    "KTOLoss": "training.preference",
    "KTOResult": "training.preference",
    "Lamb": "training.optimizers",
    "MeanIoU": "training.metrics",
    "MixedBinaryCrossentropy": "training.losses",
    "MomentumSGD": "training.optimizers",
    "Muon": "training.optimizers",
    "OptaxOptimizer": "training.optax",
    "PixelCrossentropy": "training.losses",
    "PreferenceLoss": "training.preference",
    "PreferenceResult": "training.preference",
    "Rollouts": "training.rollouts",
    "Runner": "runs.runner",
    "SetCriterion": "training.set_criterion",
    "SigLIPLoss": "training.losses",
    "StepCallbacks": "training.step_loss",
    "TrainStep": "training.train_step",
    "WarmupSchedule": "training.optimizers",
    "WeightAverage": "training.objectives",
    "WholeBatches": "training.loop",
    "average_precision": "training.metrics",
    "group_advantages": "training.preference",
    "load_keras_file": "checkpoint.keras_file",
    "load_orbax": "checkpoint.orbax",
    "restore_newest": "checkpoint.manager",
    "save_orbax": "checkpoint.orbax",
    "track_step_loss": "training.step_loss",
}

__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"kmodels.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'kmodels.training' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
