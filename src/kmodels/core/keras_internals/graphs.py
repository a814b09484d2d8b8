"""The graph of a functional model."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kmodels.core.types import Tree

if TYPE_CHECKING:
    import keras


def symbolic_calls(layer: "keras.Layer") -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Returns keyword arguments and outputs of each call of a layer that is part of a graph."""
    for node in layer._inbound_nodes:
        yield node.arguments.kwargs, node.outputs


class ClonedAs:
    """A functional model that `keras.models.clone_model` makes another graph of.

    Keras asks no config of a functional model, and walks its graph with new layers instead. The
    result is a plain functional model.
    """

    def clone_graph(self, inputs: Tree, clone: Callable[..., Any], call: Callable[..., Any]) -> Any:
        """Outputs of the clone.

        Args:
            inputs: inputs of the clone, in the structure of the model's own.
            clone: gives the new layer for one of this model, always the same.
            call: `call(layer, *args, **kwargs)`, which may add others.
        """
        return super()._run_through_graph(inputs, operation_fn=clone, call_fn=call)  # type: ignore[misc]

    def _run_through_graph(self, inputs: Tree, *args: Any, **kwargs: Any) -> Any:
        if kwargs.keys() != {"operation_fn", "call_fn"}:  # Only `clone_model` names both.
            return super()._run_through_graph(inputs, *args, **kwargs)  # type: ignore[misc]
        call = kwargs["call_fn"] or (lambda layer, *args, **kwargs: layer(*args, **kwargs))
        return self.clone_graph(inputs, kwargs["operation_fn"], call)


def through_graph(
    model: "keras.Model", inputs: Tree, clone: Callable[..., Any], call: Callable[..., Any]
) -> Any:
    """Runs the graph of a model with other layers, see `ClonedAs.clone_graph`."""
    return model._run_through_graph(inputs, operation_fn=clone, call_fn=call)


def standardized(model: "keras.Model", inputs: Tree) -> list[Any]:
    """Returns the inputs of a functional model as tensors of the dtype and rank that it has."""
    return model._standardize_inputs(inputs)


def give_shape(tensor: "keras.KerasTensor", shape: Sequence[int | None]) -> None:
    """Gives a KerasTensor another shape, in all graphs that it is part of."""
    tensor._shape = tuple(shape)


def warn_of_inputs(model: "keras.Model", inputs: Tree) -> None:
    """Keras' warning that a functional model is given other inputs than its graph has."""
    model._maybe_warn_inputs_struct_mismatch(inputs)
