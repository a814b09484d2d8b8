"""Shared parts of all `torch.autograd.Function` of kmodels."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol, TypeAlias

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from kmodels.core.dispatch import OpCall, of_mode


class Context(Protocol):
    """The context that autograd passes from a forward pass to its backward pass."""

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """Returns the arguments of `save_for_backward`: tensors or None."""
        ...

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """Whether each input of the forward pass needs a gradient."""
        ...

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keeps tensors for the backward pass."""
        ...

    def mark_non_differentiable(self, *outputs: torch.Tensor) -> None:
        """Marks outputs that have no gradient."""
        ...

    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: object) -> None: ...


@of_mode
def outside_graph(call: OpCall) -> str | None:
    """Declines a call that torch.fx records, where autograd follows each operation of the graph.

    The function's backward pass would not be used, and autograd cannot differentiate the in-place
    writes of its forward pass. `torch.compile` and `torch.export` handle both.
    """
    # Dynamo cannot trace the second question, which would break its graph.
    if torch.compiler.is_compiling() or get_proxy_mode() is None:
        return None
    return "autograd follows a recorded graph operation by operation"


# Inputs of the forward pass, in its order, and a function of them that autograd can differentiate.
Again: TypeAlias = Callable[[Context], tuple[Sequence[Any], Callable[..., torch.Tensor]]]


def backward(again: Again | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds second derivatives to a backward pass, and turns autocast off inside it.

    A fast backward pass writes in place and reads saved tensors, which autograd cannot follow: with
    `create_graph=True` its derivatives would be wrong. The function is then recomputed from its
    inputs in a form that autograd can differentiate any number of times.

    Args:
        again: takes the context; returns the first inputs of the forward pass, and a function that
            computes its (first) output from them. `None` if autograd can follow `backward`.

    Returns:
        A decorator of `backward(ctx, *gradients)`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(ctx: Context, *gradients: torch.Tensor) -> Any:
            if torch.compiler.is_compiling():  # which traces no backward pass of a backward pass
                return function(ctx, *gradients)
            device = gradients[0].device.type
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return run(ctx, *gradients)
            # In a backward pass this is True only with create_graph=True.
            if again is not None and torch.is_grad_enabled():
                return _recorded(ctx, *again(ctx), gradients[0])
            return function(ctx, *gradients)

        return run

    return decorate


def written(output: torch.Tensor) -> torch.Tensor:
    """Returns the output of a forward pass that wrote it in place.

    Under torch.compile, torch 2.11 computes wrong gradients if it is the written tensor itself.
    """
    return output.detach() if torch.compiler.is_compiling() else output


def _recorded(
    ctx: Context,
    inputs: Sequence[Any],
    function: Callable[..., torch.Tensor],
    gradient: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients of the inputs by operations that autograd records."""
    wanted = [i for i, x in enumerate(inputs) if x is not None and ctx.needs_input_grad[i]]
    again = list(inputs)
    for i in wanted:
        # The same tensor may be passed twice, and each position has its gradient. What stands
        # for an input that the gradients do not depend on needs one, too.
        x = again[i]
        again[i] = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
    slopes: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
    gradients = torch.autograd.grad(
        function(*again), [again[i] for i in wanted], gradient, create_graph=True, allow_unused=True
    )
    for i, of_input in zip(wanted, gradients, strict=True):
        slopes[i] = of_input
    return tuple(slopes)


def with_second_derivatives(
    output: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    function: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Returns the output of a fused kernel, whose second derivatives are those of a function.

    The function computes it from the inputs with gradients, in a form that autograd differentiates.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return output
    return _Fused.apply(output, function, *inputs)


def _function_again(ctx: Context) -> Any:
    return (None, None, *ctx.saved_tensors), lambda _, __, *inputs: ctx.function(*inputs)


class _Fused(torch.autograd.Function):
    """Passes gradients through to a kernel; a recorded graph of them goes around it."""

    @staticmethod
    def forward(
        ctx: Context,
        output: torch.Tensor,
        function: Callable[..., torch.Tensor],
        *inputs: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        ctx.function = function
        return output.view_as(output)

    @staticmethod
    @backward(_function_again)
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0], *[None] * (len(ctx.needs_input_grad) - 1)
