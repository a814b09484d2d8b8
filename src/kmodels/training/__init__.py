"""Training: the optimizer, schedules, checkpoints, and what a run writes."""

from kmodels.training.checkpoint import restore_newest
from kmodels.training.checkpointing import Checkpoint
from kmodels.training.evaluation import WholeBatches
from kmodels.training.keras_file import load_keras_file
from kmodels.training.optimizer import SGD, AdamW
from kmodels.training.orbax import load_orbax, save_orbax
from kmodels.training.runner import Runner
from kmodels.training.schedules import SCHEDULES, WarmupSchedule
from kmodels.training.signals import Interrupted
from kmodels.training.step_loss import StepCallbacks, track_step_loss
from kmodels.training.train_step import TrainStep

__all__ = [
    "SCHEDULES",
    "SGD",
    "AdamW",
    "Checkpoint",
    "Interrupted",
    "Runner",
    "StepCallbacks",
    "TrainStep",
    "WarmupSchedule",
    "WholeBatches",
    "load_keras_file",
    "load_orbax",
    "restore_newest",
    "save_orbax",
    "track_step_loss",
]
