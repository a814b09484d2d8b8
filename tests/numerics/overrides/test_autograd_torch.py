"""Each `torch.autograd.Function` of kmodels: first and second derivatives; no other backend's."""

import importlib
import inspect
from functools import partial
from itertools import pairwise
from pathlib import Path

import keras
import pytest

import kmodels
from kmodels import ops
from kmodels.core.errors import InputError

if keras.backend.backend() == "torch":
    import torch

    from kmodels.overrides import _backward_torch, dense_torch, grouped_dense_torch

    SOURCE = Path(kmodels.__file__).parent
    MASK = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()
    MASK[1, 0, 2] = False
    LABELS, WEIGHTS = torch.tensor([3, 0, 6, 1]), torch.tensor([1.0, 0.0, 0.5, 2.0]).double()

    def functions() -> dict[str, type]:
        """All of them by name, in whichever module."""
        found = {}
        for path in sorted(SOURCE.rglob("*_torch.py")):
            if "autograd.Function" not in path.read_text():
                continue
            module = importlib.import_module(
                ".".join(["kmodels", *path.relative_to(SOURCE).with_suffix("").parts])
            )
            for name, value in vars(module).items():
                is_function = inspect.isclass(value) and issubclass(value, torch.autograd.Function)
                if is_function and value.__module__ == module.__name__:
                    found[f"{path.stem}.{name}"] = value
        return found

    def seed():
        return keras.random.SeedGenerator(3)

    def as_by_a_kernel(*inputs, **options):
        """The kernel of CUDA has no double here; the definition stands for it."""
        again = partial(ops.attention.generic, **options)
        return _backward_torch.with_second_derivatives(again(*inputs), inputs, again)

    SIZES = torch.tensor([2, 0, 3, 1])
    CODES = torch.arange(1, 250, 25, dtype=torch.uint8).view(2, 5)
    STEPS = torch.arange(1.0, 11.0).view(2, 5)

    def grouped(x, kernel, sizes):
        return grouped_dense_torch.grouped_dense_torch(x, kernel, sizes)

    def of_groups(a, b, offs):
        """What `grouped_mm` does, which has no double: rows by kernels, or columns by rows."""
        parts = [slice(*ends) for ends in pairwise([0, *offs.tolist()])]
        if b.ndim == 3:
            return torch.cat([a[part] @ b[i] for i, part in enumerate(parts)])
        return torch.stack([a[:, part] @ b[part] for part in parts])

    # Two heads that share one of keys: each number is moved by itself, twice.
    HEADS = [(2, 4, 2, 2), (2, 4, 1, 2), (2, 4, 1, 2)]
    MLP = [(2, 3, 4), (4, 5), (5,), (5, 2), (2,)]
    # Function: cases of (call, shapes of what it is differentiated by).
    CASES = {
        "_backward_torch._Fused": [
            (lambda q, k, v: as_by_a_kernel(q, k, v, causal=True, soft_cap=0.7), HEADS),
            (lambda q, k, v: ops.attention(q, k, v), HEADS),
            (lambda q, k, v: ops.attention(q, k, v, causal=True), HEADS),
            (lambda q, k, v: ops.attention(q, k, v, MASK, causal=True, window=2), HEADS),
            (lambda x: ops.attention(x, x, x, causal=True, scale=0.7), HEADS[1:2]),
            (lambda q, k, v: ops.attention(q, k, v, MASK, scale=0.7), HEADS),
            (lambda q, k, v: ops.attention(q, k, v, MASK[:, :, :1]), [(2, 1, 2, 2), *HEADS[1:]]),
            (lambda x: ops.attention(x, x, x, window=2), HEADS[1:2]),
        ],
        "dense_torch._Affine": [
            (lambda x, k, b: ops.dense(x, k, b), [(2, 3, 4), (4, 5), (5,)]),
            (lambda x, k: ops.dense(x, k), [(3, 4), (4, 5)]),
            (lambda x: ops.dense(x, torch.ones(4, 5).double()), [(3, 4)]),
            (lambda x, b: ops.dense(x, torch.ones(4, 5).double(), b), [(3, 4), (5,)]),
        ],
        "dropout_torch._Dropout": [(lambda x: ops.dropout(x, 0.4, seed()) ** 2, [(3, 4)])],
        "grouped_dense_torch._Grouped": [
            (lambda x, k: grouped(x, k, SIZES), [(6, 3), (4, 3, 2)]),
            (lambda k: grouped(torch.ones(6, 3).double(), k, SIZES), [(4, 3, 2)]),
        ],
        "activations_torch._Gated": [
            (lambda g, u: ops.gated_silu(g, u), [(3, 4), (3, 4)]),
            (lambda g, u: ops.gated_gelu(g, u), [(3, 4), (3, 4)]),
        ],
        "linear_cross_entropy_torch._Scores": [
            (
                lambda h, t: ops.linear_cross_entropy(
                    h, t, LABELS, WEIGHTS, soft_cap=2.0, trainable_table=True
                )[0],
                [(4, 3), (7, 3)],
            ),
            (
                lambda h: ops.linear_cross_entropy(h, torch.eye(7, 3).double(), LABELS, WEIGHTS)[0],
                [(4, 3)],
            ),
            (
                lambda h, r: ops.linear_cross_entropy(
                    *(h, torch.eye(7, 3).double(), LABELS, WEIGHTS),
                    **{"rows": r, "row_ids": LABELS[:2], "soft_cap": 2.0},
                )[0],
                [(4, 3), (2, 3)],
            ),
            *(
                (
                    lambda h, t, soft_cap=soft_cap: torch.stack(
                        ops.linear_log_probs(
                            *(h, t, LABELS, WEIGHTS),
                            soft_cap=soft_cap,
                            temperature=0.7,
                            with_entropy=True,
                            trainable_table=True,
                        )
                    ),
                    [(4, 3), (7, 3)],
                )
                for soft_cap in (None, 2.0)
            ),
            (
                lambda h, r: torch.stack(
                    ops.linear_log_probs(
                        *(h, torch.eye(7, 3).double(), LABELS),
                        **{"rows": r, "row_ids": LABELS[:2], "soft_cap": 2.0},
                        **{"temperature": 0.7, "with_entropy": True},
                    )
                ),
                [(4, 3), (2, 3)],
            ),
        ],
        "linear_divergence_torch._Divergence": [
            (
                lambda h, kind=kind: ops.linear_divergence(
                    *(h, torch.eye(7, 3).double(), torch.eye(4, 3).double() * 2),
                    *(torch.eye(7, 3).double(), WEIGHTS),
                    **{"kind": kind, "soft_cap": 2.0, "temperature": 0.7},
                ),
                [(4, 3)],
            )
            for kind in ("forward_kl", "reverse_kl", "jsd")
        ],
        "mlp_torch._MLP": [
            (lambda *x: ops.mlp(*x), MLP),
            (lambda *x: ops.mlp(*x, approximate=True, dropout=0.4, seed=seed()), MLP),
            (
                lambda x, u, d: ops.mlp(x, u, None, d, None, approximate="sigmoid"),
                [(2, 3, 4), (4, 5), (5, 2)],
            ),
        ],
        "norms_torch._RMSNorm": [
            (lambda x, s: ops.rms_norm(x, s), [(3, 4), (4,)]),
            (lambda x, s: ops.rms_norm(x, s, offset=0.0), [(3, 4), (4,)]),
            (lambda x: ops.rms_norm(x, None), [(3, 4)]),
        ],
        "quantized_dense_torch._Product": [
            (lambda x: ops.quantized_dense(x, (CODES, STEPS), None, "nf4"), [(3, 4)]),
            (lambda x, b: ops.quantized_dense(x, (CODES, STEPS), b, "fp4"), [(2, 3, 4), (5,)]),
            (lambda x, b: ops.quantized_dense(x, (CODES, STEPS), b, "fp8"), [(3, 2), (5,)]),
        ],
        "rotary_embedding_torch._Rotation": [
            (lambda x: ops.rotary_embedding(x, torch.arange(3)) ** 2, [(2, 3, 2, 4)])
        ],
    }

    def test_each_function_has_a_case() -> None:
        assert set(functions()) == set(CASES)

    @pytest.fixture(autouse=True)
    def small_products_too(monkeypatch) -> None:
        """Functions that only large tensors are worth take the small ones of the cases."""
        monkeypatch.setattr(dense_torch, "by_onednn", lambda x, *_: x.dtype == torch.float32)

    def _nodes(tensor) -> set[str]:
        seen, waiting = set(), [tensor.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in seen:
                seen.add(node)
                waiting += [above for above, _ in node.next_functions]
        return {node.name() for node in seen}

    @pytest.mark.parametrize(
        ("name", "number"), [(name, i) for name, cases in CASES.items() for i in range(len(cases))]
    )
    def test_derivatives(name, number, monkeypatch) -> None:
        if name == "dense_torch._Affine":  # oneDNN has no float64
            monkeypatch.setattr(dense_torch, "by_onednn", lambda *_: True)
            monkeypatch.setattr(
                dense_torch, "product", lambda x, k, b=None: torch.nn.functional.linear(x, k.T, b)
            )
        monkeypatch.setattr(grouped_dense_torch, "grouped_mm", of_groups)
        call, shapes = CASES[name][number]
        generator = torch.Generator().manual_seed(number)
        tensors = [
            torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
            for shape in shapes
        ]
        assert f"{functions()[name].__name__}Backward" in _nodes(call(*tensors))
        assert torch.autograd.gradcheck(call, tensors)
        assert torch.autograd.gradgradcheck(call, tensors)

    def test_what_a_kernel_dropped_has_no_second_derivative() -> None:
        """As on a GPU: torch's own kernel draws what it drops, and keeps it to itself."""
        x = torch.ones(1, 3, 2, 4, requires_grad=True)
        total = ops.attention.override(x, x, x, dropout=0.4, seed=seed()).sum()
        torch.autograd.grad(total, x, retain_graph=True)
        with pytest.raises(InputError, match=r"in kmodels.generic_only\('attention'\)"):
            torch.autograd.grad(total, x, create_graph=True)
