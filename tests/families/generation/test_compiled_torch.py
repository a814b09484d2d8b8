"""The token step under torch.compile; collects nothing on the other backends."""

import functools

import keras
import numpy as np
import pytest

from kmodels.models import GemmaBackbone, GemmaCausalLM
from kmodels.models.gemma.presets import PRESETS

if keras.backend.backend() == "torch":
    import torch
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter

    def _inputs(lengths: tuple[int, ...], seed: int) -> dict[str, np.ndarray]:
        mask = np.arange(max(lengths))[None] < np.array(lengths)[:, None]
        ids = np.random.default_rng(seed).integers(3, 320, mask.shape)
        return {"token_ids": ids * mask, "padding_mask": mask}

    def _generate(model, lengths, seed, **drafts):
        inputs = _inputs(lengths, seed)
        return model.generate(inputs, max_length=30, stop_token_ids=None, **drafts)["token_ids"]

    @pytest.mark.nightly
    @pytest.mark.parametrize(
        ("calls", "drafts", "graphs"),
        [
            ([((13, 4), 1), ((9, 16), 2), ((1, 2), 3)], False, 1),
            # Six tokens to check, two and one to draft.
            pytest.param([((13, 4), 1), ((9, 16), 2)], True, 3, marks=pytest.mark.nightly),
        ],
    )
    def test_one_graph_serves_all_prompts_and_gives_the_eager_tokens(
        monkeypatch, calls, drafts, graphs
    ) -> None:
        keras.utils.set_random_seed(3)
        model = GemmaCausalLM(GemmaBackbone(**PRESETS["gemma3_debug"]))
        model.compile(jit_compile=False)
        eager = [_generate(model, *call) for call in calls]
        # The compiler's front end alone: it decides about graphs, and needs no C++ compiler.
        counter = CompileCounter()
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model.compile(jit_compile=True)
        settings = {"assistant": model} if drafts else {}
        for call, wanted in zip(calls, eager, strict=True):
            np.testing.assert_array_equal(_generate(model, *call, **settings), wanted)
        assert not torch._dynamo.utils.counters["graph_break"]
        assert counter.frame_count == graphs

    def test_auto_is_eager_on_a_cpu() -> None:
        model = GemmaCausalLM(GemmaBackbone(**PRESETS["gemma3_debug"]))
        _generate(model, (3, 4), 1)
        (loop,) = model.generator.loops.values()
        assert loop.compiled is (loop.device.type != "cpu")

    def test_kernels_lie_by_output_and_keep_their_values(tmp_path) -> None:
        keras.utils.set_random_seed(3)
        backbone = GemmaBackbone(**PRESETS["gemma3_debug"], dtype="bfloat16")
        model = GemmaCausalLM(backbone)
        before = {v.path: keras.ops.convert_to_numpy(v.value).copy() for v in model.weights}
        _generate(model, (3, 4), 1)
        kernel, table = backbone.blocks[0].mlp.up.kernel, backbone.token_embedding.embeddings
        assert kernel.value.stride() == (1, kernel.shape[0])
        assert table.value.is_contiguous()
        model.save_to_preset(tmp_path / "saved")
        back = GemmaCausalLM.from_preset(tmp_path / "saved", dtype="bfloat16")
        for path, value in before.items():
            for held in (model, back):
                (found,) = [v for v in held.weights if v.path == path]
                np.testing.assert_array_equal(keras.ops.convert_to_numpy(found.value), value)
