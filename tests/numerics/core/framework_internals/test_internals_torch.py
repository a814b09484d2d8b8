"""A contract for each private name of torch in `framework_internals/internals_torch.py`."""

import keras
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("needs torch", allow_module_level=True)

import torch

from kmodels.core import internals_torch


def test_a_transform_is_known():
    seen = []
    torch.func.vmap(lambda x: seen.append(internals_torch.in_transform()) or x)(torch.ones(2))
    assert seen == [True] and not internals_torch.in_transform()


def test_hooks_are_known():
    module = torch.nn.Linear(1, 1)
    register = (
        module.register_forward_hook,
        module.register_forward_pre_hook,
        module.register_full_backward_hook,
        module.register_full_backward_pre_hook,
        torch.nn.modules.module.register_module_forward_hook,
        torch.nn.modules.module.register_module_full_backward_hook,
    )
    for hook in register:
        assert not internals_torch.has_hooks(module)
        handle = hook(lambda *arguments: None)
        assert internals_torch.has_hooks(module)
        handle.remove()
    assert not internals_torch.has_hooks(module)


def test_a_compiled_module_is_known():
    module = torch.nn.Linear(1, 1)
    assert not internals_torch.is_compiled(module)
    module.compile(backend="eager")
    assert internals_torch.is_compiled(module)
    assert internals_torch.COMPILED_CALL in vars(module)


def test_a_view_is_known():
    whole = torch.ones(4, requires_grad=True) * 1
    assert internals_torch.is_view(whole[:2]) and not internals_torch.is_view(whole)


def test_kernels_over_lists():
    parts = [torch.full((2,), 3.0), torch.full((2,), 4.0)]
    assert [float(x[0]) for x in internals_torch.multiply_all(parts, 2)] == [6.0, 8.0]
    norms = internals_torch.norms_of_all([part.bfloat16() for part in parts])
    assert {norm.dtype for norm in norms} == {torch.float32}
    internals_torch.multiply_all_(parts, 2)
    internals_torch.add_all_(parts, [torch.ones(2), torch.ones(2)])
    assert [float(x[0]) for x in parts] == [7.0, 9.0]


def test_fused_adamw_moves_by_the_rate():
    weights, slots = [torch.ones(2)], [torch.zeros(2)]
    internals_torch.fused_adamw_(
        weights, [torch.ones(2)], slots, [torch.zeros(2)], [], [torch.full((), torch.inf)],
        learning_rate=torch.tensor(0.5), beta_1=0.9, beta_2=0.999, epsilon=0.0, amsgrad=False,
    )  # fmt: skip
    assert bool((weights[0] < 1).all()) and bool((slots[0] > 0).all())


def test_onednn_multiplies():
    if not internals_torch.has_onednn_linear():
        pytest.skip("torch was built without oneDNN")
    for dtype in (torch.bfloat16, torch.float16):
        assert isinstance(internals_torch.has_matmul(dtype), bool)
    found = internals_torch.onednn_linear(torch.ones(2, 3), torch.ones(3, 4), torch.ones(4))
    assert found.tolist() == [[4.0] * 4] * 2


def test_compiler_and_its_errors():
    assert isinstance(internals_torch.has_compiler(), bool)
    assert issubclass(internals_torch.trace_error(), Exception)
    assert "efficientzerotensor" in str(internals_torch.zero_without_memory())


def test_a_graph_is_traced():
    graph = internals_torch.trace_graph(lambda x: x + 1, {}, [torch.ones(2)])
    assert graph(torch.ones(2)).tolist() == [2.0, 2.0]


def test_the_store_is_that_of_the_processes(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        internals_torch.default_store().set("a", "b")
        assert internals_torch.default_store().get("a") == b"b"
    finally:
        torch.distributed.destroy_process_group()
