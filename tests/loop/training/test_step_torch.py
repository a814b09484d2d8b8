"""The training step on torch; collects nothing on the other backends."""

import keras
import numpy as np

from kmodels.models import ViTBackbone, ViTImageClassifier

if keras.backend.backend() == "torch":

    def test_a_step_begins_without_the_gradients_of_the_one_before(monkeypatch) -> None:
        backbone = ViTBackbone(
            (8, 8, 3), patch_size=4, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16
        )
        model = ViTImageClassifier(backbone, 3)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)

        def held() -> int:
            return sum(v.value.grad is not None for v in model.trainable_variables)

        during, call = [], model.call

        def watched(*args, **kwargs):
            during.append(held())
            return call(*args, **kwargs)

        monkeypatch.setattr(model, "call", watched)
        images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")
        for _ in range(2):
            model.train_on_batch(images, np.arange(2))
            assert held() == len(model.trainable_variables)
        # Keras builds the model by a call before the first step.
        assert len(during) >= 2 and not any(during)
