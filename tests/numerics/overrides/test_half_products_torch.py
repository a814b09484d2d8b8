"""Products of half precision on a CPU that has none; collects nothing on the other backends."""

import keras
import numpy as np
import pytest

import op_cases
from gradients import assert_near, to_numpy, value_and_grad
from kmodels import ops
from tolerances import tolerance

if keras.backend.backend() == "torch":
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from kmodels.overrides import _tensors_torch, dense_torch
    from kmodels.overrides._tensors_torch import widens

    PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_grouped_mm", "convolution")
    MULTIPLY = ("attention", "dense", "grouped_dense", "linear_cross_entropy", "mlp")
    CASES = [case for case in op_cases.few_cases() if case[0] in (*MULTIPLY, "patch_embedding")]

    @pytest.fixture(autouse=True, params=[True, False], ids=["without", "with"])
    def lacks(request, monkeypatch) -> bool:
        """A processor without products of half precision, and one with them."""
        lacking = {torch.bfloat16, torch.float16} if request.param else set()
        monkeypatch.setattr(_tensors_torch, "LACKING", lacking)
        return request.param

    class Recorded(TorchDispatchMode):
        """The dtypes that products of torch are given."""

        def __init__(self) -> None:
            super().__init__()
            self.dtypes: set[torch.dtype] = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.name().removeprefix("aten::").partition(".")[0]
            if name in PRODUCTS or "attention" in name or "linear" in name:
                self.dtypes |= {x.dtype for x in args if isinstance(x, torch.Tensor)}
            return func(*args, **(kwargs or {}))

    def test_each_op_that_multiplies_has_a_case() -> None:
        assert {case[0] for case in CASES} == {*MULTIPLY, "patch_embedding"}

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: "-".join(CASES[i][:2]))
    def test_which_products_are_narrow(number, dtype, lacks) -> None:
        """What they give: `test_parity.py`."""
        name, _, arrays, keywords = CASES[number]
        op = getattr(ops, name)
        tensors = [keras.ops.convert_to_tensor(x, dtype) for x in arrays]
        if not lacks and op.declines(*tensors, **keywords):
            return  # which the parity of overrides looks at
        one_query = name == "attention" and arrays[0].shape[1] == 1  # torch's kernel serves it
        with Recorded() as recorded:
            value, _ = value_and_grad(
                lambda *x: keras.tree.flatten(op(*x, **keywords))[0], *arrays, dtype=dtype
            )
        narrow = recorded.dtypes & {torch.bfloat16, torch.float16}
        assert recorded.dtypes  # products were seen
        assert not (lacks and narrow and not one_query)
        assert value.dtype == getattr(torch, "float32" if "entropy" in name else dtype)

    @pytest.mark.parametrize("shape", [(3, 5, 7), (2500, 7), (0, 7), (1, 1, 7)])
    def test_parts_of_a_product_make_the_whole(shape, monkeypatch) -> None:
        monkeypatch.setattr(dense_torch, "TILE", 21)
        generator = torch.Generator().manual_seed(0)
        x, kernel, bias = (
            torch.randn(size, generator=generator).to(torch.bfloat16)
            for size in (shape, (7, 10), 10)
        )
        right = (x.double() @ kernel.double() + bias.double()).to(torch.bfloat16)
        product = dense_torch.product_in_float32
        found = product(x, kernel, bias)
        assert found.dtype == torch.bfloat16
        assert found.shape == right.shape
        assert torch.allclose(found, right, rtol=2**-7, atol=2**-9)
        assert torch.equal(product(x, kernel.T.contiguous().T), product(x, kernel))

    def test_attention_keeps_no_wide_inputs(lacks) -> None:
        """As many heads as tokens: a view of (B, N, T, H) has the shape of (B, T, N, H)."""
        inputs = [torch.randn(2, 6, 6, 8).to(torch.bfloat16).requires_grad_() for _ in range(3)]
        kept = []

        def keep(x: torch.Tensor) -> torch.Tensor:
            kept.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            output = ops.attention(*inputs)
        if lacks:
            assert not kept  # the inner hooks keep all
        found = torch.autograd.grad(output.float().square().sum(), inputs)
        wide = [x.detach().double().requires_grad_() for x in inputs]
        right = torch.autograd.grad(ops.attention.generic(*wide).square().sum(), wide)
        assert_near(found, right, tolerance("attention", "bfloat16"))

    @pytest.mark.parametrize("rows", [1, 2, 3])
    def test_few_rows_meet_a_kernel_that_lies_by_outputs_as_it_lies(rows, lacks) -> None:
        """As a transposed table does, and the kernels that generation lays so."""
        generator = torch.Generator().manual_seed(0)
        x, kernel = (
            torch.randn(shape, generator=generator).to(torch.bfloat16)
            for shape in ((1, rows, 8), (8, 9))
        )
        turned = kernel.T.contiguous().T
        right = to_numpy(x.double() @ kernel.double())
        for held, narrow in ((kernel, False), (turned, rows < 3)):
            with Recorded() as recorded, torch.no_grad():
                found = ops.dense(x, held)
            assert recorded.dtypes == {torch.bfloat16 if narrow or not lacks else torch.float32}
            assert np.abs(to_numpy(found) - right).max() <= tolerance("dense", "bfloat16") * 8

    @pytest.mark.parametrize("name", ["attention", "dense", "mlp"])
    def test_compiled_code_multiplies_in_float32_too(name, lacks) -> None:
        _, _, arrays, keywords = next(case for case in CASES if case[0] == name)
        given = [keras.ops.convert_to_tensor(x, "bfloat16") for x in arrays]
        recorded = Recorded()

        def watched(graph, inputs):
            def run(*x):
                with recorded:
                    return graph.forward(*x)

            return run

        torch.compiler.reset()
        op = getattr(ops, name)
        found = torch.compile(lambda *x: op(*x, **keywords), backend=watched, fullgraph=True)(
            *given
        )
        assert recorded.dtypes == {torch.float32 if lacks else torch.bfloat16}
        right = op.generic(*[x.double() for x in given], **keywords)
        assert found.dtype == torch.bfloat16
        assert_near([found], [right], tolerance(name, "bfloat16"))

    def test_accelerators_keep_their_products(lacks) -> None:
        assert widens(torch.zeros(2, dtype=torch.bfloat16)) == lacks
        assert not widens(torch.zeros(2))
        assert not widens(torch.zeros(2, dtype=torch.int16))
        assert not widens(torch.zeros(2, dtype=torch.bfloat16, device="meta"))
