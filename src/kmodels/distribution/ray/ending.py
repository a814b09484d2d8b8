"""End a run on Ray at once where the work raised something, and always with one line."""

from typing import Any

from ray.train import UserCallback

from kmodels.core.errors import InputError, one_line

# The attribute that Ray's error of a worker that it misses has.
_MISSED = "health_check_failure"


class EndAtErrors(UserCallback):
    """Ends the run where workers raised what they would raise again; Ray calls it.

    Ray starts all workers again whatever has ended one of them. That is for those that were lost.
    """

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Raises the error of the first worker, unless one was lost."""
        errors = [worker_exceptions[rank] for rank in sorted(worker_exceptions)]
        if all(isinstance(error, InputError) for error in errors):
            raise errors[0]


def explain(error: Exception, storage: str, failures: str) -> InputError:
    """Returns the one line for what Ray raised.

    Args:
        error: what `fit` of a trainer raised.
        storage: directory of the run.
        failures: how many were allowed, as words.
    """
    found = getattr(error, "controller_failure", None) or error
    if isinstance(found, InputError):
        told = InputError(one_line(found))
        if stack := getattr(found, "stack", ""):
            told.add_note(stack)
        return told
    lost = getattr(error, "worker_failures", {})
    if lost:
        # Those that Ray misses come before those that missed others.
        order = {rank: (not hasattr(error, _MISSED), rank) for rank, error in lost.items()}
        rank = min(lost, key=lambda rank: order[rank])
        cause = getattr(lost[rank], _MISSED, lost[rank])
        reason = one_line(cause).partition(". ")[0][:300]
        return InputError(
            f"worker {rank} was lost and {failures} had been allowed: {reason}; run it again to "
            f"continue from the newest checkpoint in {storage}"
        )
    return InputError(f"Ray ended the run in {storage}: {one_line(found)[:300]}")
