"""Keras' own methods of any model on any data, through `kmodels.data.fit`."""

from typing import Any

from kmodels.data.fit import run as fit_run
from kmodels.data.fit.adapters import prepare
from kmodels.data.fit.request import FitRequest, Method


def request(method: str, x: Any, y: Any = None, **given: Any) -> FitRequest:
    """What a method of a model is asked for."""
    return FitRequest.of(Method(method), x=x, **({} if y is None else {"y": y}), **given)


def run(
    model: Any, method: str, x: Any, y: Any = None, *, preprocess: Any = None, **given: Any
) -> Any:
    """Calls the method as models of kmodels do."""
    asked = request(method, x, y, **given)
    return fit_run.run(model, getattr(model, method), asked, preprocess)


def arguments(
    method: str, x: Any, y: Any = None, *, preprocess: Any = None, **given: Any
) -> dict[str, Any]:
    """What the method of any model is to be called with."""
    return fit_run.follow(prepare(request(method, x, y, **given), preprocess)).keywords()
