"""Ends a run on Ray after an error of the work, with one line."""

from typing import Any

from ray.train import UserCallback

from kmodels.core.errors import InputError, one_line

# Attribute of Ray's error for a worker that did not answer.
_MISSED = "health_check_failure"


class EndAtErrors(UserCallback):
    """Ends the run after errors that workers would raise again; called by Ray.

    Ray restarts all workers after any error, which makes sense only if a worker was lost.
    """

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Raises the error of the first worker, unless one was lost."""
        errors = [worker_exceptions[rank] for rank in sorted(worker_exceptions)]
        if all(isinstance(error, InputError) for error in errors):
            raise errors[0]


def explain(error: Exception, storage: str, failures: str) -> InputError:
    """Returns an error of Ray as one line.

    Args:
        error: an error of `fit` of a trainer.
        storage: directory of the run.
        failures: the allowed number of failures, as text.
    """
    failure = getattr(error, "controller_failure", None) or error
    if isinstance(failure, InputError):
        explained = InputError(one_line(failure))
        if stack := getattr(failure, "stack", ""):
            explained.add_note(stack)
        return explained
    lost = getattr(error, "worker_failures", {})
    if lost:
        # Workers that did not answer come before those that lost contact with them.
        order = {rank: (not hasattr(error, _MISSED), rank) for rank, error in lost.items()}
        rank = min(lost, key=lambda rank: order[rank])
        cause = getattr(lost[rank], _MISSED, lost[rank])
        reason = one_line(cause).partition(". ")[0][:300]
        return InputError(
            f"worker {rank} was lost and {failures} had been allowed: {reason}; run it again to "
            f"continue from the newest checkpoint in {storage}"
        )
    return InputError(f"Ray ended the run in {storage}: {one_line(failure)[:300]}")
