"""What only torch's overrides promise; collects nothing on the other backends."""

import keras
import numpy as np

import op_cases
from gradients import to_numpy
from kmodels import ops

if keras.backend.backend() == "torch":
    import torch

    def _kernels(function) -> set[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            function()
        return {event.key for event in profile.key_averages()}

    def _inputs():
        case = next(case for case in op_cases.ATTENTION if case.mask == "pairs")
        tensors = [keras.ops.convert_to_tensor(x) for x in op_cases.arrays(case)]
        return tensors, torch.from_numpy(op_cases.mask(case))

    def test_dropout_and_mask_run_the_fused_attention() -> None:
        tensors, mask = _inputs()

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

    def test_inference_runs_the_fused_attention_and_training_says_why_not() -> None:
        tensors, mask = _inputs()
        kernels = _kernels(lambda: ops.attention(*tensors, mask))
        assert "aten::scaled_dot_product_attention" in kernels
        seed = keras.random.SeedGenerator(1)
        reason = ops.attention.declines(*tensors, mask, dropout=0.1, seed=seed)
        assert reason == "on CPU, matrix products are faster with dropout"
        low = [x.to(torch.bfloat16) for x in tensors]
        assert "in half precision below 1024 keys" in ops.attention.declines(*low)
        assert "no soft cap" in ops.attention.declines(*tensors, soft_cap=1.0)

    def test_dropout_gradient_uses_the_forward_mask() -> None:
        x = torch.ones(1001, requires_grad=True)
        y = ops.dropout(x, 0.4, keras.random.SeedGenerator(2))
        y.sum().backward()
        np.testing.assert_array_equal(to_numpy(x.grad), to_numpy(y.detach()))

    def test_dropout_says_when_it_declines() -> None:
        x = torch.ones(4)
        seed = keras.random.SeedGenerator(0)
        assert "rounds to 0 or 1" in ops.dropout.declines(x, 1e-6, seed)
        assert "no SeedGenerator" in ops.dropout.declines(x, 0.5, 3)

    def test_patch_embedding_takes_the_product_in_half_precision() -> None:
        images, kernel = torch.ones(1, 4, 4, 1).bfloat16(), torch.ones(4, 2).bfloat16()
        reason = ops.patch_embedding.declines(images, kernel, patch_size=2)
        assert reason == "in half precision the matrix product is faster"
