"""result.json: the settings of a run in short, and its results."""

import math
from collections.abc import Sequence
from typing import Any

import keras

from kmodels.checkpoint.state import versions, weights_digest
from kmodels.core import dispatch
from kmodels.core.runtime import device_name, peak_memory_mb
from kmodels.runs.runner import Runner

__all__ = ["result"]

# Losses by step of longer runs are in history.csv alone.
MOST_STEP_LOSSES = 1000


def result(
    model: keras.Model,
    *,
    recipe: str,
    settings: Any,
    metrics: dict[str, float],
    runner: Runner | None = None,
) -> dict[str, Any]:
    """Returns the content of result.json.

    Args:
        model: the model at the end of the run.
        recipe: name of the recipe.
        settings: settings of the run; `preset` is the name of the architecture.
        metrics: values by Keras' log names.
        runner: the training; None if the run only evaluates.

    Returns:
        Plain values.
    """
    content = {
        "recipe": recipe,
        "backend": keras.backend.backend(),
        "versions": versions(),
        "device": device_name(),
        "precision": getattr(model, "backbone", model).dtype_policy.name,
        "preset": settings.preset,
        "parameters": _count(model.weights),
        "trainable_parameters": _count(model.trainable_weights),
        "steps": 0,
        "epochs": 0,
        "metrics": metrics,
        "samples_per_s": None,
        "step_ms_median": None,
        "compile_s": None,
        "peak_memory_mb": peak_memory_mb(),
        "wait_for_data_share": None,
        "overrides": dispatch.summary(),
        "weights_digest": weights_digest(model),
        "step_losses": [],
    }
    if runner is not None:
        losses = runner.history.step_losses
        content |= {
            "steps": runner.step,
            "epochs": runner.epochs,
            "skipped_steps": runner.skipped,
            "step_losses": losses if len(losses) <= MOST_STEP_LOSSES else [],
        }
    if runner is not None and runner.speed.windows:
        content |= {
            "samples_per_s": round(runner.speed.samples_per_s, 2),
            "step_ms_median": round(runner.speed.step_ms, 3),
            "compile_s": round(runner.speed.compile_s, 3),
            "wait_for_data_share": round(runner.feed.clock.share, 4),
        }
    return content


def _count(variables: Sequence[keras.Variable]) -> int:
    return sum(math.prod(variable.shape) for variable in variables)
