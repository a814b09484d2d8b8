"""What TensorFlow traces before the first step; collects nothing on the other backends."""

from pathlib import Path

import keras
import numpy as np
import pytest

from kmodels import training
from kmodels.core import runtime
from kmodels.models import ViTImageClassifier

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    import quick_graphs_tensorflow as quick

    def test_graphs_of_these_tests_are_rewritten_as_those_of_users():
        assert not tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer")
        assert all(any(quick.TESTS.glob(f"{start}*")) for start in quick.REWRITTEN)
        quick.rewrite_graphs_of(quick.TESTS / "families" / "test_chat.py")
        try:
            assert tf.config.optimizer.get_experimental_options()["disable_meta_optimizer"]
        finally:
            quick.rewrite_graphs_of(Path(__file__))

    @pytest.mark.parametrize(
        ("method", "metrics"),
        [
            ("fit", {}),
            ("fit", {"metrics": ["accuracy"]}),
            ("evaluate", {"weighted_metrics": ["accuracy"]}),
        ],
    )
    def test_a_step_is_traced_once(method, metrics):
        """Slots or metrics made while tracing would have TensorFlow trace all of it again."""
        model = ViTImageClassifier.from_preset("vit_debug", num_layers=1)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(training.AdamW(1e-3), loss, **metrics)
        traced = []
        norm = model.backbone.blocks[0].mlp_norm
        own = norm.call
        norm.call = lambda x: traced.append(0) or own(x)
        images = np.zeros((4, *model.backbone.config.image_shape), "float32")
        getattr(model, method)(images, np.zeros(4, "int32"), batch_size=2, verbose=0)
        assert len(traced) == 1
        assert model.optimizer.iterations == (2 if method == "fit" else 0)

    def test_what_tracing_took_is_given_back_after_the_first_step(monkeypatch):
        model = ViTImageClassifier.from_preset("vit_debug", num_layers=1)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        trims, seen = [], []
        monkeypatch.setattr(runtime, "malloc_trim", lambda: trims.append(0))
        images = np.zeros((6, *model.backbone.config.image_shape), "float32")
        count = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(len(trims))
        )
        for _ in range(2):
            model.fit(images, np.zeros(6), batch_size=2, verbose=0, callbacks=[count])
        assert seen == [1] * 6
        model.compile("sgd", model.loss)
        model.fit(images, np.zeros(6), batch_size=2, verbose=0)
        assert len(trims) == 2
