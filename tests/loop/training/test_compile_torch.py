"""Blocks under torch.compile; collects nothing on the other backends."""

import functools
import shutil

import keras
import numpy as np
import pytest

from arrays import assert_equal
from kmodels.layers import block_compile as compiling
from kmodels.layers import remat
from kmodels.models import GemmaBackbone, GemmaCausalLM, ViTBackbone, ViTImageClassifier
from kmodels.models.gemma.presets import PRESETS
from refusals import refused
from tolerances import tolerance

if keras.backend.backend() == "torch":
    import torch
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter

    # torch's compiler warns of its own code, and hides some of that where nothing is an error.
    pytestmark = [
        pytest.mark.filterwarnings(f"ignore::{kind}")
        for kind in ("UserWarning", "DeprecationWarning")
    ]
    IMAGES = np.random.default_rng(0).normal(size=(4, 8, 8, 1)).astype("float32")
    LABELS = np.arange(4) % 3
    # A full batch, again, a smaller last one, and so in the next epoch.
    EPOCHS = (4, 4, 3, 4, 3)

    def _model(layers: int, **sizes) -> ViTImageClassifier:
        keras.utils.set_random_seed(5)
        sizes = {"num_heads": 2, "hidden_dim": 16, "mlp_dim": 24, **sizes}
        backbone = ViTBackbone(image_shape=(8, 8, 1), patch_size=4, num_layers=layers, **sizes)
        return ViTImageClassifier(backbone, 3)

    def _compile(model, jit_compile: bool | str):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=jit_compile)
        return model

    def _losses(model, batches=EPOCHS) -> list[float]:
        return [float(model.train_on_batch(IMAGES[:n], LABELS[:n])) for n in batches]

    def _same(model, eager, losses, wanted) -> None:
        """Losses of each step, and all weights after them, which the gradients made."""
        np.testing.assert_allclose(losses, wanted, rtol=tolerance("losses"))
        assert_equal(model.weights, eager.weights, tolerance("hidden"))

    def _compile_by(backend, monkeypatch) -> None:
        monkeypatch.setattr(compiling._engine, "check_compiler", lambda: None)
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

    @pytest.fixture
    def counter(monkeypatch):
        """The compiler's front end alone: it decides about graphs, and needs no C++ compiler."""
        backend = CompileCounter()
        _compile_by(backend, monkeypatch)
        return backend

    def _breaks() -> dict:
        return dict(torch._dynamo.utils.counters["graph_break"])

    @pytest.mark.nightly
    def test_alike_blocks_share_a_graph_and_a_smaller_batch_adds_one(counter) -> None:
        rates = {"dropout_rate": 0.2, "attention_dropout": 0.2}
        eager = _compile(_model(3, **rates), False)
        wanted = _losses(eager)
        model = _compile(_model(3, **rates), True)
        full, rest = EPOCHS[:2], EPOCHS[2:]
        losses = _losses(model, full)
        graphs = counter.frame_count
        # The last block may be one of its own, as it need not compute all tokens.
        assert graphs in (1, 2)
        losses += _losses(model, rest)
        # Any other size of the batch takes the graph of the smaller one.
        assert counter.frame_count == 2 * graphs
        losses += _losses(model, (2,))
        assert counter.frame_count == 2 * graphs
        assert not _breaks()
        # Dropout draws the same bits in both, so the losses are equal with it too.
        _same(model, eager, losses, wanted + _losses(eager, (2,)))

    @pytest.mark.nightly
    def test_adapters_put_in_after_compile_and_rematerialisation(counter) -> None:
        found = []
        for chosen in (False, True):
            model = _model(2, dropout_rate=0.2, drop_path_rate=0.2)
            remat.rematerialize(model, "block")
            _compile(model, chosen)
            losses = _losses(model, (4,))
            model.enable_lora(2, dropout=0.2)
            _compile(model, chosen)
            found.append((model, losses + _losses(model, (4, 4))))
        (eager, wanted), (model, losses) = found
        assert counter.frame_count
        assert not _breaks()
        assert wanted[1] != wanted[2]
        _same(model, eager, losses, wanted)

    # The blocks of Gemma 4 are of the two kinds that Gemma 3 has, and of two more.
    @pytest.mark.nightly
    @pytest.mark.parametrize("preset", ["gemma3_debug", "gemma4_debug"])
    def test_gemma(counter, preset) -> None:
        ids = np.random.default_rng(1).integers(3, 320, (2, 12))
        inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
        found = []
        for chosen in (False, True):
            keras.utils.set_random_seed(5)
            model = GemmaCausalLM(GemmaBackbone(**PRESETS[preset]))
            model.compile(keras.optimizers.SGD(0.1), weighted_metrics=[], jit_compile=chosen)
            losses = [float(model.train_on_batch(inputs, np.roll(ids, -1, 1))) for _ in range(2)]
            found.append((model, losses))
        (eager, wanted), (model, losses) = found
        made = [block.block for block in model.backbone.blocks]
        kinds = {(each.window is None, each.key_value_source is None) for each in made}
        assert counter.frame_count <= 2 * len(kinds)
        assert not _breaks()
        _same(model, eager, losses, wanted)

    # Backward passes are compiled with either; C++ code of theirs takes half a minute.
    ENGINES = ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)]

    @pytest.mark.parametrize("engine", ENGINES if shutil.which("g++") else ENGINES[:1])
    def test_whole_compilers_give_the_eager_losses(monkeypatch, engine) -> None:
        _compile_by(engine, monkeypatch)
        eager, model = (_compile(_model(1, dropout_rate=0.2), chosen) for chosen in (False, True))
        _same(model, eager, *(_losses(each, (4, 4)) for each in (model, eager)))

    def test_auto_is_eager_where_nothing_was_gained(counter) -> None:
        model = _compile(_model(2), "auto")
        assert "measured" in str(compiling.declines())
        assert not compiling.compiled(model)
        assert compiling.compiled(_compile(model, True))
        assert not model.jit_compile  # Keras' own, of the whole step
        assert not compiling.compiled(_compile(model, False))
        _losses(model, (4,))
        assert not counter.frame_count

    def test_a_keras_file_keeps_the_choice_and_run_eagerly_wins(counter, tmp_path) -> None:
        model = _compile(_model(1), True)
        model.save(tmp_path / "model.keras")
        assert compiling.compiled(keras.models.load_model(tmp_path / "model.keras"))
        with pytest.warns(UserWarning, match="run_eagerly"):
            model.compile("sgd", "mse", run_eagerly=True, jit_compile=True)
        assert not compiling.compiled(model)

    def test_what_cannot_be_compiled_is_refused(counter) -> None:
        refused("jit_compile is 'on'; give True, False", _compile, _model(1), "on")
        model = _model(1)
        remat.rematerialize(model, "attention")
        refused('rematerialised; choose remat "block"', _compile, model, True)
        # "auto" takes what works, and what is changed after compile is looked at in fit.
        model = _compile(_compile(_model(1), "auto"), True)
        model.quantize("int8")
        refused("quantized; keep the base", model.fit, IMAGES, LABELS, verbose=0)

    def test_without_a_compiler_it_says_so(monkeypatch) -> None:
        from torch._inductor import cpp_builder, exc

        def none() -> str:
            raise exc.InvalidCxxCompiler

        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
        monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
        refused(r"needs a C\+\+ compiler", _compile, _model(1), True)
