"""Private names of torch, each behind a public function, and the modes around the call of an op.

Modules that are slow to import (torch's compiler) are imported where they are called.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import keras
import torch
from torch._C._functorch import peek_interpreter_stack
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules import module as modules


def in_transform() -> bool:
    """Returns True inside a transform of `torch.func`, for which there is no public test."""
    return peek_interpreter_stack() is not None


def hooks_of(module: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """Returns the dictionaries of a module's hooks, which torch calls besides `forward`."""
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )


def has_hooks(module: torch.nn.Module) -> bool:
    """Returns True if a module has hooks, or if there are global hooks."""
    return any(hooks_of(module)) or bool(modules._has_any_global_hook())


def compiled_alone(function: FunctionType, graphs: int) -> Callable[..., Any]:
    """Returns a compiled function whose graphs are not counted with those of other calls of this.

    Shapes are static until one changes; then that axis is free in the one graph that follows.

    Args:
        function: a function of a module, without a closure.
        graphs: after so many graphs, calls that need another one are not compiled.
    """
    compiler: Any = torch.compile
    if "isolate_recompiles" in inspect.signature(compiler).parameters:
        return compiler(function, dynamic=None, recompile_limit=graphs, isolate_recompiles=True)
    # Torch 2.11 counts graphs by the function's code, and has one limit for the whole process.
    config: Any = importlib.import_module("torch._dynamo").config
    config.recompile_limit = max(config.recompile_limit, graphs)
    return compiler(FunctionType(function.__code__.replace(), function.__globals__), dynamic=None)


# The attribute in which a module keeps the function that its `compile` made, or None.
COMPILED_CALL = "_compiled_call_impl"


def is_compiled(module: torch.nn.Module) -> bool:
    """Returns True if `module.compile()` made a function that torch runs in place of `forward`."""
    return getattr(module, COMPILED_CALL) is not None


def in_autocast() -> bool:
    """Returns True if `torch.autocast` is on for any device."""
    return torch._C._is_any_autocast_enabled()


def version_of(tensor: torch.Tensor) -> int:
    """Returns a tensor's count of changes in place, or -1 if torch does not count them."""
    return -1 if tensor.is_inference() else tensor._version


def in_trace() -> bool:
    """Returns True inside `torch.jit.trace`; torch's public test is slower."""
    return torch._C._is_tracing()


def is_view(tensor: torch.Tensor) -> bool:
    """Returns True if a tensor is a view of another one for autograd."""
    return tensor._base is not None


def multiply_all(tensors: list[torch.Tensor], factor: float | torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors times a number or a scalar tensor, in few kernels."""
    return list(torch._foreach_mul(tensors, factor))


def multiply_all_(tensors: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiplies tensors in place by a number or a scalar tensor, in few kernels."""
    torch._foreach_mul_(tensors, factor)


def add_all_(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Adds the other tensors to the tensors in place, pairwise, in few kernels."""
    torch._foreach_add_(tensors, others)


def norms_of_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the 2-norm of each tensor, float32 scalars.

    `torch.nn.utils.get_total_norm` is public, and sums in the dtype of the tensors.
    """
    return list(torch._foreach_norm(tensors, dtype=torch.float32))


def fused_adamw_(
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    first: list[torch.Tensor],
    second: list[torch.Tensor],
    highest: list[torch.Tensor],
    counts: list[torch.Tensor],
    *,
    learning_rate: torch.Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    amsgrad: bool,
) -> None:
    """Moves weights in place by AdamW without decay, and its slots, in one pass over memory.

    `torch.optim.AdamW(fused=True)` is public, but keeps its own slots and counts. All lists have
    the order of the weights, which are contiguous, and one dtype and device; `highest` is empty
    without `amsgrad`; counts and the learning rate are float32 scalars.
    """
    torch._fused_adamw_(
        weights, gradients, first, second, highest, counts,
        lr=learning_rate, beta1=beta_1, beta2=beta_2, weight_decay=0.0,
        eps=epsilon, amsgrad=amsgrad, maximize=False,
    )  # fmt: skip


def has_onednn_linear() -> bool:
    """Returns True if torch was built with `onednn_linear`."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def has_matmul(dtype: torch.dtype) -> bool:
    """Returns True if oneDNN multiplies matrices in bfloat16 or float16 on this CPU."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    supported = getattr(torch.ops.mkldnn, name[dtype], None)
    return supported is not None and supported()


def onednn_linear(x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns `x @ kernel + bias` of oneDNN, which keeps no copy of the operands.

    Args:
        x: (..., D).
        kernel: (D, F).
        bias: (F,) or None.
    """
    return torch.ops.mkldnn._linear_pointwise(x, kernel.T, bias, "none", [], "")


# Torch 2.9 has it under a private name only.
grouped_mm: Callable[..., torch.Tensor] = getattr(
    torch.nn.functional, "grouped_mm", torch._grouped_mm
)


def zero_without_memory() -> Any:
    """Returns the op with which forward mode makes zeros without memory."""
    return torch.ops.aten._efficientzerotensor.default


def load_forward_rules() -> None:
    """Loads torch's forward-mode rules for ops without a forward-mode kernel."""
    importlib.import_module("torch._decomp.decompositions_for_jvp")


def while_loop(proceed: Callable[..., Any], step: Callable[..., Any], state: tuple) -> tuple:
    """Runs `while proceed(*state): state = step(*state)` as one op in a trace; returns `state`.

    torch has no public name for it.
    """
    from torch._higher_order_ops.while_loop import while_loop as traced

    return traced(proceed, step, state)


def trace_graph(function: Callable[..., Any], rules: dict[Any, Any], inputs: list[Any]) -> Any:
    """Returns the graph of ATen operations of a call, traced with fake tensors.

    `rules` has the replacement of an operation, by operation. The function may hold tensors.
    """
    return make_fx(function, rules, "fake", _allow_non_fake_inputs=True)(*inputs)


def trace_error() -> type[Exception]:
    """Returns the base class of the errors of torch's tracer."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def has_compiler() -> bool:
    """Returns True if `torch.compile` finds a C++ compiler for its code on a CPU."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return False
    return True


def default_store() -> Any:
    """Returns the key-value store of the processes of `init_process_group`.

    A public one would be a second server, whose port all processes would need first.
    """
    return torch.distributed.distributed_c10d._get_default_store()


# === The modes in which torch may call an op: autocast, a transform, a trace ===

# `torch.autocast` casts the arguments of ops that multiply matrices, and nothing else.
NARROW = {
    "attention": ("query", "key", "value"),
    "dense": ("x", "kernel", "bias"),
    "linear_cross_entropy": ("hidden",),
    "linear_divergence": ("hidden", "teacher_hidden"),
    "linear_log_probs": ("hidden",),
    "mlp": ("x", "up", "up_bias", "down", "down_bias"),
    "patch_embedding": ("images", "kernel", "bias"),
    "quantized_dense": ("x", "bias"),
}


def is_special() -> bool:
    """Returns True if `transformed` or `autocasts` may have a say, or torch.compile is at work."""
    return torch.compiler.is_compiling() or in_autocast() or in_transform() or in_trace()


def transformed() -> str | None:
    """Returns why no body may be opaque to autograd or a tracer (a clause), or `None`."""
    if in_transform():
        return "inside a transform of torch.func"
    if in_trace():
        return "inside torch.jit.trace"
    return None


def lost_gradient(arguments: Iterable[object], result: object) -> bool:
    """Returns True if autograd would silently take the gradient of a result for zero."""
    return (
        torch.is_grad_enabled()
        and isinstance(result, torch.Tensor)
        and not result.requires_grad
        and any(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments)
    )


def autocasts(args: tuple) -> bool:
    """Returns True if `torch.autocast` is on for the device of an op's first argument."""
    first = args[0] if args else None
    return isinstance(first, torch.Tensor) and torch.is_autocast_enabled(first.device.type)


def without_autocast(
    op: Callable[..., Any], generic: Callable[..., Any], args: tuple, kwargs: dict
) -> Any:
    """Returns the op's result without autocast, for arguments in the dtypes of autocast.

    Autocast would cast again inside an op, and change its documented dtypes.
    """
    device = args[0].device.type
    dtype = torch.get_autocast_dtype(device)
    bound = inspect.signature(generic).bind(*args, **kwargs)
    for name in NARROW.get(op.name, ()):
        value: Any = bound.arguments.get(name)
        if isinstance(value, keras.Variable):
            value = value.value
        if isinstance(value, torch.Tensor) and value.dtype != torch.float64:
            bound.arguments[name] = value.to(dtype)
    with torch.autocast(device, enabled=False):
        return op(*bound.args, **bound.kwargs)
