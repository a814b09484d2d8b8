"""Methods of any model on any data, with a preprocessor, as models of kmodels call the loop."""

from typing import Any

from kmodels.data.pipeline.request import FitRequest, Method
from kmodels.training.loop import run_request


def run(
    model: Any, method: str, x: Any, y: Any = None, *, preprocess: Any = None, **given: Any
) -> Any:
    """Calls the method of the loop."""
    asked = FitRequest.of(Method(method), x=x, **({} if y is None else {"y": y}), **given)
    return run_request(model, asked, preprocess)
