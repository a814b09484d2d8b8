"""What only torch's overrides promise; collects nothing on the other backends."""

import inspect

import keras
import numpy as np
import pytest

import op_cases
from gradients import assert_near, to_numpy, value_and_grad
from kmodels import ops
from tolerances import tolerance

if keras.backend.backend() == "torch":
    import torch

    from kmodels.core import internals_torch
    from kmodels.overrides import _tensors_torch, attention_torch

    def _kernels(function) -> set[str]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            function()
        return {event.key for event in profile.key_averages()}

    def _inputs():
        found = (case for case in op_cases.cases() if case[1] == "mask with an empty row")
        _, _, arrays, keywords = next(found)
        return [*map(keras.ops.convert_to_tensor, arrays)], torch.from_numpy(keywords["mask"])

    def test_dropout_and_mask_run_the_fused_attention() -> None:
        tensors, mask = _inputs()  # the op's own body drops weights on a CPU, as a GPU does not

        def run(seed: int) -> np.ndarray:
            generator = keras.random.SeedGenerator(seed)
            return to_numpy(ops.attention.override(*tensors, mask, dropout=0.1, seed=generator))

        assert "aten::scaled_dot_product_attention" in _kernels(lambda: run(1))
        before = torch.random.get_rng_state()
        first = run(1)
        np.testing.assert_array_equal(first, run(1))
        assert torch.equal(before, torch.random.get_rng_state())  # the user's stream is untouched
        assert np.abs(first - run(2)).max() > 1e-3
        assert not first[0, 2].any()
        # The mask still bites under dropout.
        open_row = ops.attention.override(*tensors, dropout=0.1, seed=keras.random.SeedGenerator(1))
        assert np.abs(first - to_numpy(open_row)).max() > 1e-3

    def test_the_kernel_follows_what_was_measured(monkeypatch) -> None:
        tensors, mask = _inputs()
        fused = "aten::scaled_dot_product_attention"
        monkeypatch.setattr(_tensors_torch, "LACKING", frozenset())
        assert fused in _kernels(lambda: ops.attention(*tensors, mask))
        low = [x.to(torch.bfloat16) for x in tensors]
        assert fused not in _kernels(lambda: ops.attention(*low, mask))
        square = [tensors[0], *(x[:, :5] for x in tensors[1:])]
        assert fused in _kernels(lambda: ops.attention(*square, causal=True))
        monkeypatch.setattr(attention_torch, "LONG", 5)
        assert fused in _kernels(lambda: ops.attention(*low, mask))
        assert fused not in _kernels(lambda: ops.attention(*square, causal=True, window=2))
        assert fused in _kernels(lambda: ops.attention(*square, causal=True, window=5))
        seed = keras.random.SeedGenerator(1)
        assert fused not in _kernels(lambda: ops.attention(*tensors, dropout=0.1, seed=seed))
        assert fused not in _kernels(lambda: ops.attention(*tensors, soft_cap=1.0))
        assert "no SeedGenerator" in ops.attention.declines(*tensors, dropout=0.1, seed=3)

    def test_mlp_drops_what_its_generic_body_drops(monkeypatch) -> None:
        rng = np.random.default_rng(8)
        shapes = [(2, 5, 6), (6, 8), (8,), (8, 4), (4,)]
        arrays = [rng.normal(size=shape).astype("float32") for shape in shapes]

        def run(body):
            seed = keras.random.SeedGenerator(4)
            return value_and_grad(lambda *x: body(*x, dropout=0.4, seed=seed), *arrays)

        (value, gradients), (expected, wanted) = run(ops.mlp.override), run(ops.mlp.generic)
        undropped = to_numpy(ops.mlp(*map(torch.from_numpy, arrays)))
        assert np.abs(to_numpy(value) - undropped).max() > 0.1
        assert_near([value, *gradients], [expected, *wanted], tolerance("mlp"))

    def test_mlp_keeps_its_hidden_activations_once() -> None:
        x = torch.ones(2, 5, 6, requires_grad=True)
        up, down = (torch.ones(*shape, requires_grad=True) for shape in ((6, 8), (8, 6)))
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor
        ):
            ops.mlp(x, up, None, down, None)
        assert sorted(kept) == [(2, 5, 6), (2, 5, 8), (6, 8), (8, 6)]
        kept.clear()
        with torch.no_grad():
            assert ops.mlp.declines(x, up, None, down, None) is None
            ops.mlp(x, up, None, down, None)
        assert not kept

    def test_dropout_says_when_it_declines() -> None:
        x = torch.ones(4)
        seed = keras.random.SeedGenerator(0)
        assert "rounds to 0 or 1" in ops.dropout.declines(x, 1e-6, seed)
        assert "no SeedGenerator" in ops.dropout.declines(x, 0.5, 3)

    @pytest.mark.parametrize("inside", [False, True])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize(
        ("name", "label", "arrays", "keywords"),
        op_cases.few_cases(),
        ids=lambda x: x if isinstance(x, str) else "",
    )
    def test_autocast(name, label, arrays, keywords, dtype, inside) -> None:
        """What multiplies matrices does so in autocast's dtype, all else in that of its input."""
        op = getattr(ops, name)
        names = internals_torch.NARROW.get(name, ())

        def run(function) -> list[np.ndarray]:
            tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
            value = function(tensors)
            value = value[0] if isinstance(value, tuple) else value
            with torch.autocast("cpu", enabled=inside, dtype=getattr(torch, dtype)):
                gradients = torch.autograd.grad(value.float().square().sum(), tensors)
            return [to_numpy(x.detach()) for x in (value, *gradients)]

        def by_autocast(tensors):
            with torch.autocast("cpu", dtype=getattr(torch, dtype)):
                return op(*tensors, **keywords)

        def by_hand(tensors):
            places = list(inspect.signature(op.generic).parameters)[: len(tensors)]
            cast = getattr(torch, dtype)
            given = [
                x.to(cast) if place in names else x
                for x, place in zip(tensors, places, strict=True)
            ]
            return op.generic(*given, **keywords)

        allowed = tolerance(name, dtype)
        for found, right in zip(run(by_autocast), run(by_hand), strict=True):
            assert np.abs(found - right).max() <= allowed * max(1.0, np.abs(right).max())

    @pytest.mark.parametrize("rows", [3, 4096])
    @pytest.mark.parametrize("scaled", [True, False])
    def test_rms_norm_without_gradients_is_its_definition(rows, scaled) -> None:
        """Small inputs and large ones take other paths there than where gradients are kept."""
        rng = np.random.default_rng(0)
        x, scale = rng.normal(size=(rows, 8)), rng.normal(size=8) if scaled else None
        expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.5)
        if scale is not None:
            expected *= 1.0 + scale
            scale = torch.as_tensor(scale, dtype=torch.float32)
        with torch.no_grad():
            found = ops.rms_norm(torch.as_tensor(x, dtype=torch.float32), scale, epsilon=0.5)
        assert_near([found], [expected], tolerance("rms_norm"))
